# SPDX-License-Identifier: Apache-2.0
"""The record of one unit in the step that is running, and of its calls."""

import weakref
from collections.abc import Callable, Collection, Iterable, Set
from enum import Enum
from typing import Any

from fullshard.core.errors import UsageError
from fullshard.core.schedule.record import Moment


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
    ("await other calls", Phase.AT_REST): Phase.DUE,
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
    optional: bool  # ranks may leave it out of a forward
    # Its backward may come on some ranks only: one of its model's units is optional.
    partial: bool
    phase: Phase
    running: int  # in how many forwards it is now: its own, and those of modules that call it again
    # How backward recomputes the forward that runs now, or ran last, together with other ranks.
    recomputed: Moment | None
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
    stand_ins: list["UnitCall"]  # see [Note: Left out]
    passed: list["UnitCall"]  # of these, what backward has passed or reached, and may come to again
    _absent: dict[int, Set[int]]

    def __init__(self, trained: Collection[int], absent: Callable[[], Set[int]]):
        self.trained, self._ask = trained, absent
        self.number = -1
        self.ends_with_backward = self.counts = False
        self.optional = self.partial = False
        self.recomputed = None
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
        self.stand_ins, self.passed = [], []

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

    def stand_in(self, made: tuple[int, int], ended_at: int) -> None:
        """Await the backward of a call that only other ranks may have made, or still keep."""
        call = UnitCall(self, None, made)
        call.stands_in, call.ended_at, call.recomputed = True, ended_at, self.recomputed
        call.await_backward()
        self.stand_ins.append(call)

    def stand_in_of(self, call: "UnitCall", forwards: Set[int]) -> "UnitCall | None":
        """Return what stands in for ``call``, made in one of these ``forwards`` of the root."""
        for each in reversed(self.stand_ins):
            recomputed = call.ended_at < 0  # is what the latest one stands for
            if each.made_in in forwards and (recomputed or each.began_at == call.began_at):
                return each
        return None

    def pass_over(self, call: "UnitCall", task: int) -> None:
        """Do not await the backward of ``call``, which graph task ``task`` does not reach."""
        self.forget_call(call)
        if call.stands_in:
            call.over_in = task
            self.stand_ins.remove(call)
            if task >= 0:
                self.passed.append(call)

    def await_again(self, forward: int) -> bool:
        """Await again what stood in for calls made in a ``forward`` of the root; False if none."""
        again = [call for call in self.passed if call.made_in == forward]
        for call in again:
            self.passed.remove(call)
            self.stand_ins.append(call)
            self.add_call(call)
        return bool(again)

    def calls_over(self) -> list["UnitCall"]:
        """The calls whose backward was over before and may come again, in a graph that is kept."""
        return [call for reference in self._over.values() if (call := reference()) is not None]

    # ---- backward -------------------------------------------------------------------------------

    def reach(self, call: "UnitCall", task: int) -> bool:
        """Note that graph task ``task`` has reached ``call``; False if backward was open."""
        self.last_reached = self._calls[id(call)] = weakref.ref(call)
        self.came.setdefault(task, set())
        if self.phase.open:
            self.began_at = min(self.began_at, call.began_at)
            return False
        self.began_at = call.began_at
        return True

    def take(self, indices: Iterable[int], task: int) -> None:
        """Note that gradients of these parameters, or parts of them, have come."""
        self.here.update(indices)
        came = self.came.get(task)
        if came is not None:
            came.update(indices)

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
            if call.watched or call.stands_in:
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


class CheckpointedFunction:
    """A function that backward runs again: when its last unit ended, and in which graph task."""

    def __init__(self) -> None:
        self.ended_at = self.again_in = -1


class UnitCall:
    """One forward of a unit whose backward may come; lives as long as a backward can reach it.

    It was ``made`` in a forward of the root, by number, and at a time of its step, in ``parent``.
    """

    ended_at: int = -1  # in events; never in a forward that backward has recomputed
    begun: bool = False  # backward has reached it, and not left it
    leads_back: bool = False  # some output needs gradients
    watched: int = 0  # inputs that need gradients
    to_come: int = 0  # of these
    over_in: int = -1  # the graph task in which its backward has been over already
    stands_in: bool = False  # for one that only other ranks may have made
    recomputed: Moment | None = None  # in backward, together with other ranks
    function: CheckpointedFunction | None = None  # that ran it

    def __init__(self, unit: UnitStep, parent: "UnitCall | None", made: tuple[int, int]):
        self.unit = unit
        self.parent = parent
        self.made_in: int = made[0]
        self.began_at: int = made[1]

    def await_backward(self) -> None:
        """Some output of the call leads back into it."""
        self.leads_back = True
        self.unit.add_call(self)
