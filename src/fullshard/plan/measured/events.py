# SPDX-License-Identifier: Apache-2.0
"""Which events the engine's hooks report in a recorded step, for any units put over it.

The rules are those of the engine's runtime; see the note "When a unit's backward is over" in the
engine's hooks. Here they are applied to the marks of a recording instead of to autograd.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from fullshard.core.schedule import Event, Moment
from fullshard.plan.measured.recording import Mark, MarkKind, StepRecording
from fullshard.plan.step.units import PlannedUnit

__all__ = ["EventsOfRecording"]


class _Call:
    """One forward of a unit's module."""

    def __init__(self, unit: "_Unit", number: int, parent: "_Call | None"):
        self.unit, self.number, self.parent = unit, number, parent
        self.watched = 0  # inputs that need gradients
        self.to_come = 0
        self.begun = False
        self.began_at = 0


class _Unit:
    """The state of a unit in the middle of a step, as the runtime knows it."""

    def __init__(self, number: int, params: set[int], expected: Counter[int], leads_out: bool):
        self.number = number
        self.params = params  # the trained ones
        self.expected = Counter({each: expected[each] for each in params if expected[each]})
        self.ends_with_backward = leads_out
        self.calls: dict[int, _Call] = {}
        self.last_begun: _Call | None = None
        self.open = self.begun_in_backward = self.expecting = False
        self.here: set[int] = set()
        self.came: Counter[int] = Counter()
        self.counts = False
        self.first_begin = self.last_begin = self.last_end = self.began_at = 0

    @property
    def expected_here(self) -> bool:
        return not self.expecting or self.came >= self.expected

    @property
    def all_here(self) -> bool:
        return len(self.here) == len(self.params) and self.expected_here

    @property
    def awaits_inputs(self) -> bool:
        call = self.last_begun
        alive = call is not None and call.number in self.calls
        return alive and call is not None and call.begun and call.watched > 0


