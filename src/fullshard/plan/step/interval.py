# SPDX-License-Identifier: Apache-2.0
"""The width of an interval around a predicted time, and the names of what widens it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.run import AttentionKernel, Run
from fullshard.plan.step.clock import Timeline

__all__ = ["ALMOST_FULL", "Unknown", "half_width", "loop_s", "unknowns"]

ALMOST_FULL = 0.93
"""Share of a device's memory: beyond, torch's allocator begins to return and retry."""
_SEEN_DEVICES = 512  # the largest cluster among the rows of the fit
_ASSUMED = 0.08  # of time, for each field of a device that nobody has measured
_HOST = 0.2  # of a step: from here on it is bound by the host
_LOOP_S = 0.1  # of a loop's own in a step: data, logging, norms that are waited for
# Of a step, where tokens go to experts, of which no fitted row has any: if it is told how these
# are computed, and if it is not.
_EXPERTS = (0.08, 0.16)
_LINK = 0.25  # of exposed communication: links are shared, and routes differ


@dataclass(frozen=True)
class Unknown:
    """Something that a prediction cannot know; ``share`` of the step's time is uncertain by it."""

    name: str
    share: float


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
    found = list(_found(timeline, run, cluster, memory_share))
    if away[0] > 0.01:
        found.append(Unknown(f"unlike the nearest fitted run: {away[1] or 'sizes'}", away[0]))
    if experts:
        if run.experts is None:
            found.append(Unknown("how experts are computed: --experts tells", _EXPERTS[1]))
        else:
            found.append(Unknown("how tokens are sent to experts, and how evenly", _EXPERTS[0]))
    return tuple(sorted(found, key=lambda each: -each.share))


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


def half_width(spread: float, found: tuple[Unknown, ...]) -> float:
    """The logarithm of a 90% interval's half-width: ``spread`` and the unknowns, in quadrature.

    ``spread`` is that of predictions for runs like the fitted ones; the share of an unknown
    counts as one standard deviation.
    """
    return math.sqrt(spread**2 + sum((1.645 * each.share) ** 2 for each in found))


def loop_s(run: Run) -> float:
    """Seconds that a loop may add to a step, unless ``run`` says what it adds."""
    return _LOOP_S if run.overhead_s is None else 0.0
