# SPDX-License-Identifier: Apache-2.0
"""The record of a run: what each rank did in its steps, and when.

A rank's record has an `Attempt` for each time that its process was started. An attempt has the
facts that hold for all of it, its steps, and spans between them. Times are seconds since the
attempt began; `Attempt.wall_s` puts them on one clock for all ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from fullshard.core.trace import Trace, TraceRecord

Lane = Literal["compute", "communication", "copy"]

_LANES: Mapping[str, Lane] = {
    "gather": "communication",
    "reduce": "communication",
    "all_reduce": "communication",
    "fetch": "copy",
    "evict": "copy",
}


AWAITED: Mapping[str, tuple[str, ...]] = {
    "await_gather": ("gather",),
    "await_reduce": ("all_reduce", "reduce"),
}
"""The collectives that a wait ends: the first of them that is under way."""


class RecordedUnit(NamedTuple):
    """A unit: the parameters in it, and its bytes in full, on this rank, and as gradients."""

    name: str
    numel: int
    full_bytes: int
    shard_bytes: int
    grad_bytes: int


class TimedOp(NamedTuple):
    """One op of a detailed step.

    ``op`` is the value of an `OpKind`, "fetch", "evict", "forward" or "backward". A gather or
    reduce lasts from its issue until it is done, ``await_...`` as long as computation was held up
    by it. ``unit`` numbers `Facts.units`; ``waiter`` is the unit whose forward or backward waited,
    None where nobody did or the step's end. ``live_bytes`` is what units held beyond their shards
    afterwards.
    """

    op: str
    unit: int
    begin_s: float
    end_s: float
    bytes: int = 0
    live_bytes: int = 0
    waiter: int | None = None

    @property
    def lane(self) -> Lane:
        """The lane that the op takes time in; that of computation if it waits for another."""
        return _LANES.get(self.op, "compute")


@dataclass(frozen=True)
class TimedOps(Sequence[TimedOp]):
    """The ops of one step by columns, in the order in which they were issued."""

    op: Sequence[str] = ()
    unit: Sequence[int] = ()
    begin_s: Sequence[float] = ()
    end_s: Sequence[float] = ()
    bytes: Sequence[int] = ()
    live_bytes: Sequence[int] = ()
    waiter: Sequence[int | None] = ()

    @classmethod
    def of(cls, ops: Sequence[TimedOp]) -> "TimedOps":
        """Put ``ops`` into columns."""
        return cls(*zip(*ops, strict=True)) if ops else cls()

    def __len__(self) -> int:
        return len(self.op)

    def __iter__(self) -> Iterator[TimedOp]:
        columns = (self.op, self.unit, self.begin_s, self.end_s, self.bytes, self.live_bytes)
        return map(TimedOp, *columns, self.waiter)

    def __getitem__(self, index: Any) -> Any:
        chosen = list(self)[index]
        return TimedOps.of(chosen) if isinstance(index, slice) else chosen


class TimedSpan(NamedTuple):
    """Time of a rank that belongs to no unit.

    ``what`` is "start", "data", "optimizer", "checkpoint", "evaluation", "compile", "step" where
    one compiled call computes all of it, or a user's own word.
    """

    what: str
    begin_s: float
    end_s: float


class MemoryByOwner(NamedTuple):
    """Bytes of a rank at one moment; None for what cannot be known.

    ``gathered_bytes`` are full parameters, ``gradient_buffers_bytes`` full gradients and scratch of
    reduces. ``total_bytes`` is what torch has allocated on the device, or on a CPU the physical
    memory of the process; ``peak_bytes`` the most of that so far, ``limit_bytes`` what there is.
    """

    at_s: float
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    gradient_buffers_bytes: int
    total_bytes: int | None = None
    peak_bytes: int | None = None
    limit_bytes: int | None = None

    @property
    def activations_bytes(self) -> int | None:
        """The rest of the total: activations, and on a CPU the program itself."""
        return None if self.total_bytes is None else max(0, self.total_bytes - sum(self[1:6]))

    @property
    def by_owner(self) -> dict[str, int]:
        """The bytes of those owners of which they are known."""
        names = ("parameters", "gradients", "optimizer", "gathered", "gradient buffers")
        owners = dict(zip(names, self[1:6], strict=True))
        rest = self.activations_bytes
        return owners if rest is None else owners | {"activations and others": rest}


@dataclass(frozen=True)
class RecordedStep:
    """A step: from the end of the one before it until the optimizer has stepped.

    ``sums_s`` has seconds by kind: waits ("await_gather", "await_reduce"), the issue of collectives
    ("issue"), "forward" and "backward" without these, and spans without all that. On a device there
    are only spans, and waits of steps that are detailed. These have ``ops`` too, and several
    moments of ``memory``; others have one at most.
    """

    step: int
    begin_s: float
    end_s: float
    tokens: int | None = None
    loss: float | None = None
    sums_s: Mapping[str, float] = field(default_factory=dict)
    spans: Sequence[TimedSpan] = ()
    memory: Sequence[MemoryByOwner] = ()
    ops: TimedOps | None = None

    @property
    def duration_s(self) -> float:
        """The seconds that the step took."""
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Facts:
    """All that holds for a whole attempt.

    ``started_at`` is in seconds since 1970 by this rank's host, whose clock is ``clock_offset_s``
    ahead of rank 0's. ``settings`` has strings, numbers and truth values by name, such as
    ``strategy``, ``prefetch_forward``, ``param_dtype``; ``forecast`` what the plan foretold, if
    there was one: ``step_s``, ``exposed_s``, ``peak_bytes``, ... ``missing`` says in sentences
    what is not recorded, and why.
    """

    rank: int
    world: int
    host: str
    started_at: float
    clock_offset_s: float = 0.0
    engine: str = "torch"
    device: str = "cpu"
    units: Sequence[RecordedUnit] = ()
    settings: Mapping[str, str | float | bool | None] = field(default_factory=dict)
    forecast: Mapping[str, float] = field(default_factory=dict)
    missing: Sequence[str] = ()


@dataclass(frozen=True)
class Attempt:
    """One rank's run from the start of its process to its end.

    ``spans`` lie outside of steps, such as the start. ``ended_s`` is None if the process was killed
    before it could say so; ``ending`` is "finished" or the error. ``left_out`` counts steps that
    were not written as the file had grown to its limit.
    """

    facts: Facts
    steps: Sequence[RecordedStep] = ()
    spans: Sequence[TimedSpan] = ()
    ended_s: float | None = None
    ending: str = ""
    left_out: int = 0

    def wall_s(self, at_s: float) -> float:
        """Return a time of this attempt in seconds since 1970 by rank 0's clock."""
        return self.facts.started_at - self.facts.clock_offset_s + at_s

    @cached_property
    def last_s(self) -> float:
        """The latest time of which the attempt tells."""
        ends = [step.end_s for step in self.steps] + [span.end_s for span in self.spans]
        return max([0.0, *ends] if self.ended_s is None else [self.ended_s, *ends])

    def trace(self, step: RecordedStep) -> Trace:
        """Return the ops of a detailed step in the form of planned ones, by when they were done."""
        records = [
            TraceRecord(each.op, self.facts.units[each.unit].name, end_s, each.bytes, live)
            for each in step.ops or ()
            for end_s, live in [(each.end_s - step.begin_s, each.live_bytes)]
            if each.op not in ("forward", "backward")
        ]
        return Trace(records)


@dataclass(frozen=True)
class RankRecord:
    """The attempts of one rank, in order of time; ``damaged`` counts lines that could not be read.

    A process that is killed leaves half a line.
    """

    rank: int
    attempts: Sequence[Attempt]
    damaged: int = 0


@dataclass(frozen=True)
class RunRecord:
    """The records of a run, by rank; ``unread`` says of other files why they cannot be read."""

    ranks: Mapping[int, RankRecord]
    unread: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        """The number of ranks that the last attempt had."""
        last = [record.attempts[-1].facts for record in self.ranks.values()]
        return max(last, key=lambda facts: facts.started_at).world

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks of which there is no record."""
        return tuple(rank for rank in range(self.world) if rank not in self.ranks)
