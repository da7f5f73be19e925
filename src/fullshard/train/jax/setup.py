# SPDX-License-Identifier: Apache-2.0
"""From settings to what a run works with: data, a mesh, and a compiled step with its state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from fullshard.core.presets import training_flops_per_token, transformer
from fullshard.host_memory import host_total_bytes, resident_bytes
from fullshard.jax import (
    StoredAs,
    TrainState,
    TrainStep,
    create_mesh,
    load_weights,
    make_train_step,
    torch_names,
)
from fullshard.plan.cluster.read import device_of_driver
from fullshard.train.config import Config, check_world
from fullshard.train.data import Batch, Dataset, load
from fullshard.train.fits import check_memory
from fullshard.train.jax.models import NnxDigitNet, NnxGPT, digit_flops
from fullshard.train.jax.optimizer import adamw
from fullshard.train.summary import Facts

__all__ = ["Devices", "JaxModel", "JaxRun", "build_model", "cross_entropy", "loss_of", "prepare"]

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass(frozen=True)
class JaxModel:
    """A model to be made, the cost of a token (forward and backward), and its names in torch.

    The names are those of the model of `fullshard.train.torch.models`, whose files this one reads.
    """

    make: Callable[[], nnx.Module]
    flops_per_token: float
    tied: Mapping[str, str] = field(default_factory=dict)

    def names(self) -> dict[str, StoredAs]:
        """Return the name of each array in the torch model; nothing is computed."""
        return torch_names(nnx.eval_shape(self.make), self.tied)


@dataclass(frozen=True)
class Devices:
    """The devices of a run, as one mesh over all processes."""

    mesh: Mesh

    @property
    def size(self) -> int:
        """Number of devices."""
        return int(self.mesh.devices.size)

    @property
    def is_first(self) -> bool:
        """True if this process prints and writes."""
        return jax.process_index() == 0

    def __str__(self) -> str:
        device, processes = self.mesh.devices.flat[0], jax.process_count()
        kind = "CPU devices" if device.platform == "cpu" else device.device_kind
        if processes > 1:
            return f"{self.size} {kind} of {processes} processes"
        return (
            f"{self.size} simulated {kind}" if device.platform == "cpu" else f"{self.size} {kind}"
        )

    def peak_flops(self, dtype: str) -> float | None:
        """FLOP/s that one device reaches at most; known for bf16 on some GPUs."""
        known = device_of_driver(self.mesh.devices.flat[0].device_kind)
        return known.peak("bfloat16") if known and dtype == "bfloat16" else None

    def memory_used(self) -> dict[str, int]:
        """Return the most bytes used so far and how many there are: of a device, or the host."""
        told = jax.local_devices()[0].memory_stats() or {}
        if "peak_bytes_in_use" in told and "bytes_limit" in told:
            used, total = told["peak_bytes_in_use"], told["bytes_limit"]
        else:
            used, total = resident_bytes()[1], host_total_bytes()
        return {"memory_bytes": used, "memory_total_bytes": total}


@dataclass(frozen=True)
class JaxRun:
    """The parts of a run. The state it begins with is apart: every step uses one up."""

    config: Config
    devices: Devices
    data: Dataset
    step: TrainStep
    plain: JaxModel

    def batch(self, arrays: Batch) -> Batch:
        """Return inputs and targets of the whole step as the model wants them."""
        inputs, targets = arrays
        if np.issubdtype(inputs.dtype, np.floating):
            inputs = inputs.astype(_DTYPES[self.config.train.dtype])
        else:
            inputs = inputs.astype(np.int32)
        return inputs, targets.astype(np.int32)

    @property
    def facts(self) -> Facts:
        """Facts about the run, known before it begins."""
        numel = sum(each.spec.numel for each in self.step.placements)
        return Facts(self.data, numel, self.plain.flops_per_token, str(self.devices))


def prepare(config: Config, devices: list[jax.Device]) -> tuple[JaxRun, TrainState]:
    """Load the data, and make model and optimizer sharded over ``devices``.

    With several processes all of them must call. Raises `ConfigurationError` for data or weights
    that cannot be read, or a batch that does not divide.
    """
    check_world(config, len(devices))
    told = jax.local_devices()[0].memory_stats() or {}
    simulated = host_total_bytes() // len(jax.local_devices())
    check_memory(config, len(devices), told.get("bytes_limit", simulated))
    data = load(config)
    replicas = len(devices) if config.shard.strategy == "NO_SHARD" else 1
    mesh = create_mesh(fsdp=len(devices) // replicas, data=replicas, devices=devices)
    plain = build_model(config)
    step = make_train_step(
        plain.make,
        adamw(config.optim, config.train.steps),
        loss_of,
        mesh,
        remat=_remat(config),
        at_most_unsharded=1.0,  # any number of devices will do; the table of memory tells
    )
    state = step.init()
    if config.train.initial_weights:
        state = load_weights(config.train.initial_weights, step, state, plain.names())
    return JaxRun(config, Devices(mesh), data, step, plain), state


def build_model(config: Config) -> JaxModel:
    """Return the plain model with parameters of the dtype asked for; nothing is computed yet."""
    dtype, seed = _DTYPES[config.train.dtype], config.train.seed
    if config.model.name == "mnist":
        return JaxModel(
            lambda: NnxDigitNet(dtype, rngs=nnx.Rngs(seed, dropout=seed + 1)), digit_flops()
        )
    shape = transformer(config.model.preset)
    return JaxModel(
        lambda: NnxGPT(shape, dtype, rngs=nnx.Rngs(seed)),
        training_flops_per_token(shape, config.context),
        {"output.weight": "embedding.weight"} if shape.tied else {},
    )


def _remat(config: Config) -> Literal["block", "none"]:
    """SHARD_GRAD_OP keeps full parameters from forward to backward, like all else."""
    return "none" if config.shard.strategy == "SHARD_GRAD_OP" else "block"


def cross_entropy(logits: Array, targets: Array) -> Array:
    """Return the loss of each target, float32, from ``logits`` (..., classes)."""
    chances = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(chances, targets[..., None], axis=-1)[..., 0]


def loss_of(model: Any, batch: tuple[Array, Array]) -> Array:
    """Return mean loss per target."""
    inputs, targets = batch
    return cross_entropy(model(inputs), targets).mean()
