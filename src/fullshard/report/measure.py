# SPDX-License-Identifier: Apache-2.0
"""Shares of time in the steps of a record, by rank and unit, and who waited for whom.

[Note: Late ranks]
A collective begins to move bytes when the last rank has issued it. What others wait until then is
that rank's, what they wait afterwards is the link's.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fullshard.core.errors import ConfigurationError
from fullshard.report.record import (
    AWAITED,
    Attempt,
    MemoryByOwner,
    RecordedStep,
    RecordedUnit,
    RunRecord,
    TimedOp,
)
from fullshard.report.shares import Share, shares_of, summed_shares

EXPOSED = tuple(AWAITED)
"""The shares in which computation waits for communication."""

_WAITED_S, _WAITED = 2e-5, 0.3  # what takes less, or less of its collective, was no wait
_WARM_UP = 2  # the first step gathers on demand, the second one as the first was recorded
_MOST_OPS, _MOST_SUMS = 1_500_000, 100_000  # looked at, of all ranks together


class Figure(NamedTuple):
    """A median, and its noise: the standard error, from the median distance to it.

    That of a single value is infinite, since nobody knows it.
    """

    value: float
    noise: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Figure":
        """Take the median of at least one value."""
        known = list(values)
        middle = statistics.median(known)
        if len(known) == 1:
            return cls(middle, math.inf)
        spread = statistics.median(abs(each - middle) for each in known)
        return cls(middle, 1.86 * spread / math.sqrt(len(known)))  # as of normal distributions


class Waits(NamedTuple):
    """One rank's wait for a collective: its time, and when the rank and the last one issued it."""

    begin_s: float
    end_s: float
    issued_s: float
    last_issued_s: float

    @property
    def late_s(self) -> float:
        """The seconds waited for the last rank; see [Note: Late ranks]."""
        return max(0.0, min(self.end_s, self.last_issued_s) - self.begin_s)


@dataclass(frozen=True)
class TimedCollective:
    """One gather or reduce of a unit over ranks; times are those of rank 0's clock.

    ``turn`` says which one of this kind and unit it is in its step, ``peers`` among which ranks.
    """

    step: int
    op: str
    unit: int
    turn: int
    peers: int
    bytes: int
    last: int
    waits: Mapping[int, Waits]

    @property
    def moving_s(self) -> float:
        """The moment from which bytes moved."""
        return self.waits[self.last].issued_s

    @property
    def end_s(self) -> float:
        """The moment when the first rank had waited; it was over then, or before."""
        return min(each.end_s for each in self.waits.values())

    @property
    def observed(self) -> bool:
        """True if all ranks waited, so that it was over when they had; a wait takes time anyway."""
        least_s = max(_WAITED_S, _WAITED * (self.end_s - self.moving_s))
        return all(each.end_s - each.begin_s > least_s for each in self.waits.values())

    def exposed_s(self, late: bool) -> float:
        """Return the mean seconds that ranks waited for the last one, or for the link."""
        waits = self.waits.values()
        late_s = sum(each.late_s for each in waits)
        total_s = sum(each.end_s - each.begin_s for each in waits)
        return (late_s if late else total_s - late_s) / len(self.waits)


