# SPDX-License-Identifier: Apache-2.0
"""Common statements about sharding as functions: memory, traffic, batches, links."""

from dataclasses import dataclass

from fullshard.core.errors import ConfigurationError
from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.model.decoder import Decoder
from fullshard.plan.predict import predict
from fullshard.plan.run import Run

__all__ = [
    "LinkNeeded",
    "ModelState",
    "Parallelism",
    "compare_parallelisms",
    "efficiency",
    "link_needed",
    "model_state",
    "sent_bytes",
]


@dataclass(frozen=True)
class ModelState:
    """Bytes that rest on one device: parameters, their gradients, the optimizer's state."""

    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float

    @property
    def total_bytes(self) -> float:
        """All of it; activations and gathered units come on top."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


def model_state(numel: int, devices: int = 1, *, item: int = 4, states: int = 2) -> ModelState:
    """Return the bytes that ``numel`` parameters of ``item`` bytes take on each of ``devices``.

    Adam has two ``states`` for each parameter: 4P without sharding, 4P/N with it.
    """
    if numel < 1 or devices < 1:
        raise ConfigurationError(
            f"parameters and devices must be at least 1, got {numel} and {devices}"
        )
    each = numel * item / devices
    return ModelState(each, each, each * states)


def sent_bytes(param_bytes: float, devices: int) -> dict[str, float]:
    """Return the bytes that each device sends in a step, by strategy, in rings and one dtype.

    An all-reduce sends 2(N-1)/N of the gradients; FULL_SHARD gathers twice and reduces once, 1.5
    times that; SHARD_GRAD_OP gathers once, as much as data parallelism.
    """
    each = param_bytes * (devices - 1) / devices
    return {"data parallel": 2 * each, "FULL_SHARD": 3 * each, "SHARD_GRAD_OP": 2 * each}


def efficiency(compute_s: float, communication_s: float, *, overlapped: bool = True) -> float:
    """The share of a step in which the device computes.

    Communication does not depend on the batch, so larger batches help; beside computation it is
    hidden as long as it takes no longer.
    """
    whole = max(compute_s, communication_s) if overlapped else compute_s + communication_s
    return compute_s / whole


@dataclass(frozen=True)
class LinkNeeded:
    """Return the rate that a link must carry so that a step waits little for it.

    ``bytes_per_s`` is for one device in one direction; ``reached_bytes_per_s`` is what the
    cluster's links are expected to reach.
    """

    sent_bytes: float
    compute_s: float
    bytes_per_s: float
    reached_bytes_per_s: float

    @property
    def enough(self) -> bool:
        """True if the links keep up with computation."""
        return self.reached_bytes_per_s >= self.bytes_per_s


def link_needed(model: Decoder, run: Run, cluster: Cluster) -> LinkNeeded:
    """The bandwidth at which communication takes as long as the computation that can hide it.

    No fixed figure does: it falls with the tokens a device computes on between two gathers, and
    rises with the speed of the device. Raises `ConfigurationError` for a single device.
    """
    if cluster.devices < 2:
        raise ConfigurationError("one device needs no link")
    found = predict(model, run, cluster)
    spec = model.spec(run)
    gathered = run.precision.full_dtype(run.param_dtype)
    reduced = run.precision.grad_dtype(run.param_dtype)
    gathers = 2 if run.strategy.sharding.reshard_after_forward else 1
    item = {"bfloat16": 2, "float16": 2, "float32": 4}
    each = spec.numel * (cluster.devices - 1) / cluster.devices * run.accumulate
    sent = each * (gathers * item[gathered] + item[reduced])
    compute_s = found.parts["compute"]
    return LinkNeeded(sent, compute_s, sent / compute_s, sent / found.communication_s)


@dataclass(frozen=True)
class Parallelism:
    """One way to use several devices: what each keeps of the model, and what it sends a step.

    ``idle_share`` of the time devices have nothing to do, whatever the links.
    """

    name: str
    state_bytes: float
    sent_bytes: float
    idle_share: float
    note: str


def compare_parallelisms(model: Decoder, run: Run, devices: int) -> tuple[Parallelism, ...]:
    """Data parallelism, sharding, pipeline and tensor parallelism of the same model, by formula.

    For a step of ``run`` on ``devices`` each way, parameters and gradients travelling in the
    dtype of computation. A pipeline's devices get ``run.accumulate`` micro-batches in turn.
    """
    numel, shape = model.spec(run).numel, model.shape
    item = 2 if run.compute_dtype in ("bfloat16", "float16") else 4
    sent = sent_bytes(float(numel * item), devices)
    whole, part = (model_state(numel, each).total_bytes for each in (1, devices))
    tokens = run.micro_batch * (run.sequence or model.context) * run.accumulate
    boundary = 2.0 * tokens * shape.width * item
    reduces = 4 * shape.layers * tokens * shape.width * item * 2 * (devices - 1) / devices
    bubble = (devices - 1) / (run.accumulate + devices - 1)
    return (
        Parallelism("data parallel", whole, sent["data parallel"], 0.0, "one all-reduce a step"),
        Parallelism(
            "FULL_SHARD",
            part,
            run.accumulate * sent["FULL_SHARD"],
            0.0,
            "gathers hidden behind compute",
        ),
        Parallelism("pipeline", part, boundary, bubble, "activations between neighbours"),
        Parallelism("tensor", part, reduces, 0.0, "four all-reduces a layer, not hidden"),
    )
