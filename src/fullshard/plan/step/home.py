# SPDX-License-Identifier: Apache-2.0
"""The distance of a run from the published runs that the constants were fitted to."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.run import Run
from fullshard.plan.step.script import Script

__all__ = ["Features", "distance", "extrapolated", "features_of", "uncertain"]

_FARTHEST = 0.18  # as a share of time: about a factor of two in all
_REALLY_FAR = 2.0  # distance: from here on it is more, without an end

_STEP = 2.0  # doublings of a size that count as much as another device


class Features(NamedTuple):
    """The features by which runs are near: sizes as logarithms to the base 2."""

    device: str
    parameters: float
    sequence: float
    tokens: float  # of a device's micro-batch
    float8: bool = False
    lora: bool = False
    compiled: bool = False


def features_of(script: Script, run: Run, cluster: Cluster, context: int) -> Features:
    """The features of ``run``; ``context`` is the length of its samples if it does not say so."""
    numel = sum(
        each.full_numel * (run.expert_parallel if unit.dealt_out else 1)
        for unit in script.units
        for each in unit.layout.segments
    )
    length = max(1, run.sequence or context)
    return Features(
        cluster.device.key,
        math.log2(max(1, numel * run.tensor_parallel)),
        math.log2(length),
        math.log2(length * run.micro_batch),
        run.fp8,
        run.lora_rank > 0,
        run.compiled,
    )


def distance(one: Features, other: Features) -> float:
    """The distance of two runs: 1 for another device, or for two doublings of a size."""
    sizes = ((a - b) / _STEP for a, b in zip(one[1:4], other[1:4], strict=True))
    kinds = sum(a != b for a, b in zip(one[4:], other[4:], strict=True))
    return math.sqrt(sum(each**2 for each in sizes) + (one.device != other.device) + kinds)


def extrapolated(run: Features, fitted: Sequence[Features]) -> tuple[float, str]:
    """The distance of ``run`` from the nearest of ``fitted``, and what makes it so, in words."""
    if not fitted:
        return 0.0, ""
    nearest = min(fitted, key=lambda each: distance(run, each))
    said = [
        f"{word(mine)} ({word(other)})"
        for mine, other, word in zip(run[1:4], nearest[1:4], _WORDS, strict=True)
        if abs(mine - other) >= _STEP / 2
    ]
    if run.device != nearest.device:
        said.insert(0, f"{run.device} ({nearest.device})")
    for name in ("float8", "lora", "compiled"):
        if getattr(run, name) != getattr(nearest, name):
            said.append(name if getattr(run, name) else f"not {name}")
    return distance(run, nearest), ", ".join(said)


def uncertain(away: float, far: float) -> float:
    """The share of time that a distance of ``far`` makes uncertain, if one of 1 does ``away``."""
    return min(away * far, _FARTHEST) + away * max(0.0, far - _REALLY_FAR)


_WORDS: tuple[Callable[[float], str], ...] = (
    lambda size: f"{2**size / 1e9:.2g}B parameters",
    lambda size: f"sequences of {2**size:,.0f}",
    lambda size: f"{2**size:,.0f} tokens",
)
