# SPDX-License-Identifier: Apache-2.0
"""The prediction of one configuration: memory, seconds, tokens, utilisation, energy."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from fullshard.plan.cluster.cluster import Cluster, Constants
from fullshard.plan.cluster.devices import fitted_constants, fitted_runs, fitted_spread
from fullshard.plan.memory import MemoryForecast, forecast_memory
from fullshard.plan.model.operations import Model
from fullshard.plan.run import Loss, Recompute, Run
from fullshard.plan.step.clock import replay
from fullshard.plan.step.interval import (
    ALMOST_FULL,
    Features,
    Unknown,
    extrapolated,
    features_of,
    half_width,
    later,
    uncertain,
    unknowns,
)
from fullshard.plan.step.script import Script, write_script

__all__ = ["Prediction", "predict"]

_IDLE_SHARE = 0.3  # of a device's power while it waits: data centre GPUs, clocks up


@dataclass(frozen=True)
class Prediction:
    """The needs of one configuration.

    ``step_s`` is the seconds of an optimizer step, ``low_s`` and ``high_s`` a 90% interval around
    it, ``parts`` where they go. ``tokens_per_s`` is that of one device, ``mfu`` the share of the
    device's peak that counts for the model. ``unknowns`` name what widens the interval.
    """

    model: Model
    run: Run
    cluster: Cluster
    memory: MemoryForecast
    step_s: float
    low_s: float
    high_s: float
    parts: Mapping[str, float]
    communication_s: float
    tokens_per_s: float
    mfu: float
    unknowns: tuple[Unknown, ...]

    @property
    def fits(self) -> bool:
        """True if the run is within the device's memory with no pool of a stream given back."""
        return self.memory.peak_bytes <= self.cluster.device.memory_bytes

    @property
    def almost_full(self) -> bool:
        """True if torch's allocator may have to return memory and retry."""
        return self.memory.peak_bytes > ALMOST_FULL * self.cluster.device.memory_bytes

    @property
    def memory_interval(self) -> tuple[int, int]:
        """Least and most bytes of the device's memory, as a 90% interval.

        The least is without what the caller of a plain loss may not keep, and without slack. The
        most has what is left of the logits' memory where later tensors, those of recomputed blocks
        above all, have cut it up: half of it, as on an H100.
        """
        peak = self.memory.peak
        cut_up = peak["logits and loss"] // 2 if self.run.recompute is Recompute.FULL else 0
        spared = 5 * peak["logits and loss"] // 11 if self.run.loss is Loss.PLAIN else 0
        slack = peak["allocator slack"]
        least = self.memory.peak_bytes - spared - 2 * slack
        return least, self.memory.peak_bytes + max(slack // 2, cut_up)

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
    model: Model,
    run: Run,
    cluster: Cluster,
    constants: Constants | None = None,
    *,
    script: Script | None = None,
) -> Prediction:
    """Predict one configuration of ``model``.

    ``script`` is that of the run, if it is known. Raises `ConfigurationError` if the run cannot be
    on that cluster. A configuration that does not fit into memory is predicted all the same: see
    `Prediction.fits`.
    """
    constants = constants or cluster.device.constants or fitted_constants()
    script = script or write_script(model, run, cluster)
    memory = forecast_memory(script, model, run, cluster)
    timeline = replay(script, run, cluster, constants)
    step_s = timeline.step_s
    samples = run.micro_batch * run.accumulate / run.tensor_parallel  # a device's share
    share = memory.peak_bytes / cluster.device.memory_bytes
    experts = run.expert_parallel > 1 or any(
        each.forward.count > 1 for call in script.calls for each in call.operations
    )
    away = _away(script, model, run, cluster)
    found = unknowns(timeline, run, cluster, share, away=away, experts=experts)
    width = math.exp(half_width(fitted_spread(), found))
    flops = samples * model.model_flops(run) / step_s
    return Prediction(
        model,
        run,
        cluster,
        memory,
        step_s,
        step_s / width,
        step_s * (width + later(found)),
        timeline.parts,
        timeline.communication_s,
        samples * (run.sequence or model.context) / step_s,
        flops / cluster.device.peak(run.product_dtype),
        found,
    )


@cache
def _fitted() -> tuple[float, tuple[Features, ...]]:
    share, kinds = fitted_runs()
    runs = (Features.of(kind, sizes) for kind, told in kinds.items() for sizes in told)
    return share, tuple(runs)


def _away(script: Script, model: Model, run: Run, cluster: Cluster) -> tuple[float, str]:
    """The uncertainty by distance from the fitted runs; a calibrated device is like theirs."""
    share, runs = _fitted()
    mine = features_of(script, run, cluster, model.context)
    if cluster.device.constants is not None:
        runs = tuple(each._replace(device=mine.device) for each in runs)
    far, words = extrapolated(mine, runs)
    return uncertain(share, far), words
