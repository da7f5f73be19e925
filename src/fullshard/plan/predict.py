# SPDX-License-Identifier: Apache-2.0
"""The prediction of one configuration: memory, seconds, tokens, utilisation, energy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.cluster.devices import fitted_constants
from fullshard.plan.memory import MemoryForecast, forecast_memory
from fullshard.plan.model.operations import Model
from fullshard.plan.run import Loss, Run
from fullshard.plan.step.clock import Step, replay
from fullshard.plan.step.interval import ALMOST_FULL, Interval, other_program, unknowns
from fullshard.plan.step.script import Script, write_script

_IDLE_SHARE = 0.3  # of a device's power while it waits: data centre GPUs, clocks up


@dataclass(frozen=True)
class Prediction:
    """The needs of one configuration.

    ``tokens_per_s`` is that of one device, ``mfu`` the share of the device's peak that counts for
    the model.
    """

    model: Model
    run: Run
    cluster: Cluster
    memory: MemoryForecast
    tokens_per_s: float
    mfu: float
    step: Step = field(repr=False, compare=False)

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step."""
        return self.step.step_s

    @property
    def parts(self) -> Mapping[str, float]:
        """The seconds of a step by where they go."""
        return self.step.timeline.parts

    @property
    def communication_s(self) -> float:
        """Seconds in which a step's bytes travel, beside computation or not."""
        return self.step.timeline.communication_s

    @cached_property
    def interval(self) -> Interval:
        """An interval of ``step_s``, how sure it is, and what widens it."""
        program = other_program(self.step, self.model.context)
        return Interval.around(self.step_s, [program, *unknowns(self.step, self.memory_share)])

    @property
    def memory_share(self) -> float:
        """The share of the device's memory that the run fills at its peak."""
        return self.memory.peak_bytes / self.cluster.device.memory_bytes

    @property
    def fits(self) -> bool:
        """True if the run is within the device's memory with no pool of a stream given back."""
        return self.memory_share <= 1

    @property
    def almost_full(self) -> bool:
        """True if torch's allocator may have to return memory and retry."""
        return self.memory_share > ALMOST_FULL

    @property
    def memory_interval(self) -> tuple[int, int]:
        """Least and most bytes of the device's memory, as a 90% interval.

        Programs of nine in ten rows of sources that are not fitted keep up to 15% more and 20% less
        than is told. The least is also without slack and what a compiled loss, of 4 bytes a logit,
        spares, where a plain one is told, or a compiled model with another.
        """
        peak, told, loss = self.memory.peak, self.memory.peak_bytes, self.run.loss
        whole = {Loss.PLAIN: 22, Loss.FREED: 12 if self.run.compiled else 4}.get(loss, 4)
        spared = peak["logits and loss"] * (whole - 4) // whole
        least = told - spared - 2 * peak["allocator slack"]
        return min(least, int(0.8 * told)), int(1.15 * told)

    @property
    def host_bytes(self) -> int:
        """Bytes of state that all devices of a host keep in the host's memory."""
        return self.memory.host_bytes * min(self.cluster.per_host, self.cluster.devices)

    @property
    def cluster_tokens_per_s(self) -> float:
        """Tokens (samples, where there are none) that all devices together train on, a second."""
        return self.tokens_per_s * self.cluster.devices

    @property
    def tokens_per_step(self) -> float:
        """Tokens of one optimizer step, over all devices."""
        return self.cluster_tokens_per_s * self.step_s

    @property
    def watts(self) -> float:
        """Power of one device on average: full while it computes, a part of it while it waits."""
        busy = (self.parts["compute"] + self.parts["optimizer"]) / self.step_s
        return self.cluster.device.power_w * (_IDLE_SHARE + (1 - _IDLE_SHARE) * busy)

    def device_hours(self, tokens: float) -> float:
        """Hours of one device that training on ``tokens`` takes."""
        return tokens / self.tokens_per_s / 3600

    def energy_kwh(self, tokens: float) -> float:
        """Energy of all devices for training on ``tokens``; hosts and cooling are not counted."""
        return self.device_hours(tokens) * self.watts / 1000


def predict(
    model: Model, run: Run, cluster: Cluster, *, script: Script | None = None
) -> Prediction:
    """Predict one configuration of ``model``.

    ``script`` is that of the run, if it is known. Raises `ConfigurationError` if the run cannot be
    on that cluster. A configuration that does not fit into memory is predicted all the same: see
    `Prediction.fits`.
    """
    constants = cluster.device.constants or fitted_constants()
    script = script or write_script(model, run, cluster)
    memory = forecast_memory(script, model, run, cluster)
    step = Step(script, run, cluster, constants, replay(script, run, cluster, constants))
    samples = run.micro_batch * run.accumulate / run.tensor_parallel  # a device's share
    tokens_per_s = samples * (run.sequence or model.context) / step.step_s
    flops = samples * model.model_flops(run) / step.step_s
    mfu = flops / cluster.device.peak(run.product_dtype)
    return Prediction(model, run, cluster, memory, tokens_per_s, mfu, step)
