# SPDX-License-Identifier: Apache-2.0
"""The logic of a step: what hooks hear goes in, events that a schedule is asked about come out.

Nothing touches a tensor. The engine feeds it from the hooks of modules and of autograd, the planner
from recordings of them.

[Note: When a unit's backward is over]
A unit's parameters may be freed when nothing in its backward will read them again, and its
gradients reduced when none is still to come. Neither can be seen from gradients alone (frozen
weights deliver none, and the input's gradient may need a weight after that weight's own gradient is
out) nor from the inputs alone (a branch that starts from a constant leads to no input). So a unit's
backward is over when

- the gradients of all inputs that need one are there, for each of its calls;
- every parameter has delivered that autograd says will get a gradient (without an input to wait
  for, every trainable one: a recomputed part is not in the graph until it is run);
- units that began after it in forward are over too: a path to their parameters may lead through it
  (in a graph that is gone through again, those of its calls that can still be reached).

What is not over when autograd has finished is over then.

[Note: One order on all ranks]
All ranks must issue their collectives in one order, even if one of them did not use a unit.
Autograd runs the backward of later forwards first; so when a unit's backward begins, a unit whose
forward began after that unit's was over, and whose backward has not begun, was not used. It begins
then, awaits no gradient, and is over when the units after it are: so it is gathered, and reduced
with zeros, in the order of the ranks that used it. So are unused units inside a unit when that
unit's backward ends. One that was called before, too, stays open for that call.

[Note: Left out]
Of an optional unit a rank tells the same events as the ranks that run it, at the same place: its
forward begins and ends (the feeder knows where, as ranks ask each other). A call stands in for the
one that the rank has not made, and for one whose output leads nowhere on this rank: that of frozen
blocks behind a part that it has left out. It is awaited like any other, and backward never reaches
it: it is passed over as if it had been made and not used. When the root's forward ends, ranks tell
each other which units' backward may come on any of them; `settle` forgets what stands in for the
others.
"""

import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

from fullshard.core.schedule.record import Event, Moment
from fullshard.core.schedule.unit_step import Phase, UnitCall, UnitStep

__all__ = ["StepMachine"]

_event = cache(Event)


_Call = TypeVar("_Call", bound=UnitCall)