@dataclass(frozen=True)
class MeasuredRun:
    """The attempt that was last on all ranks, in seconds.

    ``sums[rank][step]`` are the shares of the steps looked at, without the first ones and without
    units; ``shares`` those of the steps that were recorded op by op, with units. ``cut`` is true
    where ops of more steps are recorded than were looked at.
    """

    attempts: Mapping[int, Attempt]
    sums: Mapping[int, Mapping[int, Mapping[Share, float]]]
    shares: Mapping[int, Mapping[int, Mapping[Share, float]]]
    collectives: Sequence[TimedCollective]
    cut: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.attempts)

    @property
    def first(self) -> Attempt:
        """The attempt of the lowest rank."""
        return next(iter(self.attempts.values()))

    @property
    def units(self) -> Sequence[RecordedUnit]:
        return self.first.facts.units

    @property
    def looked_at(self) -> tuple[int, ...]:
        return tuple(next(iter(self.sums.values())))

    @property
    def detailed(self) -> tuple[int, ...]:
        """The numbers of those steps that have ops."""
        return tuple(next(iter(self.shares.values())))

    @property
    def warm(self) -> bool:
        """True if the steps looked at come after the first ones, which are unlike all others."""
        return any(each.step in self.looked_at for each in self.first.steps[_WARM_UP:])

    @property
    def by_op(self) -> bool:
        """True if a step has ops, so that something of units is known."""
        return bool(self.detailed)

    @cached_property
    def mean_shares(self) -> Mapping[str, float]:
        """Mean seconds of a step over ranks, by what takes them."""
        whats = dict.fromkeys(
            what for steps in self.sums.values() for each in steps.values() for what, _ in each
        )
        return {what: self.mean_s(Wanted(what)) for what in whats}

    @cached_property
    def steady(self) -> Sequence[RecordedStep]:
        """The lowest rank's steps but the first ones."""
        return self.first.steps[_WARM_UP:] or self.first.steps[-1:]

    @cached_property
    def step(self) -> Figure:
        """The seconds of a step, over all but the first ones."""
        return Figure.of(each.duration_s for each in self.steady)

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes of memory that a rank has used, if that is known."""
        peaks = (each.peak_bytes for _, each in self._moments if each.peak_bytes is not None)
        return max(peaks, default=None)

    @property
    def fullest(self) -> tuple[int, MemoryByOwner] | None:
        """The rank and the recorded moment with most bytes in use; None if none was recorded."""
        return max(self._moments, key=lambda each: sum(each[1].by_owner.values()), default=None)

    @property
    def _moments(self) -> Iterator[tuple[int, MemoryByOwner]]:
        for rank, attempt in self.attempts.items():
            yield from ((rank, each) for step in attempt.steps for each in step.memory)

    @property
    def transient_peak_bytes(self) -> int | None:
        """The most bytes that units held beyond their shards in the steps looked at."""
        known = [
            max(step.ops.live_bytes, default=0)
            for attempt in self.attempts.values()
            for step in attempt.steps
            if step.ops is not None and step.step in self.shares[attempt.facts.rank]
        ]
        return max(known, default=None)

    @cached_property
    def mean_step_s(self) -> float:
        """The mean seconds of the steps looked at, to which `mean_s` of all shares add up."""
        return self.mean_s(Wanted())

    def mean_s(self, wanted: "Wanted", ranks: Sequence[int] | None = None) -> float:
        """Return the mean seconds of a step that ``ranks`` (None: all) spend in wanted shares."""
        chosen = self.ranks if ranks is None else ranks
        totals = [
            self.of_step(rank, step, wanted) for rank in chosen for step in self._steps_of(wanted)
        ]
        return sum(totals) / len(totals)

    def _steps_of(self, wanted: "Wanted") -> tuple[int, ...]:
        return self.looked_at if wanted.unit is None else self.detailed

    def of_step(self, rank: int, step: int, wanted: "Wanted") -> float:
        """Return the seconds of wanted shares in one step of a rank."""
        known = (self.sums if wanted.unit is None else self.shares)[rank][step]
        return sum(seconds for share, seconds in known.items() if wanted(share))

    def on_all_s(self, wanted: "Wanted") -> float:
        """Return the mean seconds of a step that all ranks spend in wanted shares, or more."""
        return min(self.mean_s(wanted, [rank]) for rank in self.ranks)

    def by_step(self, rank: int, wanted: "Wanted") -> list[float]:
        """Return the seconds of wanted shares in all steps of a rank that were looked at."""
        return [self.of_step(rank, step, wanted) for step in self._steps_of(wanted)]

    def longer(self, rank: int, wanted: "Wanted") -> list[float]:
        """Return by step how much longer than the median of the others a rank is in shares."""
        others = [self.by_step(other, wanted) for other in self.ranks if other != rank]
        middle = map(statistics.median, zip(*others, strict=True))
        mine = self.by_step(rank, wanted)
        return [seconds - usual for seconds, usual in zip(mine, middle, strict=True)]

    def excess(self, rank: int, wanted: "Wanted") -> Figure:
        """Return `longer`, as a median over steps with its noise."""
        return Figure.of(self.longer(rank, wanted))

    @cached_property
    def exposed(self) -> Mapping[int, float]:
        """Mean seconds of a step in which computation waited, by unit, each moment once."""
        sums: defaultdict[int, float] = defaultdict(float)
        for steps in self.shares.values():
            for shares in steps.values():
                for (what, unit), seconds in shares.items():
                    if what in EXPOSED and unit is not None:
                        sums[unit] += seconds
        count = len(self.ranks) * len(self.detailed)
        return {unit: seconds / max(1, count) for unit, seconds in sorted(sums.items())}

    @cached_property
    def waited(self) -> Mapping[tuple[int, int], float]:
        """Seconds of a step that the first rank of a pair waits for the second, which is late."""
        sums: defaultdict[tuple[int, int], float] = defaultdict(float)
        for each in self.collectives:
            for rank, wait in each.waits.items():
                if wait.late_s > 0 and rank != each.last:
                    sums[rank, each.last] += wait.late_s
        return {
            pair: seconds / max(1, len(self.detailed)) for pair, seconds in sorted(sums.items())
        }

    def waited_for(self, rank: int) -> float:
        """Return the mean seconds of a step that others wait for ``rank``."""
        lost = sum(seconds for (_, late), seconds in self.waited.items() if late == rank)
        return lost / max(1, len(self.ranks) - 1)

    @cached_property
    def link_s(self) -> float:
        """Seconds of a step waited for the link: the lower quartile over steps."""
        return self._waits_for_link(lambda each: None)

    @cached_property
    def sure_link_s(self) -> float:
        """Seconds of it that are there in all steps: the lower quartile of each collective.

        A host that has more to do than it can holds up one now and then, never the same; a link
        holds up all. Where several travel at once, steps differ in which one is waited for.
        """
        return self._waits_for_link(lambda each: (each.op, each.unit, each.turn, each.peers))

    def _waits_for_link(self, what: Callable[["TimedCollective"], object]) -> float:
        """Return the sum of lower quartiles over steps, of collectives put together by ``what``."""
        waits: dict[object, dict[int, float]] = {}
        for each in self.collectives:
            waited_s = each.exposed_s(late=False) * len(each.waits) / len(self.ranks)
            by_step = waits.setdefault(what(each), {})
            by_step[each.step] = by_step.get(each.step, 0.0) + waited_s
        return sum(sorted(by_step.values())[(len(by_step) - 1) // 4] for by_step in waits.values())

    @cached_property
    def late_share(self) -> float:
        """The part of all waits that was for late ranks."""
        late = sum(each.exposed_s(late=True) for each in self.collectives)
        total = late + sum(each.exposed_s(late=False) for each in self.collectives)
        return late / total if total else 0.0


class Wanted:
    """Shares by what they are and by unit; None takes all."""

    def __init__(self, *whats: str, unit: int | None = None):
        self._whats: tuple[str, ...] = whats
        self.unit: int | None = unit

    def __call__(self, share: Share) -> bool:
        """Tell if ``share`` is one of them."""
        fits = not self._whats or share[0] in self._whats
        return fits and (self.unit is None or share[1] == self.unit)


def current_attempts(run: RunRecord) -> dict[int, Attempt]:
    """Return by rank the attempts that ran together last and have steps."""
    last = {
        rank: [each for each in record.attempts if each.steps][-1]
        for rank, record in sorted(run.ranks.items())
        if any(each.steps for each in record.attempts)
    }
    newest = max((attempt.wall_s(0) for attempt in last.values()), default=0.0)
    return {rank: each for rank, each in last.items() if each.wall_s(each.last_s) > newest}


def measure(run: RunRecord) -> MeasuredRun:
    """Measure the steps of ``run``. Raises `ConfigurationError` if it has no step to look at."""
    attempts = current_attempts(run)
    if not attempts:
        raise ConfigurationError(
            "the record has no step: the run ended in its first one, or has just begun"
        )
    by_number = {
        rank: {each.step: each for each in attempt.steps} for rank, attempt in attempts.items()
    }
    timed = (
        {number for number, step in steps.items() if step.duration_s > 0}
        for steps in by_number.values()
    )
    common = sorted(set.intersection(*timed))
    if not common:
        raise ConfigurationError("the ranks have no step in common: are these records of one run?")
    chosen, cut = _with_ops(by_number, common)
    shares = {
        rank: {number: shares_of(steps[number]) for number in chosen}
        for rank, steps in by_number.items()
    }
    collectives = [each for number in chosen for each in _collectives(number, attempts, by_number)]
    return MeasuredRun(attempts, _sums(by_number, common, shares), shares, collectives, cut)


def _with_ops(
    by_number: Mapping[int, Mapping[int, RecordedStep]], common: Sequence[int]
) -> tuple[list[int], bool]:
    """Choose the steps of which ops are looked at, the latest; tell if there are more."""
    ranks = list(by_number.values())
    sizes = {
        number: sum(len(steps[number].ops or ()) for steps in ranks)
        for number in common
        if all(steps[number].ops is not None for steps in ranks)
    }
    wanted = [number for number in common[_WARM_UP:] if number in sizes] or list(sizes)[-1:]
    chosen: list[int] = []
    left = _MOST_OPS
    for number in reversed(wanted):
        left -= sizes[number]
        if left < 0 and chosen:
            break
        chosen.insert(0, number)
    return chosen, len(chosen) < len(wanted)


def _sums(
    by_number: Mapping[int, Mapping[int, RecordedStep]],
    common: Sequence[int],
    shares: Mapping[int, Mapping[int, Mapping[Share, float]]],
) -> Mapping[int, Mapping[int, Mapping[Share, float]]]:
    """Return steps' shares without units: by sums, or by ops where sums have spans alone."""
    most = max(3, _MOST_SUMS // len(by_number))
    steady = (common[_WARM_UP:] or common[-1:])[-most:]
    told = all(
        "forward" in steps[number].sums_s for steps in by_number.values() for number in steady
    )
    if told or not next(iter(shares.values())):
        return {
            rank: {number: summed_shares(steps[number]) for number in steady}
            for rank, steps in by_number.items()
        }
    sums: dict[int, dict[int, dict[Share, float]]] = {}
    for rank, steps_of_rank in shares.items():
        for number, known in steps_of_rank.items():
            step: dict[Share, float] = sums.setdefault(rank, {}).setdefault(number, {})
            for (what, _), seconds in known.items():
                step[what, None] = step.get((what, None), 0.0) + seconds
    return sums


def _collectives(
    number: int,
    attempts: Mapping[int, Attempt],
    by_number: Mapping[int, Mapping[int, RecordedStep]],
) -> Iterator[TimedCollective]:
    """Bring together what ranks say of each collective of a step that was waited for."""
    issued: defaultdict[tuple[str, int, int, int], dict[int, tuple[TimedOp, TimedOp]]]
    issued = defaultdict(dict)
    for rank, attempt in attempts.items():
        shards = attempt.facts.settings.get("shards")
        group = shards if type(shards) is int and shards > 0 else attempt.facts.world
        counts: defaultdict[tuple[str, int], int] = defaultdict(int)
        for op, wait in pairs_of(by_number[rank][number].ops or ()):
            counts[op.op, op.unit] += 1
            peers = rank % group if op.op == "all_reduce" else rank // group
            issued[op.op, op.unit, counts[op.op, op.unit], peers][rank] = op, wait
    for (_, unit, turn, peers), ops in issued.items():
        at = {rank: attempts[rank].wall_s(op.begin_s) for rank, (op, _) in ops.items()}
        last = max(at, key=lambda rank: at[rank])
        op = ops[last][0]
        waits = {
            rank: Waits(
                attempts[rank].wall_s(wait.begin_s),
                attempts[rank].wall_s(wait.end_s),
                at[rank],
                at[last],
            )
            for rank, (_, wait) in ops.items()
        }
        yield TimedCollective(number, op.op, unit, turn, peers, op.bytes, last, waits)


def pairs_of(ops: Iterable[TimedOp]) -> Iterator[tuple[TimedOp, TimedOp]]:
    """Yield collectives with the waits that ended them."""
    pending: dict[tuple[str, int], TimedOp] = {}
    for op in ops:
        if op.op in ("gather", "reduce", "all_reduce"):
            pending[op.op, op.unit] = op
        for kind in AWAITED.get(op.op, ()):
            begun = pending.pop((kind, op.unit), None)
            if begun is not None:
                yield begun, op
                break
