# SPDX-License-Identifier: Apache-2.0
"""The width of an interval around a predicted time, and the names of what widens it."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fullshard.plan.cluster.cluster import Cluster, Device
from fullshard.plan.run import AttentionKernel, ExpertKernel, Run
from fullshard.plan.step.clock import Timeline
from fullshard.plan.step.prices import masked_longer
from fullshard.plan.step.script import Script

__all__ = [
    "ALMOST_FULL",
    "Features",
    "Unknown",
    "distance",
    "extrapolated",
    "features_of",
    "half_width",
    "later",
    "uncertain",
    "unknowns",
]

ALMOST_FULL = 0.93
"""Share of a device's memory: beyond, torch's allocator begins to return and retry."""
_SEEN_DEVICES = 512  # the largest cluster among the rows of the fit
_ASSUMED = 0.08  # of time, for each field of a device that nobody has measured
_HOST = 0.2  # of a step: from here on it is bound by the host
_LOOP_S = 0.1  # of a loop's own in a step: data, logging, norms that are waited for
# The fitted host, 16 cores of a virtual machine of 2026, takes 18 us for each kernel that runs, 31
# for each that is counted; others may take twice that.
_SLOW_HOST = 2.0
# Of a step, where tokens go to experts, of which no fitted row has any: if it is told how these
# are computed, and if it is not.
_EXPERTS = (0.08, 0.16)
_UNEVEN = 0.2  # of a step: the fullest of 8 to 64 experts gets 0.6 to 1 before training
_LINK = 0.25  # of exposed communication: links are shared, and routes differ


@dataclass(frozen=True)
class Unknown:
    """Something that a prediction cannot know; ``share`` of the step's time is uncertain by it.

    What makes a step ``later`` only is at most that share.
    """

    name: str
    share: float
    later: bool = False


def unknowns(
    timeline: Timeline,
    run: Run,
    cluster: Cluster,
    memory_share: float = 0.0,
    *,
    away: tuple[float, str] = (0.0, ""),
    experts: bool = False,
) -> tuple[Unknown, ...]:
    """List what the prediction of ``timeline`` rests on unmeasured, the largest first.

    ``away`` is the share of time that the distance from the fitted runs makes uncertain, and what
    makes that distance in words. ``experts`` is true if tokens go to experts.
    """
    found = [*_found(timeline, run, cluster, memory_share), *(_at_experts(run) if experts else ())]
    if away[0] > 0.01:
        found.append(Unknown(f"unlike the nearest fitted run: {away[1] or 'sizes'}", away[0]))
    return tuple(sorted(found, key=lambda each: -each.share))


def _at_experts(run: Run) -> Iterator[Unknown]:
    if run.experts is None:
        yield Unknown("how experts are computed: --experts tells", _EXPERTS[1])
    elif run.experts is ExpertKernel.PADDED and run.imbalance is None:
        yield Unknown("how evenly tokens go to experts: --imbalance tells", _UNEVEN)
    else:
        yield Unknown("how tokens are sent to experts, and how evenly", _EXPERTS[0])


def _found(
    timeline: Timeline, run: Run, cluster: Cluster, memory_share: float
) -> Iterator[Unknown]:
    device, step = cluster.device, timeline.step_s
    for name in device.assumed:
        yield Unknown(f"the {name} of {device.title} is an assumption", _ASSUMED)
    waits = timeline.parts["exposed communication"] + timeline.parts["contention"]
    if waits / step > 0.05:
        yield Unknown("waits for links, which others may share", _LINK * waits / step)
    host = timeline.parts["host"] / step
    if host > 0.02:
        bound = "bound by the host" if host > _HOST else "the device waits for its host"
        yield Unknown(bound, 0.3 * host)
    yield from _later(timeline, run, cluster.device)
    if run.attention is AttentionKernel.FLASH:
        slower = 1 - device.attention["flash2"] / max(device.attention.values())
        share = timeline.attention_s / step * slower / 2
        if share > 0.02:
            yield Unknown("another attention kernel may run: --attention tells which", share)
    if run.fp8:
        yield Unknown("how much of the model runs in float8", 0.08)
    if run.tensor_parallel > 1:
        yield Unknown("tensor parallelism beside sharding", 0.10)
    if memory_share > ALMOST_FULL:
        yield Unknown("memory is almost full: the allocator may retry", 0.08)
    if cluster.devices > _SEEN_DEVICES:
        doublings = math.log2(cluster.devices / _SEEN_DEVICES)
        yield Unknown(f"more than {_SEEN_DEVICES} devices", 0.02 * doublings)


def _later(timeline: Timeline, run: Run, device: Device) -> Iterator[Unknown]:
    step = timeline.step_s
    if run.overhead_s is None:
        name = "the loop's own time: --overhead tells"
        yield Unknown(name, _LOOP_S / step, later=True)
    longer = (timeline.loop_s - timeline.parts["optimizer"]) / step
    if run.optimizer_kernels is None and longer > 0.02:
        name = "an optimizer that loops over parameters: --optimizer-kernels tells"
        yield Unknown(name, longer, later=True)
    if run.attention is AttentionKernel.FLASH and not run.compiled:
        longer = (masked_longer(device) - 1) * timeline.attention_s / step
        if longer > 0.02:
            name = "a mask beside attention, as of padding: --attention tells"
            yield Unknown(name, longer, later=True)
    beside = sum(timeline.parts[name] for name in ("optimizer", "step overhead", "stragglers"))
    slow = (_SLOW_HOST * timeline.launched_s + beside) / step - 1
    if slow > 0:
        yield Unknown("bound by the host, if that is slow", slow, later=True)


def half_width(spread: float, found: tuple[Unknown, ...]) -> float:
    """The logarithm of a 90% interval's half-width: ``spread`` and the unknowns, in quadrature.

    ``spread`` is that of predictions for runs like the fitted ones; the share of an unknown
    counts as one standard deviation.
    """
    shares = (1.645 * each.share for each in found if not each.later)
    return math.sqrt(spread**2 + sum(each**2 for each in shares))


def later(found: tuple[Unknown, ...]) -> float:
    """The share of a step that it may take more because of what is only ever later."""
    return sum(each.share for each in found if each.later)


_FARTHEST = 0.16  # as a share of time: with the rest less than a factor of two in all
_REALLY_FAR = 2.0  # distance: from here on it is more, without an end

_KINDS = ("float8", "lora", "compiled")
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

    @classmethod
    def of(cls, kind: str, sizes: Sequence[float]) -> "Features":
        """Read a `kind`; ``sizes`` are of parameters, sequence and tokens."""
        device, *more = kind.split()
        parameters, sequence, tokens = sizes
        return cls(device, parameters, sequence, tokens, *(name in more for name in _KINDS))

    @property
    def kind(self) -> str:
        """Device, and what it is besides, in words."""
        return " ".join((self.device, *(name for name in _KINDS if getattr(self, name))))


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
    for name in _KINDS:
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
