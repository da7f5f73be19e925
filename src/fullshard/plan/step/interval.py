# SPDX-License-Identifier: Apache-2.0
"""The interval around a predicted step, how sure it is, and the names of what widens it."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fullshard.plan.cluster.cluster import Cluster, Link
from fullshard.plan.cluster.devices import fitted_runs, fitted_spread
from fullshard.plan.run import AttentionKernel, Engine, ExpertKernel, Run
from fullshard.plan.step.clock import Step, replay
from fullshard.plan.step.prices import masked_longer
from fullshard.plan.step.script import Script

ALMOST_FULL = 0.93
"""Share of a device's memory: beyond, torch's allocator begins to return and retry."""
# What a device may reach less than is assumed of it, as a share of the time that it computes. Of
# AMD's, the software that runs on them: in public releases training took up to twice as long as
# products alone let expect (SemiAnalysis, MI300X vs H100 vs H200, 2024); devices.toml has 1.4, and
# Qwen 3 on MI355X took 1.3 to 2.5 times as long again. All kernels reach may be reached, too.
_ASSUMED = {
    "software": ("what its software lets training reach", 1.0),
    "sustained": ("what matrix products reach", 0.14),
    "attention": ("what attention reaches", 0.14),
    "bandwidth": ("the bandwidth of its memory", 0.14),
    "flops": ("the peak", 0.14),
}
LOOP_S = 0.1  # of a loop's own in a step: data, logging, norms that are waited for
# The fitted host, 16 cores of a virtual machine of 2026, takes 20 us for each kernel that runs, 34
# for each that is counted; others may take twice that.
SLOW_HOST = 2.0
# Engines beside FSDP call Python for each module, each time that it is needed, and not for each
# unit: seconds of the host for each block and micro-batch, at most.
_OTHER_ENGINE_S = 12e-3
# Of an end, where tokens go to experts, of which no fitted row has any: if it is told how these are
# computed, and if it is not.
_EXPERTS = (0.13, 0.26)
_UNEVEN = 0.33  # of an end: the fullest of 8 to 64 experts gets 0.6 to 1 before training
SLOW_INSIDE = 0.25  # of what is assumed of links inside a host: `devices.toml` has what others move
_FAST_LINK = {"inside": 4.0, "between": 2.0}
_WIDEST = math.log(2)  # of an interval: one that is wider says nothing that can be used
_NINE_IN_TEN = 1.645  # deviations of a normal distribution


@dataclass(frozen=True)
class Unknown:
    """Something that a prediction cannot know.

    By it alone a step may take ``later`` longer and ``sooner`` less, as logarithms of its time, in
    nine of ten cases.
    """

    name: str
    later: float
    sooner: float = 0.0


@dataclass(frozen=True)
class Interval:
    """The ends of an interval, at most a factor of two apart, and what is unknown, largest first.

    ``share`` is that of such runs that are expected inside: nine in ten, or less where so many
    would need more than a factor of two.
    """

    low_s: float
    high_s: float
    share: float
    unknowns: tuple[Unknown, ...]

    @classmethod
    def around(cls, step_s: float, found: Sequence[Unknown]) -> "Interval":
        """Join the spread of runs like the fitted ones and the unknowns, in quadrature."""
        sooner, later, share = cut(*ends(fitted_spread(), found))
        said = [each for each in found if max(each.later, each.sooner) > 0.02]
        largest = sorted(said, key=lambda each: -max(each.later, each.sooner))
        return cls(step_s * math.exp(-sooner), step_s * math.exp(later), share, tuple(largest))


def ends(spread: float, found: Sequence[Unknown]) -> tuple[float, float]:
    """By how much a step may take less and more, as logarithms of its time."""
    sooner = math.hypot(spread, *(each.sooner for each in found))
    return sooner, math.hypot(spread, *(each.later for each in found))


def cut(sooner: float, later: float) -> tuple[float, float, float]:
    """Cut ends of a 90% interval to a factor of two, and tell the share that is then inside.

    By a normal distribution, of which both ends are cut alike.
    """
    kept = min(1.0, _WIDEST / (sooner + later))
    return kept * sooner, kept * later, math.erf(kept * _NINE_IN_TEN / math.sqrt(2))


def unknowns(step: Step, memory_share: float) -> list[Unknown]:
    """List what the prediction of ``step`` rests on unmeasured, but for the program that runs.

    ``memory_share`` is the part of the device's memory that the run fills.
    """
    kinds = (assumed_of, _of_attention, _of_links, _of_loop, _of_experts)
    found = [each for kind in kinds for each in kind(step)]
    if step.run.fp8:
        found.append(Unknown("how much of the model runs in float8", 0.13, 0.13))
    if memory_share > ALMOST_FULL:
        found.append(Unknown("memory is almost full: the allocator may retry", 0.3))
    return found


class Program(NamedTuple):
    """The logarithms that another program than those of fitted runs adds to both ends."""

    sooner: float
    later: float

    def unknown(self, name: str, far: float) -> Unknown:
        """Tell what it adds at a distance of ``far`` from fitted runs.

        From a little distance on it is another program, as those of other sources are; from a
        large one on the rest of it is new, too.
        """
        near, new = _AWAY * far, _AWAY * max(0.0, far - _REALLY_FAR)
        return Unknown(name, min(near, self.later) + new, min(near, self.sooner) + new)


def other_program(step: Step, context: int) -> Unknown:
    """Tell how unsure it is that the run's program is like the fitted ones.

    ``context`` is the length of its samples if the run does not say so.
    """
    cluster, (added, kinds) = step.cluster, fitted_runs()
    mine = features_of(step.script, step.run, cluster, context)
    runs = [Features.of(kind, sizes) for kind, told in kinds.items() for sizes in told]
    if cluster.device.constants is not None:  # a calibrated device is like theirs
        runs = [each._replace(device=mine.device) for each in runs]
    far, words = extrapolated(mine, runs)
    name = "another program than those of fitted runs"
    name += f"; from the nearest it differs by {words}" if words else ""
    return Program(*added).unknown(name, far)


def assumed_of(step: Step) -> Iterator[Unknown]:
    """List what is assumed of the device that computes ``step``."""
    device, computes = step.cluster.device, step.share("compute")
    for name in device.assumed:
        if name in _ASSUMED:
            words, most = _ASSUMED[name]
            later = math.log1p(most * computes)
            sooner = min(later, 0.34 if name == "software" else 0.13)
            yield Unknown(f"{words} on {device.title} is an assumption", later, sooner)


def _of_attention(step: Step) -> Iterator[Unknown]:
    device = step.cluster.device
    if step.run.attention is AttentionKernel.FLASH:
        slower = device.attention[device.sdpa] / device.attention["flash2"]
        if not step.run.compiled:
            slower = masked_longer(device)
        longer = (slower - 1) * step.timeline.attention_s / step.step_s
        name = "another kernel of attention, or a mask beside it: --attention tells"
        yield Unknown(name, math.log1p(longer))


def _of_links(step: Step) -> Iterator[Unknown]:
    """Tell what links would change that nobody has told: of several hosts those between them."""
    cluster = step.cluster
    name, slow = "between", cluster.device.slow_between
    if cluster.hosts == 1:
        name, slow = "inside", SLOW_INSIDE if "inside" in cluster.device.assumed else 1.0
    if name in cluster.untold and slow < 1 and step.timeline.communication_s:
        later, sooner = _with_link(step, name, slow), _with_link(step, name, _FAST_LINK[name])
        yield Unknown(f"links {name} hosts: --{name} tells", later, -sooner)


def _with_link(step: Step, name: str, share: float) -> float:
    """The logarithm of how much longer a step takes if a link has a ``share`` of its bandwidth."""
    link: Link = getattr(step.cluster, name)
    other: dict[str, Any] = {name: replace(link, bandwidth=share * link.bandwidth)}
    changed = replace(step.cluster, **other)
    return math.log(replay(step.script, step.run, changed, step.constants).step_s / step.step_s)


def _of_loop(step: Step) -> Iterator[Unknown]:
    """The host: a loop's own time, an optimizer that loops, another engine, a slow machine."""
    run, step_s, timeline = step.run, step.step_s, step.timeline
    if run.overhead_s is None:
        name, own = "the loop's own time: --overhead tells", step.share("step overhead")
        yield Unknown(name, math.log1p(LOOP_S / step_s), -math.log1p(-own))
    if run.optimizer_kernels is None:
        name = "an optimizer that loops over parameters: --optimizer-kernels tells"
        longer = (timeline.loop_s - timeline.parts["optimizer"]) / step_s
        yield Unknown(name, math.log1p(max(0.0, longer)))
    if run.engine is Engine.OTHER:
        blocks = run.accumulate * (len(step.script.units) - 1)
        name = "another engine than FSDP, of which nothing is modelled"
        # Half of what compute could hide is told as waited for: it may be all, or none.
        hidden = max(0.0, timeline.communication_s - timeline.parts["exposed communication"])
        later = math.log1p((blocks * _OTHER_ENGINE_S + hidden) / step_s)
        yield Unknown(name, later, max(0.2, -math.log1p(-min(0.5, hidden / step_s))))
    host = step.share("host")
    beside = sum(step.share(name) for name in ("optimizer", "step overhead", "stragglers"))
    slow = math.log(max(1.0, SLOW_HOST * timeline.launched_s / step_s + beside))
    yield Unknown("bound by the host, if that is slow", max(slow, 0.5 * host), 0.5 * host)