class EventsOfRecording:
    """Walks a recording; yields its marks, and events of ``units`` where they happen."""

    def __init__(self, recording: StepRecording, units: Sequence[PlannedUnit]):
        self._recording = recording
        arrivals = Counter(n for kind, n in recording if kind is MarkKind.GRADIENT)
        numbers = {spec.name: number for number, spec in enumerate(recording.params)}
        self._owners: dict[int, _Unit] = {}
        self._places: dict[int, tuple[int, int]] = {}
        self._by_path: dict[str, _Unit] = {}
        self._units: list[_Unit] = []
        for number, planned in enumerate(units):
            trained = {numbers[each.name] for each in planned.params if each.trainable}
            unit = _Unit(number, trained, arrivals, _leads_out(planned, units))
            self._units.append(unit)
            self._by_path[planned.path] = unit
            self._owners.update(dict.fromkeys(trained, unit))
            for index, spec in enumerate(planned.params):
                if spec.trainable:
                    self._places[numbers[spec.name]] = number, index
        self._running: list[tuple[_Unit, _Call]] = []
        self._calls: dict[int, _Call] = {}
        self._inputs_of: dict[int, list[int]] = {}  # by call
        for number, watched in enumerate(recording.inputs):
            self._inputs_of.setdefault(watched.call, []).append(number)
        self._waiting: dict[int, _Call] = {}  # by the input whose gradient tells
        self._due: dict[_Unit, None] = {}
        self._late: list[_Unit] = []
        self._open: list[_Unit] = []
        self._in_backward = False
        self._now = 0
        self._events: list[Event] = []

    def __iter__(self) -> Iterator[Mark | Event]:
        """Marks in order; events come before what follows them, and after what causes them."""
        hear = {
            MarkKind.FORWARD_BEGIN: self._forward_begins,
            MarkKind.FORWARD_END: self._forward_ends,
            MarkKind.BACKWARD_BEGIN: self._backward_begins,
            MarkKind.INPUT_DONE: self._input_done,
            MarkKind.CALL_GONE: self._call_gone,
            MarkKind.GRADIENT: self._gradient_arrives,
            MarkKind.BACKWARD_OVER: self._backward_over,
        }
        for mark in self._recording:
            yield mark
            if mark.kind in hear:
                hear[mark.kind](mark.number)
                yield from self._events
                self._events.clear()

    def place_of(self, param: int) -> tuple[int, int] | None:
        """The number of the unit of a parameter that is trained, and its index in that unit."""
        return self._places.get(param)

    def _tell(self, moment: Moment, unit: _Unit) -> None:
        self._events.append(Event(moment, unit.number))

    # ---- forward --------------------------------------------------------------------------------

    def _forward_begins(self, number: int) -> None:
        recorded = self._recording.calls[number]
        unit = self._by_path.get(recorded.module)
        if unit is None or any(running is unit for running, _ in self._running):
            return
        parent = self._running[-1][1] if self._running else None
        call = self._calls[number] = _Call(unit, number, parent)
        self._watch_inputs(call)
        self._running.append((unit, call))
        self._tell(Moment.FORWARD_BEGIN, unit)
        unit.counts = recorded.with_grad and not (self._in_backward and unit in self._due)
        if unit.counts:
            self._now += 1
            unit.last_begin = self._now
            if unit not in self._due:
                unit.first_begin = self._now
            self._due.pop(unit, None)
            self._due[unit] = None
        call.began_at = self._now

    def _watch_inputs(self, call: _Call) -> None:
        """Wait for what the engine waits for: views are made between units, not between modules."""
        inputs = self._recording.inputs
        for number in self._inputs_of.get(call.number, ()):
            taken = inputs[number].source  # what the unit's module is given
            while (
                taken >= 0 and inputs[taken].source >= 0 and inputs[taken].call not in self._calls
            ):
                taken = inputs[taken].source
            first = taken >= 0 and taken not in self._waiting
            self._waiting[taken if first else number] = call
            call.watched += 1

    def _forward_ends(self, number: int) -> None:
        call = self._calls.get(number)
        if call is None:
            return
        recorded, unit = self._recording.calls[number], call.unit
        if recorded.leads_back:
            unit.calls[number] = call
        while self._running and self._running[-1][1] is not call:
            self._running.pop()
        self._running.pop()
        self._tell(Moment.FORWARD_END, unit)
        if unit.counts or not self._in_backward:
            self._now += 1
            unit.last_end = self._now
            if not unit.calls:
                self._due.pop(unit, None)

    # ---- backward -------------------------------------------------------------------------------

    def _backward_begins(self, number: int) -> None:
        call = self._calls.get(number)
        if call is not None and not call.begun:
            self._begin_call(call)

    def _begin_call(self, call: _Call) -> None:
        parent = call.parent
        if parent is not None and not parent.begun and parent.number in parent.unit.calls:
            self._begin_call(parent)
        unit = call.unit
        call.begun = self._in_backward = True
        call.to_come = call.watched
        unit.last_begun = unit.calls[call.number] = call
        unit.expecting = True
        if unit.open:
            unit.began_at = min(unit.began_at, call.began_at)
            return
        unit.began_at = call.began_at
        if not unit.begun_in_backward:
            self._pass_over(unit.last_end)
        self._begin(unit)

    def _begin(self, unit: _Unit) -> None:
        unit.open = unit.begun_in_backward = True
        self._open.append(unit)
        if unit not in self._due and unit not in self._late:
            self._late.append(unit)
        self._tell(Moment.BACKWARD_BEGIN, unit)

    def _pass_over(self, after: int) -> None:
        unused = [unit for unit in self._due_after(after) if not unit.begun_in_backward]
        for unit in sorted(unused, key=lambda each: -each.last_end):
            if unit in self._due and not unit.begun_in_backward:
                self._begin(unit)
                self._end(unit, unused=True)

    def _due_after(self, begin: int) -> list[_Unit]:
        found: list[_Unit] = []
        for unit in reversed(self._due):
            if unit.last_begin <= begin:
                break
            found.append(unit)
        return found

    def _gradient_arrives(self, param: int) -> None:
        unit = self._owners.get(param)
        if unit is None:
            return
        self._in_backward = True
        unit.here.add(param)
        if unit.expecting:
            unit.came[param] += 1
        if unit not in self._due and unit not in self._late:
            self._late.append(unit)
        if not unit.awaits_inputs:
            self._end_what_is_over(unit)

    def _input_done(self, number: int) -> None:
        call = self._waiting.get(number)
        if call is None:
            return
        call.to_come -= 1
        if call.begun and call.to_come == 0:
            call.begun = False
            call.unit.calls.pop(call.number, None)
            self._end_what_is_over(call.unit)

    def _call_gone(self, number: int) -> None:
        call = self._calls.get(number)
        if call is not None:
            call.unit.calls.pop(number, None)

    def _end_what_is_over(self, unit: _Unit) -> None:
        if not self._is_over(unit):
            return
        self._end(unit)
        for other in sorted(self._open, key=self._turn):
            if self._is_over(other):
                self._end_what_is_over(other)
                return

    def _turn(self, unit: _Unit) -> tuple[bool, int]:
        if unit in self._due:
            return False, -unit.last_begin
        return True, -unit.began_at

    def _is_over(self, unit: _Unit) -> bool:
        if unit.ends_with_backward or not unit.open:
            return False
        if any(call.watched for call in unit.calls.values()):
            return False
        if not (unit.all_here if unit.calls else unit.expected_here):
            return False
        if unit in self._due:
            later = (each for each in self._due_after(unit.first_begin) if each is not unit)
            return not any(each.open or each.calls for each in later)
        return not any(self._began_later(other, unit) for other in self._units)

    def _began_later(self, other: _Unit, unit: _Unit) -> bool:
        if other.open and other.began_at > unit.began_at:
            return True
        return any(call.began_at > unit.began_at for call in other.calls.values())

    def _end(self, unit: _Unit, *, unused: bool = False) -> None:
        if unit in self._due and not unused:
            self._pass_over(unit.first_begin)
        self._due.pop(unit, None)
        for call in [call for call in unit.calls.values() if call.begun]:
            call.begun = False
            del unit.calls[call.number]
        if unit.open:
            unit.open = False
            self._open.remove(unit)
        if unit in self._late:
            self._late.remove(unit)
        unit.here.clear()
        unit.came.clear()
        unit.expecting = False
        self._tell(Moment.BACKWARD_END, unit)

    def _backward_over(self, _number: int) -> None:
        for unit in sorted(self._due, key=lambda each: -each.first_begin):
            if unit in self._due:
                if not unit.begun_in_backward:
                    self._begin(unit)
                self._end(unit)
        still_open = [unit for unit in self._units if unit.open]
        for unit in dict.fromkeys([*self._late, *still_open]):
            self._end(unit)
        self._events.append(Event(Moment.STEP_END))


def _leads_out(unit: PlannedUnit, units: Sequence[PlannedUnit]) -> bool:
    """True if a parameter that is used inside the unit's module belongs to a unit around it."""
    inside = unit.path + "." if unit.path else ""
    return any(
        name.startswith(inside)
        for other in units
        if not (other.path + ".").startswith(inside)
        for spec in other.params
        for name in (spec.name, *spec.aliases)
    )
