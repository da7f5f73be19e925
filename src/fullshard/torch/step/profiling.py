# SPDX-License-Identifier: Apache-2.0
"""The work of units as it shows: in torch.profiler by their names, and noted with its time."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import record_function

from fullshard.torch.unit.streams import DeviceClock
from fullshard.torch.unit.unit import Unit

__all__ = ["NotedOp", "OpRecorder", "UnitMarks", "profiler_runs"]

_OF_GRADIENTS = ("fill", "reduce", "await_reduce")
_HOLDS_UP = {  # the sums to which the host's time in an op counts
    "gather": "issue",
    "reduce": "issue",
    "await_gather": "await_gather",
    "all_reduce": "await_reduce",  # it waits for the sum over slices first
    "await_reduce": "await_reduce",
}

profiler_runs = torch._C._autograd._profiler_enabled
"""True while a profiler runs. Ask this first: a mark costs more than the op it marks."""


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

    def forget(self) -> None:
        """Close all ranges: the step that they belong to has failed."""
        for mark in self.open.values():
            mark.__exit__(None, None, None)
        self.open.clear()


class NotedOp(NamedTuple):
    """An op with marks of the device's clock, and what units held afterwards.

    See `fullshard.report.TimedOp`; here a gather ends when it has been issued.
    """

    op: str
    unit: Any
    begin: Any
    end: Any
    bytes: int
    live_bytes: int
    waiter: Any


class OpRecorder:
    """Notes the ops of a step as they are issued; on a CPU it adds up their seconds, too.

    Unless it is ``detailed`` it does no more than that. ``sums_s`` has the waits by kind, "issue",
    and "forward" and "backward" without these. It is told of the gradients that make a unit hold
    more if it ``notes_fills``, for which all units are weighed at every gradient.
    """

    notes_fills: bool = True

    def __init__(self, device: torch.device, units: Iterable[Unit]):
        self.clock: DeviceClock = DeviceClock(device)
        self.detailed: bool = True
        self.notes: list[NotedOp] = []
        self.sums_s: defaultdict[str, float] = defaultdict(float)
        self.gathered_bytes: int = 0
        self.gradient_buffers_bytes: int = 0
        self._held: dict[Any, tuple[int, int]] = {}
        self._open: dict[tuple[str, Any], Any] = {}
        self._phase: tuple[str, Any, Any] | None = None  # the outermost of those that are open
        self._held_up_s = 0.0  # in that phase
        for unit in units:
            self.weigh(unit)

    def mark(self) -> Any:
        """Mark this moment by the device's clock."""
        return self.clock.mark()

    def note(self, op: str, unit: Any, begin: Any, waiter: Any = None) -> None:
        """Note that ``op`` on ``unit`` has been issued since ``begin``; ``waiter`` asked for it."""
        end = self._counted(op, begin)
        if self.detailed:
            self.weigh(unit)
            layout = unit.layout
            size = layout.grad_full_bytes if op in _OF_GRADIENTS else layout.full_bytes
            self._keep(op, unit, begin, end, size, waiter)

    def wait(self, op: str, unit: Any, begin: Any) -> None:
        """Note a wait since ``begin`` for a unit of which no more is known."""
        end = self._counted(op, begin)
        if self.detailed:
            self._keep(op, unit, begin, end)

    def _counted(self, op: str, begin: Any) -> Any:
        """Count the time since ``begin``; return the mark of its end."""
        end, held_up = self.mark(), _HOLDS_UP.get(op)
        if held_up is not None and isinstance(end, float):
            self.sums_s[held_up] += end - begin
            self._held_up_s += end - begin
        return end

    def _keep(
        self, op: str, unit: Any, begin: Any, end: Any, size: int = 0, waiter: Any = None
    ) -> None:
        live = self.gathered_bytes + self.gradient_buffers_bytes
        self.notes.append(NotedOp(op, unit, begin, end, size, live, waiter))

    def weigh(self, unit: Any) -> None:
        """Look at what a unit holds now."""
        full, gradients = self.held(unit)
        held = self._held[unit] = unit.full.bytes, unit.gradients.transient_bytes
        self.gathered_bytes += held[0] - full
        self.gradient_buffers_bytes += held[1] - gradients

    def held(self, unit: Any) -> tuple[int, int]:
        """Return the bytes of full parameters and full gradients when a unit was last weighed."""
        return self._held.get(unit, (0, 0))

    def begins(self, what: str, unit: Any) -> None:
        """A unit's forward or backward begins; None stands for the whole backward."""
        begin = self.mark()
        if self._phase is None:
            self._phase, self._held_up_s = (what, unit, begin), 0.0
        if self.detailed and unit is not None:
            self._open.setdefault((what, unit), begin)

    def ends(self, what: str, unit: Any) -> None:
        """It ends."""
        end = self.mark()
        if self._phase is not None and self._phase[:2] == (what, unit):
            begin, self._phase = self._phase[2], None
            if isinstance(end, float):
                self.sums_s[what] += end - begin - self._held_up_s
        begin = self._open.pop((what, unit), None)
        if begin is not None:
            self._keep(what, unit, begin, end)

    def forget(self) -> None:
        """The step in which something is open has failed."""
        self._open.clear()
        self._phase = None
