# SPDX-License-Identifier: Apache-2.0
"""Steps while they are recorded: marks and notes, from which their times are known later."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fullshard.core.schedule import OF_PARAMETERS
from fullshard.report import (
    AWAITED,
    MemoryByOwner,
    RecordedStep,
    RecordedUnit,
    TimedOp,
    TimedOps,
    TimedSpan,
)
from fullshard.torch.inspection.memory import Bytes
from fullshard.torch.step.profiling import NotedOp
from fullshard.torch.unit.streams import DeviceClock

_PHASES, _COLLECTIVES = ("forward", "backward"), ("gather", "reduce", "all_reduce")


class RecordTime:
    """The seconds of a record, which has begun at ``zero`` of the host's clock."""

    def __init__(self, zero: float, clock: DeviceClock, now_s: float):
        self._zero, self._clock = zero, clock
        self._from: Any = clock.start
        self._at_s = now_s

    def of(self, mark: Any) -> float:
        """Return the time of a mark, which the device has reached."""
        if isinstance(mark, float):
            return mark - self._zero
        return self._at_s + self._clock.elapsed_s(self._from, mark)

    def go_on_from(self, mark: Any) -> float:
        """Count a device's time from this mark on, and return the mark's own."""
        self._at_s, self._from = self.of(mark), mark
        return self._at_s


@dataclass
class OpenStep:
    """A step that is going on, or of which the device has not reached the end."""

    step: int
    begin: Any
    tokens: int | None = None
    loss: float | Tensor | None = None
    end: Any = None
    detailed: bool = False
    begun: bool = False  # something of it was computed
    notes: list[NotedOp] = field(default_factory=list)
    sums_s: dict[str, float] = field(default_factory=dict)
    spans: list[TimedSpan] = field(default_factory=list)
    spans_s: dict[str, float] = field(default_factory=dict)
    samples: list[tuple[Any, int, int, int | None]] = field(default_factory=list)
    rest: Bytes = field(default_factory=lambda: Bytes(0, 0, 0))
    peak_bytes: int | None = None
    limit_bytes: int | None = None

    def recorded(
        self, time: RecordTime, numbers: Mapping[Any, int], units: Sequence[RecordedUnit]
    ) -> RecordedStep:
        """Return the step as it is written; ``numbers`` are those of the ``units``."""
        begin_s, end_s = time.go_on_from(self.begin), time.of(self.end)
        ops = _timed(self.notes, time, numbers, units) if self.detailed else None
        sums = dict(self.sums_s) or _waits_of(ops or ())
        for what, seconds in self.spans_s.items():
            sums[what] = sums.get(what, 0.0) + seconds
        return RecordedStep(
            self.step,
            begin_s,
            end_s,
            self.tokens,
            None if self.loss is None else float(self.loss),
            {name: max(0.0, seconds) for name, seconds in sums.items()},
            tuple(self.spans),
            tuple(self.memory(time)),
            ops,
        )

    def memory(self, time: RecordTime) -> Iterator[MemoryByOwner]:
        """Yield its moments of memory."""
        rest = self.rest.parameters_bytes, self.rest.gradients_bytes, self.rest.optimizer_bytes
        for mark, gathered, gradients, used in self.samples:
            most = used, self.peak_bytes, self.limit_bytes
            yield MemoryByOwner(time.of(mark), *rest, gathered, gradients, *most)


def _timed(
    notes: Iterable[NotedOp],
    time: RecordTime,
    numbers: Mapping[Any, int],
    about: Sequence[RecordedUnit],
) -> TimedOps:
    """Give ops their times: what is issued ends when it was awaited."""
    columns = list(zip(*_with_waits(notes), strict=True))
    if not columns:
        return TimedOps()
    ops, units = columns[0], [numbers[unit] for unit in columns[1]]
    begins, ends = (list(map(time.of, column)) for column in columns[2:4])
    full, gradients = [unit.full_bytes for unit in about], [unit.grad_bytes for unit in about]
    pending: dict[tuple[str, int], int] = {}
    for place, op in enumerate(ops):
        if op in _COLLECTIVES:
            pending[op, units[place]] = place
        for collective in AWAITED.get(op, ()):
            issued = pending.pop((collective, units[place]), None)
            if issued is not None:
                ends[issued] = ends[place]
                break
    waiters = [
        None if op in _COLLECTIVES else numbers.get(waiter)
        for op, waiter in zip(ops, columns[5], strict=True)
    ]
    sizes = [
        full[unit] if op in OF_PARAMETERS else 0 if op in _PHASES else gradients[unit]
        for op, unit in zip(ops, units, strict=True)
    ]
    return TimedOps(ops, units, begins, list(map(max, begins, ends)), sizes, columns[4], waiters)


def _with_waits(notes: Iterable[NotedOp]) -> Iterator[NotedOp]:
    """Yield ``notes``; before an all-reduce is issued, the sum over slices is waited for."""
    for note in notes:
        if note[0] == "all_reduce":
            op, unit, begin, end, live, waiter = note
            yield "await_reduce", unit, begin, end, live, waiter
            yield op, unit, end, end, live, None
        else:
            yield note


def _waits_of(ops: Iterable[TimedOp]) -> dict[str, float]:
    """Add up the waits of a device, whose times are known late."""
    sums: dict[str, float] = {}
    for op in ops:
        if op.op.startswith("await_"):
            sums[op.op] = sums.get(op.op, 0.0) + op.end_s - op.begin_s
    return sums
