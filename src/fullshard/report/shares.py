# SPDX-License-Identifier: Apache-2.0
"""Time dealt out: of intervals that overlap, each moment goes to one.

[Note: Each moment once]
A forward encloses those of inner units, and waits; adding up such times counts moments twice. Here
a moment goes to the bid of the greatest weight, among equals to the one that began last, and of
these to the one that ends first (the innermost), so that all shares of a step add up to the step.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fullshard.report.record import RecordedStep

Share = tuple[str, int | None]
"""Something that takes time: an op or span, and the number of its unit, if it has one."""

_WEIGHTS = {"fetch": 0, "evict": 0, "forward": 1, "backward": 1, "await_gather": 3}
_WEIGHTS["await_reduce"] = 3
_SPAN = 2
_OTHER_SPANS = 1.5  # a user's own word may lie around anything


class Bid(NamedTuple):
    """An interval in seconds that bids its moments."""

    begin_s: float
    end_s: float
    weight: float
    share: Share


class Portion(NamedTuple):
    """Time that belongs to one share alone; "host" is what nothing bids."""

    begin_s: float
    end_s: float
    share: Share


def deal(bids: Sequence[Bid], begin_s: float, end_s: float) -> Iterator[Portion]:
    """Cut ``begin_s`` to ``end_s`` into parts, in order and without gaps."""
    waiting = sorted(bids)
    keys = [(-bid.weight, -bid.begin_s, bid.end_s) for bid in waiting]
    times = {time for bid in bids for time in bid[:2] if begin_s < time < end_s}
    heap: list[tuple[tuple[float, float, float], int]] = []
    place, at = 0, begin_s
    for until in sorted(times | {end_s}):
        while place < len(waiting) and waiting[place].begin_s <= at:
            heapq.heappush(heap, (keys[place], place))
            place += 1
        while heap and waiting[heap[0][1]].end_s <= at:
            heapq.heappop(heap)
        if until > at:
            yield Portion(at, until, waiting[heap[0][1]].share if heap else ("host", None))
        at = until


def parts_of(step: RecordedStep) -> list[Portion]:
    """Deal out a step that was recorded op by op."""
    bids = [
        Bid(op.begin_s, op.end_s, _WEIGHTS[op.op], (op.op, op.unit))
        for op in step.ops or ()
        if op.op in _WEIGHTS and op.end_s > op.begin_s
    ]
    for span in step.spans:
        known = span.what in ("data", "optimizer", "checkpoint", "evaluation", "compile")
        weight = _SPAN if known else _OTHER_SPANS
        bids.append(Bid(span.begin_s, span.end_s, weight, (span.what, None)))
    return list(deal(bids, step.begin_s, step.end_s))


def shares_of(step: RecordedStep) -> dict[Share, float]:
    """Return the seconds of all shares of a step, which add up to it."""
    if step.ops is None:
        return summed_shares(step)
    shares: dict[Share, float] = {}
    for part in parts_of(step):
        shares[part.share] = shares.get(part.share, 0.0) + part.end_s - part.begin_s
    return shares


def summed_shares(step: RecordedStep) -> dict[Share, float]:
    """Return the shares of a step by its sums, without units; the rest is the host's."""
    shares: dict[Share, float] = {}
    left = step.duration_s
    for what in sorted(step.sums_s, key=lambda what: (what in ("forward", "backward"), what)):
        shares[what, None] = min(left, step.sums_s[what])
        left -= shares[what, None]
    return shares | {("host", None): left}
