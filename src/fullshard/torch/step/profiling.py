# SPDX-License-Identifier: Apache-2.0
"""The work of units as it shows: in torch.profiler by their names, and noted with its time."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch.autograd.profiler import record_function

from fullshard.core.schedule import OF_PARAMETERS, OpKind
from fullshard.torch.unit.streams import DeviceClock
from fullshard.torch.unit.unit import Unit

_HOLDS_UP = {  # the sums to which the host's time in an op counts
    "gather": "issue",
    "reduce": "issue",
    "await_gather": "await_gather",
    "all_reduce": "await_reduce",  # it waits for the sum over slices first
    "await_reduce": "await_reduce",
}
_ALL, _TIMED = frozenset(OpKind), frozenset(map(OpKind, _HOLDS_UP))

profiler_runs = torch._C._autograd._profiler_enabled
"""True while a profiler runs. Asked as a forward of the root or a backward begins."""


class UnitMarks:
    """Marks the work of units as ranges in a profile."""

    def __init__(self) -> None:
        self.open: dict[tuple[str, Any], record_function] = {}

    def begin(self, what: str, unit: Any) -> None:
        """Open a range named after the unit and ``what`` it does."""
        if (what, unit) not in self.open:
            mark = record_function(f"fullshard: {what} {unit.name}")
            mark.__enter__()  # type: ignore[no-untyped-call]
            self.open[what, unit] = mark

    def end(self, what: str, unit: Any) -> None:
        """Close the range again, if it was opened."""
        mark = self.open.pop((what, unit), None)
        if mark is not None:
            mark.__exit__(None, None, None)

    @contextmanager
    def around(self, what: str, unit: Any) -> Iterator[None]:
        """Mark what is done within, unless it fails."""
        self.begin(what, unit)
        yield
        self.end(what, unit)

    def forget(self) -> None:
        """Close all ranges: the step that they belong to has failed."""
        for mark in self.open.values():
            mark.__exit__(None, None, None)
        self.open.clear()


NotedOp = tuple[str, Any, Any, Any, int, Any]
"""An op: its name, its unit, marks of its begin and end, what all units held then, its waiter.

See `fullshard.report.TimedOp`; here a gather ends when it has been issued.
"""


class OpRecorder:
    """Notes the ops of a step as they are issued; on a CPU it adds up their seconds, too.

    Unless it is ``detailed`` it does no more than that. ``sums_s`` has the waits by kind, "issue",
    and "forward" and "backward" without these. It is told of the gradients that make a unit hold
    more if it ``notes_fills``, for which all units are weighed at every gradient.
    """

    notes_fills: bool = True

    def __init__(self, device: torch.device, units: Iterable[Unit]):
        self.clock: DeviceClock = DeviceClock(device)
        self._on_host = self.clock.on_host
        self.mark: Callable[[], Any] = perf_counter if self._on_host else self.clock.mark
        self.detailed: bool = True
        self.notes: list[NotedOp] = []
        self.sums_s: defaultdict[str, float] = defaultdict(float)
        self._held_up_s = 0.0  # by all that holds up
        # Full parameters and gradients of all units when they were weighed.
        self.held_bytes: list[int] = [0, 0]
        self._held: dict[Any, list[int]] = {}  # the same by unit
        self._open: dict[tuple[str, Any], Any] = {}
        self._phase: tuple[str, Any, Any, float] | None = None  # the outermost of those open
        for unit in units:
            self.weigh(unit)

    @property
    def kinds(self) -> frozenset[OpKind]:
        """The ops of which it wants to be told."""
        return _ALL if self.detailed else _TIMED if self._on_host else frozenset()

    def note(self, op: str, unit: Any, begin: Any, end: Any, waiter: Any = None) -> None:
        """Note an op on ``unit``, issued from ``begin`` to ``end``; ``waiter`` asked for it."""
        if self._on_host and op in _HOLDS_UP:
            took = end - begin
            self.sums_s[_HOLDS_UP[op]] += took
            self._held_up_s += took
        if self.detailed:
            if unit in self._held:
                self._weigh_part(unit, int(op not in OF_PARAMETERS))
            self._keep(op, unit, begin, end, waiter)

    def _keep(self, op: str, unit: Any, begin: Any, end: Any, waiter: Any = None) -> None:
        self.notes.append((op, unit, begin, end, sum(self.held_bytes), waiter))

    def weigh(self, unit: Any) -> None:
        """Look at what a unit holds now."""
        self._held.setdefault(unit, [0, 0])
        for part in (0, 1):
            self._weigh_part(unit, part)

    def _weigh_part(self, unit: Any, part: int) -> None:
        """Look at its full parameters (0) or its gradients (1): an op changes one of them."""
        held, now = self._held[unit], unit.gradients.transient_bytes if part else unit.full.bytes
        self.held_bytes[part] += now - held[part]
        held[part] = now

    def held(self, unit: Any) -> tuple[int, int]:
        """Return the bytes of full parameters and full gradients when a unit was last weighed."""
        full, gradients = self._held.get(unit, (0, 0))
        return full, gradients

    def begins(self, what: str, unit: Any) -> None:
        """A unit's forward or backward begins; None stands for the whole backward."""
        if self._phase is None:
            self.phase_begins(what)
            self._phase = what, unit, self.mark(), self._held_up_s
        if self.detailed and unit is not None:
            self._open.setdefault((what, unit), self.mark())

    def ends(self, what: str, unit: Any) -> None:
        """It ends."""
        phase = self._phase
        if phase is not None and phase[0] == what and phase[1] is unit:
            self._phase, end = None, self.mark()
            if self._on_host:
                self.sums_s[what] += end - phase[2] - (self._held_up_s - phase[3])
        if self.detailed:
            if what == "backward" and unit in self._held:
                self._weigh_part(unit, 1)
            begin = self._open.pop((what, unit), None)
            if begin is not None:
                self._keep(what, unit, begin, self.mark())
            self.unit_ended()

    def phase_begins(self, what: str) -> None:
        """Called when a forward or backward begins in which all others are."""

    def unit_ended(self) -> None:
        """Called in detailed steps when a forward or backward has ended."""

    def forget(self) -> None:
        """The step in which something is open has failed."""
        self._open.clear()
        self._phase = None
