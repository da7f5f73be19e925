# SPDX-License-Identifier: Apache-2.0
"""Steps as they would be: the schedule's ops by a small clock, on any number of ranks.

Each rank computes; one link carries collectives in the order in which they are issued, and begins
one when the last rank has issued it. What a step of a record would gain from another setting is the
difference of two such replays.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low

from fullshard.core.schedule import Event, Moment, OpKind, UnitPolicy, compile_step
from fullshard.core.strategy import Prefetch
from fullshard.report.measure import EXPOSED, MeasuredRun, TimedCollective, Wanted, pairs_of
from fullshard.report.record import AWAITED, RecordedStep, TimedOp
from fullshard.report.shares import Share, parts_of


@dataclass(frozen=True)
class RankWork:
    """One rank's seconds of computation by unit; ``issue_s`` is the host's for any collective."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    issue_s: float = 0.0


@dataclass(frozen=True)
class Costs:
    """The work of each rank, and seconds on the link by unit."""

    work: Sequence[RankWork]
    gather_s: Sequence[float]
    reduce_s: Sequence[float]

    def sending(self, part: float) -> "Costs":
        """Return the costs if ``part`` of the bytes were sent."""
        gathers, reduces = ([each * part for each in x] for x in (self.gather_s, self.reduce_s))
        return replace(self, gather_s=gathers, reduce_s=reduces)


@dataclass(frozen=True)
class Setting:
    """All that the schedule knows of a step."""

    policies: Mapping[int, UnitPolicy]
    prefetch: Prefetch

    def keeping_full(self) -> "Setting":
        """Return the setting under SHARD_GRAD_OP, which gathers once."""
        kept = {
            unit: replace(policy, reshard_after_forward=False)
            for unit, policy in self.policies.items()
        }
        return replace(self, policies=kept)


def replay(
    events: Sequence[Event], setting: Setting, costs: Costs, begin_s: Sequence[float] = ()
) -> list[list[TimedOp]]:
    """Return all ranks' ops, which begin at ``begin_s`` (all at 0), in seconds, without sizes."""
    ranks = range(len(costs.work))
    now, link_s = list(begin_s) or [0.0 for _ in ranks], 0.0
    ops: list[list[TimedOp]] = [[] for _ in ranks]
    done_s: dict[tuple[OpKind, int], float] = {}
    open_at: dict[tuple[str, int], list[float]] = {}
    issued: dict[tuple[OpKind, int], list[int]] = {}
    compiled = compile_step(events, setting.policies, setting.prefetch)
    for event, following in zip(events, compiled, strict=True):
        _, unit = event
        what, begins = _PHASES.get(event.moment, ("", False))
        if what and not begins:
            for rank in ranks:
                work = costs.work[rank]
                now[rank] += (work.forward_s if what == "forward" else work.backward_s)[unit]
                begin = open_at[what, unit][rank]
                ops[rank].append(TimedOp(what, unit, begin, now[rank]))
        elif what:
            open_at[what, unit] = list(now)
        for kind, number in following:
            if kind in (OpKind.GATHER, OpKind.REDUCE, OpKind.ALL_REDUCE):
                link_s = max(link_s, *now)
                link_s += (costs.gather_s if kind is OpKind.GATHER else costs.reduce_s)[number]
                done_s[kind, number] = link_s
                issued[kind, number] = [len(each) for each in ops]
                for rank in ranks:
                    ops[rank].append(TimedOp(kind.value, number, now[rank], link_s))
                    now[rank] += costs.work[rank].issue_s
            elif kind in _AWAITS:
                started = next((k for k in _AWAITS[kind] if (k, number) in issued), None)
                if started is None:
                    continue
                at = issued.pop((started, number))
                for rank in ranks:
                    until = max(now[rank], done_s[started, number])
                    place = at[rank]
                    ops[rank][place] = ops[rank][place]._replace(end_s=until)
                    waiter = unit if unit >= 0 else None
                    ops[rank].append(TimedOp(kind.value, number, now[rank], until, waiter=waiter))
                    now[rank] = until
            else:
                for rank in ranks:
                    ops[rank].append(TimedOp(kind.value, number, now[rank], now[rank]))
    return ops


_PHASES = {
    Moment.FORWARD_BEGIN: ("forward", True),
    Moment.FORWARD_END: ("forward", False),
    Moment.BACKWARD_BEGIN: ("backward", True),
    Moment.BACKWARD_END: ("backward", False),
}
_AWAITS = {OpKind(wait): tuple(map(OpKind, ended)) for wait, ended in AWAITED.items()}


def events_of(step: RecordedStep) -> list[Event]:
    """Return the events of a step that was recorded op by op, as units enclose each other."""
    begin, end = Moment.FORWARD_BEGIN, Moment.FORWARD_END
    events = list(_nested(step, "forward", begin, end))
    events += _nested(step, "backward", Moment.BACKWARD_BEGIN, Moment.BACKWARD_END)
    return [*events, Event(Moment.STEP_END)]


def _nested(step: RecordedStep, what: str, begin: Moment, end: Moment) -> Iterator[Event]:
    ops = [op for op in step.ops or () if op.op == what]
    pending: list[TimedOp] = []
    for op in sorted(ops, key=lambda op: (op.begin_s, -op.end_s)):
        while pending and pending[-1].end_s <= op.begin_s:
            yield Event(end, pending.pop().unit)
        pending.append(op)
        yield Event(begin, op.unit)
    while pending:
        yield Event(end, pending.pop().unit)


