# SPDX-License-Identifier: Apache-2.0
"""A recording fed to the machine that the engine's hooks feed, for any units put over it."""

import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from typing import TypeVar

from fullshard.core.schedule import Event
from fullshard.core.schedule.step import StepMachine
from fullshard.core.schedule.unit_step import UnitCall, UnitStep
from fullshard.plan.measured.recording import MarkKind, StepMark, StepRecording
from fullshard.plan.step.units import PlannedUnit

_T = TypeVar("_T")
_OUTERMOST = 0  # the graph task in which all others run


class RecordingFeeder:
    """Walks a recording; yields its marks, and events of ``units`` where they happen."""

    def __init__(self, recording: StepRecording, units: Sequence[PlannedUnit]):
        self._recording = recording
        self._task = _OUTERMOST
        self._coming = _accumulated_by_task(recording)
        numbers = {spec.name: number for number, spec in enumerate(recording.params)}
        self._places: dict[int, tuple[int, int]] = {}  # of trained parameters
        self._units: list[UnitStep] = []
        for number, planned in enumerate(units):
            trained = set()
            for index, spec in enumerate(planned.params):
                if spec.trainable:
                    trained.add(numbers[spec.name])
                    self._places[numbers[spec.name]] = number, index
            unit = UnitStep(trained, self._absent(trained))
            unit.ends_with_backward = _leads_out(planned, units)
            self._units.append(unit)
        self._by_path = {each.path: unit for each, unit in zip(units, self._units, strict=True)}
        self._machine = StepMachine(self._units)
        self._in_forward: dict[int, UnitStep] = {}  # by call
        self._of_units: set[int] = set()  # calls
        self._inputs_of: dict[int, list[int]] = {}  # by call
        for number, watched in enumerate(recording.inputs):
            self._inputs_of.setdefault(watched.call, []).append(number)
        # Calls live as long as hooks of their outputs (by call) and of their inputs (by input),
        # those that lead to leaves excepted.
        self._by_output: dict[int, UnitCall] = {}
        self._by_input: dict[int, UnitCall] = {}
        self._watching: dict[int, weakref.ref[UnitCall]] = {}  # by input

    def __iter__(self) -> Iterator[StepMark | Event]:
        """Marks in order; events come before what follows them, and after what causes them."""
        hear: dict[MarkKind, Callable[[int], Sequence[Event]]] = {
            MarkKind.FORWARD_BEGIN: self._forward_begins,
            MarkKind.FORWARD_END: self._forward_ends,
            MarkKind.OUTPUT_GRADIENT: self._output_has_gradient,
            MarkKind.INPUT_GRADIENT: self._input_has_gradient,
            MarkKind.OUTPUTS_GONE: lambda call: self._let_go(self._by_output, call),
            MarkKind.INPUT_GONE: lambda number: self._let_go(self._by_input, number),
            MarkKind.GRADIENT: self._gradient_arrives,
            MarkKind.TASK: self._enter_task,
            MarkKind.BACKWARD_OVER: lambda _: self._machine.backward_ends(_OUTERMOST),
        }
        for mark in self._recording:
            yield mark
            if mark.kind in hear:
                yield from hear[mark.kind](mark.number)

    def place_of(self, param: int) -> tuple[int, int] | None:
        """The number of the unit of a parameter that is trained, and its index in that unit."""
        return self._places.get(param)

    def _absent(self, trained: Set[int]) -> Callable[[], Set[int]]:
        return lambda: trained - self._coming.get(self._task, set())

    def _forward_begins(self, number: int) -> Sequence[Event]:
        recorded, machine = self._recording.calls[number], self._machine
        unit = self._by_path.get(recorded.module)
        if unit is None or unit in machine.running:
            return ()
        if not machine.running and not machine.in_backward:
            machine.root_begins()
        event = machine.forward_begins(unit, with_grad=recorded.with_grad)
        self._in_forward[number] = unit
        self._of_units.add(number)
        if recorded.with_grad:
            self._watch_inputs(number, machine.new_call(unit, UnitCall))
        return (event,)

    def _watch_inputs(self, number: int, call: UnitCall) -> None:
        """Watch what the engine watches: views are made between units, not between modules."""
        inputs = self._recording.inputs
        for own in self._inputs_of.get(number, ()):
            taken = inputs[own].source  # what the unit's module is given
            while taken >= 0 and inputs[taken].source >= 0 and not self._is_of_a_unit(taken):
                taken = inputs[taken].source
            first = taken >= 0 and taken not in self._watching
            watched = taken if first else own
            self._watching[watched] = weakref.ref(call)
            if not inputs[watched].leaf:
                self._by_input[watched] = call
            call.watched += 1

    def _is_of_a_unit(self, watched: int) -> bool:
        return self._recording.inputs[watched].call in self._of_units

    def _forward_ends(self, number: int) -> Sequence[Event]:
        unit = self._in_forward.pop(number, None)
        if unit is None:
            return ()
        if self._recording.calls[number].leads_back:
            unit.call.await_backward()
            self._by_output[number] = unit.call
        return (self._machine.forward_ends(unit),)

    def _output_has_gradient(self, number: int) -> Sequence[Event]:
        call = self._by_output.get(number)
        if call is None:
            return ()
        begun = self._machine.begun_by(call, self._task)
        return [event for each in begun for event in self._machine.call_begins(each, self._task)]

    def _input_has_gradient(self, number: int) -> Sequence[Event]:
        call = self._watching[number]() if number in self._watching else None
        return () if call is None else self._machine.input_arrives(call, self._task)

    def _gradient_arrives(self, param: int) -> Sequence[Event]:
        place = self._places.get(param)
        if place is None:
            return ()
        return self._machine.gradient_arrives(self._units[place[0]], param, self._task)

    def _let_go(self, kept: dict[int, _T], number: int) -> Sequence[Event]:
        kept.pop(number, None)
        return ()

    def _enter_task(self, task: int) -> Sequence[Event]:
        self._task = task
        return ()


def _accumulated_by_task(recording: StepRecording) -> dict[int, set[int]]:
    """The parameters for which autograd says in a graph task that it will come to them."""
    coming: dict[int, set[int]] = {}
    task = _OUTERMOST
    for kind, number in recording:
        if kind is MarkKind.TASK:
            task = number
        elif kind in (MarkKind.GRADIENT, MarkKind.NO_GRADIENT):
            coming.setdefault(task, set()).add(number)
    return coming


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