def _of_experts(step: Step) -> Iterator[Unknown]:
    run = step.run
    grouped = (each.forward.count > 1 for call in step.script.calls for each in call.operations)
    if run.expert_parallel == 1 and not any(grouped):
        return
    name, end = "how tokens are sent to experts, and how evenly", _EXPERTS[0]
    if run.experts is None:
        name, end = "how experts are computed: --experts tells", _EXPERTS[1]
    elif run.experts is ExpertKernel.PADDED and run.imbalance is None:
        name, end = "how evenly tokens go to experts: --imbalance tells", _UNEVEN
    yield Unknown(name, end, end)


_AWAY = 0.5  # of an end, for a distance of 1
_REALLY_FAR = 1.5  # distance: from here on it is more, without an end

_STEP = 2.0  # doublings of a size that count as much as another device


class Features(NamedTuple):
    """The features by which runs are near.

    ``sizes`` are logarithms to the base 2 of parameters, of a sample's tokens, of a micro-batch's;
    ``also`` are words of `features_of`.
    """

    device: str
    sizes: tuple[float, ...]
    also: frozenset[str] = frozenset()

    @classmethod
    def of(cls, kind: str, sizes: Sequence[float]) -> "Features":
        """Read a `kind` and the sizes."""
        device, *also = kind.split()
        return cls(device, tuple(sizes), frozenset(also))

    @property
    def kind(self) -> str:
        """Device, and what it is besides, in words."""
        return " ".join((self.device, *sorted(self.also)))


