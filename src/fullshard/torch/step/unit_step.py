# SPDX-License-Identifier: Apache-2.0
"""A unit's record of the step that is running: its phase, the legal moves, and its calls."""

import weakref
from collections.abc import Callable, Set
from enum import Enum

from fullshard.core.errors import UsageError
from fullshard.torch.step.arrivals import Arrivals
from fullshard.torch.step.calls import Call

__all__ = ["Phase", "UnitStep"]


class Phase(Enum):
    """The stages of a unit in a step.

    ``due``: its forward has run with gradients, and its backward is waited for. ``open``: its
    backward has begun and is not over.
    """

    __hash__ = object.__hash__  # that of Enum is slow

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


def _none() -> None:
    return None


class UnitStep:
    """The record of one unit in the step that is running."""

    phase: Phase
    # In how many forwards the unit is now: its own, and those of modules that call it again.
    running: int
    # The forward that runs now is one whose backward is waited for.
    counts: bool
    # Backward has begun once since autograd began.
    begun: bool
    # Full gradients of earlier micro-batches wait for a reduce.
    held_back: bool
    # When the unit's first forward in this step began, its last one began, and its last one ended,
    # in events of the step; and when the earliest call began whose backward is open.
    first_begin: int
    last_begin: int
    last_end: int
    began_at: int
    # The call that backward has reached last.
    last_begun: Callable[[], Call | None]
    # Which gradients are here, and which are still to come.
    arrivals: Arrivals
    # The calls whose autograd graphs exist and whose backward is awaited; keeps none alive.
    _calls: dict[int, weakref.ref[Call]]

    def __init__(self) -> None:
        self.arrivals = Arrivals()
        self.first_begin = self.last_begin = self.last_end = self.began_at = 0
        self.counts = False
        self.last_begun = _none
        self.forget()

    def forget(self) -> None:
        """Return to rest, whatever has happened."""
        self.phase = Phase.AT_REST
        self.running = 0
        self.begun = self.held_back = False
        self._calls = {}
        self.arrivals.end_backward()

    def move(self, what: str) -> None:
        """Make one of the legal moves."""
        after = _MOVES.get((what, self.phase))
        if after is None:
            raise UsageError(
                f"a unit cannot {what} while it is {self.phase.text}; this is a defect of "
                "fullshard's step, please report it with the model's forward"
            )
        self.phase = after

    def run_forward(self, now: int) -> None:
        """Begin a forward at event ``now`` whose backward is waited for."""
        if not self.phase.due:
            self.first_begin = now
        self.last_begin = now
        self.move("run forward")

    def reach(self, call: Call) -> bool:
        """Note that backward has reached ``call``; False if the unit's backward was open."""
        self.add_call(call)
        self.last_begun = weakref.ref(call)
        self.arrivals.expect()
        if self.phase.open:
            self.began_at = min(self.began_at, call.began_at)
            return False
        self.began_at = call.began_at
        return True

    def begin_backward(self) -> None:
        """Begin a backward."""
        self.move("begin backward")
        self.begun = True

    def end_backward(self, forwards: Set[int]) -> bool:
        """End the backward, and that of the calls it has reached.

        True if none is awaited of a call made in one of these ``forwards`` of the root.
        """
        for call in self.calls():
            if call.begun:
                call.end()
                self.forget_call(call)
        self.move("end backward")
        self.arrivals.end_backward()
        return not self.calls(forwards)

    def add_call(self, call: Call) -> None:
        """Await the backward of ``call``."""
        self._calls[id(call)] = weakref.ref(call)

    def forget_call(self, call: Call) -> None:
        """Do not await the backward of ``call`` any more."""
        self._calls.pop(id(call), None)

    def awaits(self, call: Call) -> bool:
        """True if the backward of ``call`` is awaited."""
        return id(call) in self._calls and self._calls[id(call)]() is call

    def calls(self, forwards: Set[int] | None = None) -> list[Call]:
        """The calls whose backward is awaited, oldest first.

        Of these ``forwards`` of the root, if any are named.
        """
        if not self._calls:
            return []
        # Not a WeakSet: its guards take longer than all else that happens in an event.
        found = [call for reference in self._calls.values() if (call := reference()) is not None]
        if len(found) < len(self._calls):
            self._calls = {id(call): weakref.ref(call) for call in found}
        if forwards is None:
            return found
        return [call for call in found if call.made_in in forwards]

    def has_all_gradients(self, forwards: Set[int]) -> bool:
        """True if no gradient is still to come, of a parameter or of the inputs of a call.

        Only calls made in one of these ``forwards`` of the root are asked.
        """
        calls = self.calls(forwards)
        for call in calls:
            if call.watched:
                return False
        return self.arrivals.all_here if calls else self.arrivals.expected_here
