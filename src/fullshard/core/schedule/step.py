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
"""

import weakref
from collections.abc import Callable, Collection, Sequence, Set
from enum import Enum
from functools import cache
from typing import Any, TypeVar

from fullshard.core.errors import UsageError
from fullshard.core.schedule.record import Event, Moment

__all__ = ["Phase", "StepMachine", "UnitCall", "UnitStep"]

_event = cache(Event)


class Phase(Enum):
    """The stages of a unit in a step.

    ``due``: its forward has run with gradients, and its backward is waited for. ``open``: its
    backward has begun and is not over.
    """

    __hash__: Any = object.__hash__  # that of Enum is slow

    AT_REST = (False, False, "at rest")
    DUE = (True, False, "between forward and backward")
    LATE = (False, False, "given gradients though nobody waited for them")
    BACKWARD = (True, True, "in backward")
    LATE_BACKWARD = (False, True, "in a backward that nobody waited for")

    def __init__(self, due: bool, open: bool, text: str):
        self.due = due
        self.open = open
        self.text = text


_MOVES = {
    ("run forward", Phase.AT_REST): Phase.DUE,
    ("run forward", Phase.DUE): Phase.DUE,
    ("run forward", Phase.LATE): Phase.DUE,
    ("run forward", Phase.BACKWARD): Phase.BACKWARD,
    ("run forward", Phase.LATE_BACKWARD): Phase.BACKWARD,
    # No output of its forwards leads back to it.
    ("lose its outputs", Phase.AT_REST): Phase.AT_REST,
    ("lose its outputs", Phase.DUE): Phase.AT_REST,
    ("lose its outputs", Phase.LATE): Phase.LATE,
    ("lose its outputs", Phase.BACKWARD): Phase.LATE_BACKWARD,
    ("lose its outputs", Phase.LATE_BACKWARD): Phase.LATE_BACKWARD,
    ("take a gradient", Phase.AT_REST): Phase.LATE,
    ("begin backward", Phase.AT_REST): Phase.LATE_BACKWARD,
    ("begin backward", Phase.DUE): Phase.BACKWARD,
    ("begin backward", Phase.LATE): Phase.LATE_BACKWARD,
    ("end backward", Phase.AT_REST): Phase.AT_REST,  # micro-batches before this one used it
    ("end backward", Phase.DUE): Phase.AT_REST,
    ("end backward", Phase.LATE): Phase.AT_REST,
    ("end backward", Phase.BACKWARD): Phase.AT_REST,
    ("end backward", Phase.LATE_BACKWARD): Phase.AT_REST,
}
"""The only legal moves. A unit that is called again, or recomputed, goes through several."""


_CALLS_KEPT = 16


class UnitStep:
    """The record of one unit in the step that is running.

    ``trained`` holds the indices of the parameters that get gradients, and may change between
    steps. ``absent`` tells which of them get none in the graph task that runs now: autograd knows.
    """

    trained: Collection[int]
    number: int
    # A path to others' parameters leads through the unit, which stays full until autograd is over.
    ends_with_backward: bool
    # Gradients are reduced when backward is over, and not held back for a later micro-batch.
    requires_gradient_sync: bool
    phase: Phase
    running: int  # in how many forwards it is now: its own, and those of modules that call it again
    # The call that runs forward now, of the class that the feeder makes, if its backward may come.
    call: Any
    counts: bool  # the forward that runs now is one whose backward is waited for
    begun: bool  # backward has begun once since autograd began
    held_back: bool  # full gradients of earlier micro-batches wait for a reduce
    # When the unit's first forward in this step began, its last one began, and its last one ended,
    # in events of the step; and when the earliest call began whose backward is open.
    first_begin: int
    last_begin: int
    last_end: int
    began_at: int
    last_reached: Callable[[], "UnitCall | None"]  # the call that backward has reached last
    # The calls whose autograd graphs exist and whose backward is awaited, or was over before and
    # comes again if the graph is kept. Neither keeps any alive.
    _calls: dict[int, "weakref.ref[UnitCall]"]
    _over: dict[int, "weakref.ref[UnitCall]"]
    # Parameters whose gradients are here; by graph task, those that came, and will not come.
    here: set[int]
    came: dict[int, set[int]]
    _absent: dict[int, Set[int]]

    def __init__(self, trained: Collection[int], absent: Callable[[], Set[int]]):
        self.trained, self._ask = trained, absent
        self.number = -1
        self.ends_with_backward = self.counts = False
        self.requires_gradient_sync = True
        self.first_begin = self.last_begin = self.last_end = self.began_at = 0
        self.last_reached = lambda: None
        self.forget()

    def forget(self) -> None:
        """Return to rest, whatever has happened."""
        self.phase = Phase.AT_REST
        self.running = 0
        self.call = None
        self.begun = self.held_back = False
        self._calls, self._over = {}, {}
        self.here, self.came, self._absent = set(), {}, {}

    def move(self, what: str) -> None:
        """Make one of the legal moves."""
        after = _MOVES.get((what, self.phase))
        if after is None:
            text = f"a unit cannot {what} while it is {self.phase.text}; this is a defect of "
            raise UsageError(f"{text}fullshard's step, please report it with the model's forward")
        self.phase = after

    def run_forward(self, now: int) -> None:
        """Begin a forward at event ``now`` whose backward is waited for."""
        if not self.phase.due:
            self.first_begin = now
        self.last_begin = now
        self.move("run forward")

    # ---- calls ----------------------------------------------------------------------------------

    def add_call(self, call: "UnitCall") -> None:
        """Await the backward of ``call``."""
        self._calls[id(call)] = weakref.ref(call)

    def forget_call(self, call: "UnitCall") -> None:
        """Do not await the backward of ``call`` any more."""
        reference = self._calls.pop(id(call), None)
        if reference is not None:
            if len(self._over) > _CALLS_KEPT:  # mostly of graphs that are gone
                self._over = {id(over): weakref.ref(over) for over in self.calls_over()}
            self._over[id(call)] = reference

    def awaits(self, call: "UnitCall") -> bool:
        """True if the backward of ``call`` is awaited."""
        return id(call) in self._calls and self._calls[id(call)]() is call

    def calls(self, forwards: Set[int] | None = None) -> list["UnitCall"]:
        """The calls whose backward is awaited, oldest first; of these ``forwards`` of the root."""
        if not self._calls:
            return []
        # Not a WeakSet: its guards take longer than all else that happens in an event.
        alive = [call for reference in self._calls.values() if (call := reference()) is not None]
        if len(alive) < len(self._calls):
            self._calls = {id(call): weakref.ref(call) for call in alive}
        if forwards is None:
            return alive
        return [call for call in alive if call.made_in in forwards]

    def calls_over(self) -> list["UnitCall"]:
        """The calls whose backward was over before and may come again, in a graph that is kept."""
        return [call for reference in self._over.values() if (call := reference()) is not None]

    # ---- backward -------------------------------------------------------------------------------

    def reach(self, call: "UnitCall", task: int) -> bool:
        """Note that graph task ``task`` has reached ``call``; False if backward was open."""
        self.add_call(call)
        self.last_reached = weakref.ref(call)
        self.came.setdefault(task, set())
        if self.phase.open:
            self.began_at = min(self.began_at, call.began_at)
            return False
        self.began_at = call.began_at
        return True

    def end_backward(self, task: int) -> None:
        """End the backward, and that of the calls it has reached."""
        for call in self.calls():
            if call.begun:
                call.begun, call.over_in = False, task
                self.forget_call(call)
        self.move("end backward")
        self.here, self.came, self._absent = set(), {}, {}

    def has_all_gradients(self, forwards: Set[int], task: int) -> bool:
        """True if no gradient is still to come, of a parameter or of the inputs of a call.

        Only calls made in one of these ``forwards`` of the root are asked.
        """
        calls = self.calls(forwards)
        for call in calls:
            if call.watched:
                return False
        trained = len(self.trained)
        if calls and len(self.here) < trained:
            return False
        for of, came in self.came.items():
            missing = trained - len(came)
            # Each accumulates once in a task: there is no need to ask when all have.
            if missing and missing != len(self._absent_in(of, task) - came):
                return False
        return True

    def _absent_in(self, of: int, task: int) -> Set[int]:
        """The parameters that get no gradient in task ``of``; unknown while another one runs."""
        if of not in self._absent:
            if of != task:
                return set()
            self._absent[of] = self._ask()
        return self._absent[of]


class UnitCall:
    """One forward of a unit whose backward may come; lives as long as a backward can reach it.

    It was ``made`` in a forward of the root, by number, and at a time of its step, in ``parent``.
    """

    def __init__(self, unit: UnitStep, parent: "UnitCall | None", made: tuple[int, int]):
        self.unit = unit
        self.parent = parent
        self.made_in: int = made[0]
        self.began_at: int = made[1]
        self.begun = False  # backward has reached it, and not left it
        self.leads_back: bool = False  # some output needs gradients
        self.watched = 0  # inputs that need gradients
        self.to_come = 0  # of these
        self.over_in = -1  # the graph task in which its backward has been over already

    def await_backward(self) -> None:
        """Some output of the call leads back into it."""
        self.leads_back = True
        self.unit.add_call(self)


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
            if not (call is not None and call.leads_back) and not unit.calls():
                unit.move("lose its outputs")
                self._due.pop(unit, None)
        return _event(Moment.FORWARD_END, unit.number)

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
                self._pass_over(after=unit.last_end)
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
        for unit in sorted(self._due, key=lambda unit: -unit.first_begin):
            if unit.phase.due:
                if not unit.begun:
                    self._begin(unit)
                self._end(unit)
        for unit in list(self._active):
            self._end(unit)
        self._due.clear()
        self._reached.clear()
        self._recomputed = 0
        for unit in self._alive():
            unit.begun = False
            if unit.held_back and unit.requires_gradient_sync:
                self._end(unit)  # this micro-batch did not use it, earlier ones did
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
        unused = [unit for unit in self._due_after(after) if not unit.begun]
        for unit in sorted(unused, key=lambda unit: -unit.last_end):
            if unit.phase.due and not unit.begun:
                self._begin(unit)
                for call in unit.calls(self._reached):
                    if call.began_at > after:
                        unit.forget_call(call)
                self._end_what_is_over(unit)

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


def _turn(unit: UnitStep) -> tuple[bool, int]:
    """Sorts open units: those that are due come first, the latest forward before others."""
    return (False, -unit.last_begin) if unit.phase.due else (True, -unit.began_at)