def features_of(script: Script, run: Run, cluster: Cluster, context: int) -> Features:
    """The features of ``run``; ``context`` is the length of its samples if it does not say so."""
    numel = sum(
        each.full_numel * (run.expert_parallel if unit.dealt_out else 1)
        for unit in script.units
        for each in unit.layout.segments
    )
    length = max(1, run.sequence or context)
    sizes = max(1, numel * run.tensor_parallel), length, length * run.micro_batch
    also = {
        "float8": run.fp8,
        "lora": run.lora_rank > 0,
        "compiled": run.compiled,
        "other-engine": run.engine is Engine.OTHER,
    }
    told = frozenset(word for word, is_so in also.items() if is_so)
    return Features(cluster.device.key, tuple(math.log2(each) for each in sizes), told)


def distance(one: Features, other: Features) -> float:
    """The distance of two runs: 1 for another device or word, or for two doublings of a size."""
    sizes = (((a - b) / _STEP) ** 2 for a, b in zip(one.sizes, other.sizes, strict=True))
    return math.sqrt(sum(sizes) + (one.device != other.device) + len(one.also ^ other.also))


def extrapolated(run: Features, fitted: Sequence[Features]) -> tuple[float, str]:
    """The distance of ``run`` from the nearest of ``fitted``, and what makes it so, in words."""
    nearest = min(fitted, key=lambda each: distance(run, each))
    said = [f"{run.device} ({nearest.device})"] if run.device != nearest.device else []
    said += [
        f"{word(mine)} ({word(other)})"
        for mine, other, word in zip(run.sizes, nearest.sizes, _WORDS, strict=True)
        if abs(mine - other) >= _STEP / 2
    ]
    others = sorted(run.also ^ nearest.also)
    said += [each if each in run.also else f"not {each}" for each in others]
    return distance(run, nearest), ", ".join(said)


_WORDS: tuple[Callable[[float], str], ...] = (
    lambda size: f"{2**size / 1e9:.2g}B parameters",
    lambda size: f"sequences of {2**size:,.0f}",
    lambda size: f"{2**size:,.0f} tokens",
)