def setting_of(measured: MeasuredRun, step: RecordedStep) -> Setting:
    """Return the setting that a step recorded op by op tells of."""
    settings = measured.first.facts.settings
    reduces = settings.get("reduces_in_flight")
    prefetch = Prefetch(
        _gathered_ahead(step, "forward"),
        _gathered_ahead(step, "backward"),
        reduces if type(reduces) is int and reduces > 0 else 1,
    )
    drops = settings.get("strategy") not in ("SHARD_GRAD_OP", "NO_SHARD", "_HYBRID_SHARD_ZERO2")
    policies = {
        number: UnitPolicy(
            gathered=unit.numel > 0 and settings.get("strategy") != "NO_SHARD",
            reduced=unit.grad_bytes > 0,
            reshard_after_forward=drops and number > 0,
            full_bytes=unit.full_bytes,
        )
        for number, unit in enumerate(measured.units)
    }
    return Setting(policies, prefetch)


def _gathered_ahead(step: RecordedStep, what: str) -> int:
    """Return how many units ahead of its own a gather begins, by what is computed meanwhile.

    Settings do not tell: units may name those to gather, and small ones go further ahead.
    """
    parts = [part for part in parts_of(step) if part.share[0] == what]
    units = {unit for (_, unit) in (part.share for part in parts)}
    if len(units) < 2:
        return 1
    each_s = sum(part.end_s - part.begin_s for part in parts) / len(units)
    first_s = min(op.begin_s for op in step.ops or () if op.op == what)
    leads = sorted(
        sum(
            max(0.0, min(part.end_s, wait.begin_s) - max(part.begin_s, gather.begin_s))
            for part in parts
        )
        for gather, wait in pairs_of(step.ops or ())
        if gather.op == "gather" and first_s <= wait.begin_s <= parts[-1].end_s
    )
    return round(leads[len(leads) * 3 // 4] / each_s) if leads and each_s else 1


def costs_of(measured: MeasuredRun) -> Costs:
    """Return what a rank in the middle computes, and the seconds of collectives on the link.

    What cannot be seen on the link is priced by bytes as the rest of its kind. The host's time to
    issue is taken off the forward or backward in which it lies, as a replay adds it.
    """
    ranks, units = measured.ranks, range(len(measured.units))
    issue_s, inside = _issues(measured)
    forward, backward = (
        [
            max(
                0.0,
                median(measured.mean_s(Wanted(what, unit=n), [rank]) for rank in ranks)
                - issue_s * inside[what, n],
            )
            for n in units
        ]
        for what in ("forward", "backward")
    )
    times: dict[tuple[str, int], list[float]] = {}
    for carried in _busy(measured.collectives):
        if all(each.observed for each in carried):
            seconds = max(wait.end_s for each in carried for wait in each.waits.values())
            seconds -= carried[0].moving_s
            total = sum(each.bytes for each in carried) or 1
            for each in carried:
                times.setdefault((each.op, each.unit), []).append(seconds * each.bytes / total)
    known = {key: median_low(values) for key, values in times.items()}
    sizes = {
        "gather": [unit.full_bytes for unit in measured.units],
        "reduce": [unit.grad_bytes for unit in measured.units],
    }
    rates = {op: _rate(known, sizes, [op]) or _rate(known, sizes, list(sizes)) for op in sizes}
    gathers, reduces = (
        [known.get((op, unit), rates[op] * size) for unit, size in enumerate(sizes[op])]
        for op in sizes
    )
    return Costs([RankWork(forward, backward, issue_s)], gathers, reduces)


def _issues(measured: MeasuredRun) -> tuple[float, Counter[Share]]:
    """Return the seconds to issue a collective, and how many were issued in each share."""
    step = next(each for each in measured.first.steps if each.step == measured.detailed[-1])
    parts = parts_of(step)
    ends = [part.end_s for part in parts[:-1]]
    inside = Counter(
        parts[bisect_right(ends, op.begin_s)].share
        for op in step.ops or ()
        if op.lane == "communication"
    )
    return measured.mean_s(Wanted("issue")) / max(1, inside.total()), inside


def _busy(collectives: Iterable[TimedCollective]) -> Iterator[list[TimedCollective]]:
    """Yield what a link carries without a break, as some of it travels at the same time.

    A collective moves from its last issue until the ranks have waited. Those of other ranks have
    links of their own.
    """
    links: dict[tuple[bool, int], list[TimedCollective]] = {}
    for each in collectives:
        links.setdefault((each.op == "all_reduce", each.peers), []).append(each)
    for carried in links.values():
        together: list[TimedCollective] = []
        end_s = -math.inf
        for each in sorted(carried, key=lambda each: each.moving_s):
            if together and each.moving_s >= end_s:
                yield together
                together = []
            together.append(each)
            end_s = max(end_s, each.end_s)
        yield together


def as_exposed(events: Sequence[Event], setting: Setting, costs: Costs, exposed_s: float) -> Costs:
    """Return ``costs`` with a link on which a replay waits ``exposed_s``, as the run did.

    What travels at the same time shares the link, which costs time that no collective shows. At
    most the link becomes half or twice as slow.
    """
    least, most = 0.5, 2.0
    for _ in range(10):
        part = math.sqrt(least * most)
        waits = replay(events, setting, costs.sending(part))[0]
        longer = sum(op.end_s - op.begin_s for op in waits if op.op in EXPOSED) > exposed_s
        least, most = (least, part) if longer else (part, most)
    return costs.sending(part)


def _rate(
    known: Mapping[tuple[str, int], float], sizes: Mapping[str, Sequence[int]], ops: Sequence[str]
) -> float:
    """Return the seconds of a byte in collectives of some kinds; 0 if none is known."""
    chosen = [key for key in known if key[0] in ops]
    total = sum(sizes[op][unit] for op, unit in chosen)
    return sum(known[key] for key in chosen) / total if total else 0.0