class StepMachine:
    """Turns what happens to units into events of a schedule. See the notes above.

    Units and calls live as long as the feeder keeps them. A ``task`` is one run of autograd through
    a graph; recomputation may run one inside another.
    """

    def __init__(self, units: Sequence[UnitStep]):
        for number, unit in enumerate(units):
            unit.number = number
        self._units = [weakref.ref(unit) for unit in units]
        self.running: list[UnitStep] = []  # units whose forward is running, outermost first
        self.in_backward: bool = False
        self.partial: bool = False  # the backward of some units may come on some ranks only
        self._task = -1  # the one that runs
        self._now = 0  # in events
        self._forwards = 0  # of the root
        self._recomputed = 0  # the one that recomputations in this backward belong to
        self._reached: set[int] = set()  # forwards of the root whose backward has begun in this one
        # Units that are due, or were, with a call to come, by their latest forward; and those that
        # backward has reached or given a gradient, by when that was (dicts for their order).
        self._due: dict[UnitStep, None] = {}
        self._active: dict[UnitStep, None] = {}
        self._events: list[Event] = []  # that come of what happens now

    def forget(self) -> None:
        """Forget the step that is running; units forget theirs themselves."""
        self.in_backward = False
        for noted in (self.running, self._due, self._active, self._reached):
            noted.clear()
        self._recomputed = 0

    # ---- forward --------------------------------------------------------------------------------

    def root_begins(self) -> None:
        """A forward of the root begins that is no recomputation."""
        self._forwards += 1

    def forward_begins(self, unit: UnitStep, *, with_grad: bool) -> Event:
        """A unit's forward begins, under autograd or not."""
        self.running.append(unit)
        unit.running += 1
        unit.call = None
        # Reentrant checkpointing runs a unit with gradients for the first time in backward.
        unit.counts = with_grad and not (self.in_backward and unit.phase.due)
        if unit.counts:
            self._now += 1
            unit.run_forward(self._now)
            self._due.pop(unit, None)
            self._due[unit] = None
        return _event(Moment.FORWARD_BEGIN, unit.number)

    def new_call(self, unit: UnitStep, kind: type[_Call]) -> _Call:
        """The unit's forward that runs already, as a call whose backward may come."""
        around = [other for other in self.running if other is not unit]
        parent = around[-1].call if around else None
        unit.call = call = kind(unit, parent, (self._recomputed or self._forwards, self._now))
        return call

    def forward_ends(self, unit: UnitStep, *, training: bool = True) -> Event:
        """The forward of the unit that runs innermost ends."""
        self.running.pop()
        unit.running -= 1
        call, unit.call = unit.call, None
        if training and (unit.counts or not self.in_backward):
            self._now += 1
            unit.last_end = self._now
            if call is not None:
                call.ended_at = self._now
            if not (call is not None and call.leads_back):
                if unit.partial:
                    unit.stand_in((self._recomputed or self._forwards, unit.last_begin))
                elif not unit.calls():
                    self._lose_outputs(unit)
        return _event(Moment.FORWARD_END, unit.number)

    def settle(self, unit: UnitStep, *, leads_back: bool) -> None:
        """Take note if the backward of a unit may come on any rank. See [Note: Left out].

        That of an earlier forward counts, too.
        """
        if not leads_back and unit.phase is Phase.DUE:
            unit.stand_ins.clear()
            self._lose_outputs(unit)

    def _lose_outputs(self, unit: UnitStep) -> None:
        unit.move("lose its outputs")
        self._due.pop(unit, None)

    # ---- backward -------------------------------------------------------------------------------

    def begun_by(self, call: _Call, task: int) -> Sequence[_Call]:
        """The calls that begin when an output of ``call``, and of calls around it, has gradient."""
        if call.begun or task == call.over_in:
            return ()
        chain: list[Any] = [call]
        parent = call.parent
        while parent is not None and not parent.begun and parent.unit.awaits(parent):
            chain.insert(0, parent)
            parent = parent.parent
        return chain

    def call_begins(self, call: UnitCall, task: int) -> Sequence[Event]:
        """The backward of a call begins: a gradient has reached an output."""
        self._task, self.in_backward = task, True
        self._events = []
        call.begun, call.to_come = True, call.watched
        self._reached.add(call.made_in)
        self._recomputed = call.made_in
        unit = call.unit
        if unit.reach(call, task):
            if not unit.begun:
                self._pass_over(after=unit.last_end if call.ended_at < 0 else call.ended_at)
            if not unit.phase.open:  # as it is if a later call of the unit was passed over
                self._begin(unit)
        return self._events

    def gradient_arrives(self, unit: UnitStep, index: int, task: int) -> Sequence[Event]:
        """A parameter has its gradient, or a part of it."""
        self._task, self.in_backward = task, True
        self._events = []
        unit.here.add(index)
        came = unit.came.get(task)
        if came is not None:
            came.add(index)
        if unit.phase is Phase.AT_REST:
            unit.move("take a gradient")
            self._active[unit] = None
        call = unit.last_reached()
        if call is not None and call.begun and call.watched:
            return self._events  # it is not over: gradients of inputs will come
        if unit.phase.open:
            self._end_what_is_over(unit)
        return self._events

    def input_arrives(self, call: UnitCall, task: int) -> Sequence[Event]:
        """An input of a call has its gradient."""
        call.to_come -= 1
        if not call.begun or call.to_come:
            return ()
        self._task = call.over_in = task
        self._events = []
        call.begun = False
        call.unit.forget_call(call)
        self._end_what_is_over(call.unit)
        return self._events

    def backward_ends(self, task: int) -> Sequence[Event]:
        """Autograd has nothing left to do: what is still due is over."""
        self._task = task
        self._events = []
        self._pass_over(after=-1)
        for unit in sorted(self._due, key=lambda unit: -unit.first_begin):
            if unit.phase.due:
                self._end(unit)
        for unit in list(self._active):
            self._end(unit)
        self._due.clear()
        self._recomputed = 0
        for unit in self._alive():
            unit.begun = False
            for call in [call for call in unit.stand_ins if call.made_in in self._reached]:
                unit.pass_over(call, task)
            if unit.held_back and unit.requires_gradient_sync:
                self._end(unit)  # this micro-batch did not use it, earlier ones did
        self._reached.clear()
        self.in_backward = False
        self._events.append(_event(Moment.STEP_END))
        return self._events

    def _alive(self) -> list[UnitStep]:
        return [unit for reference in self._units if (unit := reference()) is not None]

    def _begin(self, unit: UnitStep) -> None:
        unit.move("begin backward")
        unit.begun = True
        self._active[unit] = None
        self._events.append(_event(Moment.BACKWARD_BEGIN, unit.number))

    def _pass_over(self, after: int) -> None:
        """Begin the units that were not used as others may. See [Note: One order on all ranks]."""
        due = self._due_after(after)
        passed: list[tuple[float, UnitStep]] = [(u.last_end, u) for u in due if not u.begun]
        if self.partial:
            passed += self._calls_of(due, after)
        if len(passed) > 1:
            passed.sort(key=_latest)
        for at, unit in passed:
            if not unit.phase.due:
                continue
            if not unit.begun:
                self._begin(unit)
            # A partial unit awaits its calls as long as ranks do that have made them.
            last = at if unit.partial else after
            for call in unit.calls(self._reached):
                if call.began_at > last and not call.begun:
                    unit.pass_over(call, self._task)
            self._end_what_is_over(unit)

    def _calls_of(self, units: Sequence[UnitStep], after: int) -> list[tuple[float, UnitStep]]:
        """The calls of partial units that began after an event, and that backward passes over."""
        calls = (call for unit in units if unit.partial for call in unit.calls())
        # Before what ended when the call began.
        return [(c.began_at - 0.5, c.unit) for c in calls if c.began_at > after and not c.begun]

    def _due_after(self, begin: int) -> list[UnitStep]:
        """The units that are due and whose latest forward began after ``begin``, latest first."""
        later: list[UnitStep] = []
        for unit in reversed(self._due):
            if unit.last_begin <= begin:
                break
            later.append(unit)
        return later

    def _end_what_is_over(self, unit: UnitStep) -> None:
        """End the backward of ``unit`` if it is over, then of the units that waited for it."""
        if not self._is_over(unit):
            return
        self._end(unit)
        still_open = [other for other in self._active if other.phase.open]
        for other in sorted(still_open, key=_turn):
            if self._is_over(other):
                self._end_what_is_over(other)
                return

    def _is_over(self, unit: UnitStep) -> bool:
        """See [Note: When a unit's backward is over]."""
        if unit.ends_with_backward or not unit.phase.open:
            return False
        if not unit.has_all_gradients(self._reached, self._task):
            return False
        if unit.phase.due:
            for later in self._due_after(unit.first_begin):
                if later is not unit and (later.phase.open or later.calls(self._reached)):
                    return False
            return True
        return not any(self._began_later(other, unit) for other in self._alive())

    def _began_later(self, other: UnitStep, unit: UnitStep) -> bool:
        """True if ``other`` is not over, and what is left of it began after ``unit``."""
        if other.phase.open and other.began_at > unit.began_at:
            return True
        again = [call for call in other.calls_over() if call.over_in != self._task]
        return any(
            call.began_at > unit.began_at and call.made_in in self._reached
            for call in (*other.calls(), *again)
        )

    def _end(self, unit: UnitStep) -> None:
        """A unit's backward is over."""
        self._active.pop(unit, None)
        if unit.phase.due:
            self._pass_over(after=unit.first_begin)
        unit.end_backward(self._task)
        if not unit.calls(self._reached):  # else units around it wait for an earlier call
            self._due.pop(unit, None)
        unit.held_back = bool(unit.trained) and not unit.requires_gradient_sync
        self._events.append(_event(Moment.BACKWARD_END, unit.number))


def _latest(passed: tuple[float, UnitStep]) -> float:
    return -passed[0]


def _turn(unit: UnitStep) -> tuple[bool, int]:
    """Sorts open units: those that are due come first, the latest forward before others."""
    return (False, -unit.last_begin) if unit.phase.due else (True, -unit.began_at)
