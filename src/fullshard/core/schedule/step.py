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
forward begins and ends (the feeder knows where, as ranks ask each other). From then on a call
stands in for the one that the rank has not made, or whose output leads nowhere here, as that of
frozen blocks behind a part that it has left out. It is awaited like any other; if backward reaches
the rank's own call, that takes its place, else it is passed over: the unit begins where the call
ended, and awaits it until where it began. When the root's forward ends, ranks tell each other which
units' backward may come on any of them; `settle` forgets what stands in for the others. If several
forwards wait for their backward, a parameter's gradient may be complete in one or the other, as
ranks have run a unit in one or in both; all units then end when autograd has finished. A backward
through a graph that was kept awaits what stood in the first time once more.
"""

import weakref
from collections.abc import Iterator, Sequence
from functools import cache
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

from fullshard.core.schedule.record import Event, Moment
from fullshard.core.schedule.unit_step import Phase, UnitCall, UnitStep

_event = cache(Event)
# Members of an Enum are slow to look up.
_FORWARD_BEGIN, _FORWARD_END = Moment.FORWARD_BEGIN, Moment.FORWARD_END
_BACKWARD_BEGIN, _BACKWARD_END = Moment.BACKWARD_BEGIN, Moment.BACKWARD_END
_AT_REST = Phase.AT_REST

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
        # Several forwards wait for their backward, and of partial units it may come in each.
        self._several = False
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
        if self.partial:
            self._forget_unreachable()

    def _waiting(self) -> set[int]:
        """The forwards of the root whose backward may come."""
        root = self._units[0]()
        return set() if root is None else {call.made_in for call in root.calls()}

    def _forget_unreachable(self) -> None:
        """Forget what stands in for calls of forwards whose outputs are gone."""
        alive = self._waiting()
        root = self._units[0]()
        kept = alive if root is None else alive | {call.made_in for call in root.calls_over()}
        for unit in self._alive():
            unit.passed = [call for call in unit.passed if call.made_in in kept]
        for unit in list(self._due):
            for call in [call for call in unit.stand_ins if call.made_in not in alive]:
                unit.pass_over(call, -1)
            if unit.phase is Phase.DUE and not unit.calls():
                self._lose_outputs(unit)

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
        return _event(_FORWARD_BEGIN, unit.number)

    def new_call(self, unit: UnitStep, kind: type[_Call]) -> _Call:
        """The unit's forward that runs already, as a call whose backward may come."""
        parent = None
        for around in reversed(self.running):
            if around is not unit:
                parent = around.call
                break
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
                call.ended_at, call.recomputed = self._now, unit.recomputed
            if unit.partial:
                unit.stand_in((self._recomputed or self._forwards, unit.last_begin), self._now)
            elif not (call is not None and call.leads_back) and not unit.calls():
                self._lose_outputs(unit)
        return _event(_FORWARD_END, unit.number)

    def leads_back(self, unit: UnitStep) -> bool:
        """True if the backward of a unit may come on this rank, of the root's latest forward."""
        return any(not call.stands_in for call in unit.calls({self._forwards}))

    def settle(self, unit: UnitStep, *, leads_back: bool) -> None:
        """Take note if that may come on any rank. See [Note: Left out]."""
        if not leads_back:
            for call in unit.calls({self._forwards}):
                unit.pass_over(call, -1)
            if unit.phase is Phase.DUE and not unit.calls():
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
        while parent is not None and not parent.begun:
            again = self.partial and parent.over_in not in (-1, task)  # through a kept graph
            if not again and not parent.unit.awaits(parent):
                break
            chain.insert(0, parent)
            parent = parent.parent
        return chain

    def call_begins(self, call: UnitCall, task: int) -> Sequence[Event]:
        """The backward of a call begins: a gradient has reached an output."""
        if self.partial and not self.in_backward:
            self._several = len(self._waiting()) > 1
        self._task, self.in_backward = task, True
        self._events = []
        call.begun, call.to_come = True, call.watched
        self._reached.add(call.made_in)
        self._recomputed = call.made_in
        unit = call.unit
        if self.partial and not unit.partial:
            self._await_again(call.made_in)
        if self.partial:
            stand_in = unit.stand_in_of(call, self._reached)
            ended_at = call.ended_at if stand_in is None else stand_in.ended_at
            self._pass_over(unit.last_end if ended_at < 0 else ended_at)
            if stand_in is not None:
                unit.pass_over(stand_in, task)
            unit.reach(call, task)
            self._come_to(call)
        elif unit.reach(call, task):
            if not unit.begun:
                self._pass_over(unit.last_end if call.ended_at < 0 else call.ended_at)
            if not unit.phase.open:  # as it is if a later call of the unit was passed over
                self._begin(unit)
        return self._events

    def _await_again(self, forward: int) -> None:
        """Await again what an earlier backward through this forward of the root has passed."""
        for unit in self._alive():
            if unit.await_again(forward) and not unit.phase.due:
                unit.move("await other calls")
                self._due[unit] = None

    def runs_again(self, unit: UnitStep, task: int) -> Sequence[Event]:
        """A recomputation runs ``unit``, a partial one.

        Backward may come to it later on, but is past what came behind the recomputed function.
        """
        calls = unit.calls({self._recomputed})
        again = [call.function for call in calls if call.function is not None]
        again = [function for function in again if function.again_in != task]
        self._events = []
        if again:
            again[-1].again_in = self._task = task
            self._pass_over(after=again[-1].ended_at)
        return self._events

    def gradient_arrives(self, unit: UnitStep, index: int, task: int) -> Sequence[Event]:
        """A parameter has its gradient, or a part of it."""
        self._task, self.in_backward = task, True
        unit.take((index,), task)
        if not unit.phase.open:
            if unit.phase is _AT_REST:
                unit.move("take a gradient")
                self._active[unit] = None
            return ()
        call = unit.last_reached()
        if call is not None and call.begun and call.watched:
            return ()  # it is not over: gradients of inputs will come
        self._events = []
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

    @property
    def may_be_over(self) -> bool:
        """True in a backward that goes through one forward of the root, of partial units."""
        return self.partial and self.in_backward and not self._several

    def rest_is_over(self, task: int) -> Sequence[Event]:
        """End what backward has come to, and pass over the rest, of which nothing will come."""
        self._task = task
        self._events = []
        self._pass_over(after=-1)
        self._several = False
        begin = attrgetter("began_at" if self.partial else "first_begin")
        for unit in sorted(self._due, key=begin, reverse=True):
            if unit.phase.open if self.partial else unit.phase.due:
                self._end(unit)
        for unit in list(self._active):
            self._end(unit)
        return self._events

    def backward_ends(self, task: int) -> Sequence[Event]:
        """Autograd has nothing left to do: what is still due is over."""
        self.rest_is_over(task)
        self._due = {unit: None for unit in self._due if self.partial and unit.phase.due}
        self._recomputed = 0
        for reference in self._units:
            unit = reference()
            if unit is None:
                continue
            unit.begun = False
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
        self._events.append(_event(_BACKWARD_BEGIN, unit.number))

    def _pass_over(self, after: int) -> None:
        """Begin the units that were not used as others may. See [Note: One order on all ranks]."""
        if self.partial:
            self._pass_over_calls(after)
            return
        passed = [unit for unit in self._due_after(after) if not unit.begun]
        if len(passed) > 1:
            passed.sort(key=attrgetter("last_end"), reverse=True)
        for unit in passed:
            if unit.begun or not unit.phase.due:
                continue
            self._begin(unit)
            for call in unit.calls(self._reached):
                if call.began_at > after and not call.begun:
                    unit.forget_call(call)
            self._end_what_is_over(unit)

    def _pass_over_calls(self, after: int) -> None:
        """Do so call by call, as ranks await those that they have made. See [Note: Left out]."""
        passed = [
            place
            for unit in self._due
            for call in unit.calls(self._reached)
            if call.began_at > after and call.ended_at >= 0 and not call.begun
            # A unit begins where its call has ended, and awaits it until that began.
            for place in ((call.ended_at, call, False), (call.began_at, call, True))
        ]
        passed.sort(key=itemgetter(0), reverse=True)
        for _, call, done in passed:
            unit = call.unit
            if not unit.awaits(call):
                continue
            if done:
                unit.pass_over(call, self._task)
                self._end_what_is_over(unit)
            else:
                self._come_to(call)
                if call.recomputed is not None:
                    self._events.append(_event(call.recomputed, unit.number))

    def _come_to(self, call: UnitCall) -> None:
        """Backward has come to where a call of a partial unit ended, be it reached or passed."""
        unit = call.unit
        if unit.phase.open:
            unit.began_at = min(unit.began_at, call.began_at)
        else:
            unit.began_at = call.began_at
            self._begin(unit)
        self._end_others()

    def _due_after(self, begin: int) -> Iterator[UnitStep]:
        """The units that are due and whose latest forward began after ``begin``, latest first."""
        for unit in reversed(self._due):
            if unit.last_begin <= begin:
                return
            yield unit

    def _end_what_is_over(self, unit: UnitStep) -> None:
        """End the backward of ``unit`` if it is over, then of the units that waited for it."""
        if not self._is_over(unit):
            return
        self._end(unit)
        if self._active:
            self._end_others()

    def _end_others(self) -> None:
        still_open = [other for other in self._active if other.phase.open]
        for other in sorted(still_open, key=_turn) if len(still_open) > 1 else still_open:
            if self._is_over(other):
                self._end_what_is_over(other)
                return

    def _is_over(self, unit: UnitStep) -> bool:
        """See [Note: When a unit's backward is over]."""
        if unit.ends_with_backward or self._several or not unit.phase.open:
            return False
        in_turn = unit.phase.due and not self.partial
        if in_turn:
            for later in self._due_after(unit.first_begin):
                if later is not unit and (later.phase.open or later.calls(self._reached)):
                    return False
        if not unit.has_all_gradients(self._reached, self._task):
            return False
        return in_turn or not any(self._began_later(other, unit) for other in self._alive())

    def _began_later(self, other: UnitStep, unit: UnitStep) -> bool:
        """True if ``other`` is not over, and what is left of it began after ``unit``."""
        if other.phase.open and other.began_at > unit.began_at:
            return True
        left = other.calls(self._reached)
        if self.partial and other.phase.open:  # what has begun here may be over elsewhere
            left = [call for call in left if not call.begun]
        if not unit.phase.due:  # its backward may have been over, and come again
            again = (call for call in other.calls_over() if call.over_in != self._task)
            left += [call for call in again if call.made_in in self._reached]
        return any(call.began_at > unit.began_at for call in left)

    def _end(self, unit: UnitStep) -> None:
        """A unit's backward is over."""
        self._active.pop(unit, None)
        if unit.phase.due:
            self._pass_over(after=unit.began_at if self.partial else unit.first_begin)
        unit.end_backward(self._task)
        if self.partial and unit.calls():  # of other forwards
            unit.move("await other calls")
        elif not unit.calls(self._reached):  # else units around it wait for an earlier call
            self._due.pop(unit, None)
        unit.held_back = bool(unit.trained) and not unit.requires_gradient_sync
        self._events.append(_event(_BACKWARD_END, unit.number))


def _turn(unit: UnitStep) -> tuple[bool, int]:
    """Sorts open units: those that are due come first, the latest forward before others."""
    due = unit.phase.due and not unit.partial
    return (False, -unit.last_begin) if due else (True, -unit.began_at)
