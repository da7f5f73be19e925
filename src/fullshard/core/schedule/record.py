# SPDX-License-Identifier: Apache-2.0
"""The events of a step: what one that was recorded tells about itself, and several about the next.

[Note: Followers]
Layers that are dropped at random, blocks in another order: no step repeats the one before, and a
record of a whole step is soon left. What is left then is what used to come after
each unit. A unit's follower is the one that came next in more than half of its last eight
forwards; without such a majority nothing is foreseen, since a unit gathered in vain costs the wire
as much as one that is needed. Ranks that see the same events foresee the same.
"""

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from enum import Enum, auto
from itertools import zip_longest
from typing import Any, NamedTuple


class Moment(Enum):
    """An event of a unit in a step."""

    __hash__: Any = object.__hash__  # that of Enum is slow

    FORWARD_BEGIN = auto()
    FORWARD_END = auto()
    BACKWARD_BEGIN = auto()
    BACKWARD_END = auto()  # the backwards of all its calls are over, gradients are complete
    STEP_END = auto()  # end of backward, or of a forward without one
    # Other ranks recompute the unit's forward now, for its backward, or only functions inside it
    # that run units; no schedule hears of it.
    RECOMPUTATION = auto()
    RECOMPUTATION_INSIDE = auto()


class Event(NamedTuple):
    """``moment`` of unit number ``unit`` (of no unit at STEP_END: -1)."""

    moment: Moment
    unit: int = -1


_BACKWARD = (Moment.BACKWARD_BEGIN, Moment.BACKWARD_END)


def first_of_backward(events: Sequence[Event]) -> int:
    """Return the position of the first event of backward, or the number of events."""
    backward = (place for place, event in enumerate(events) if event.moment in _BACKWARD)
    return next(backward, len(events))


def upcoming(events: Sequence[Event], position: int, turn: int) -> Iterator[int]:
    """Yield the units whose use begins after ``events[position]``, up to the end of its phase.

    ``turn`` is the position of the first event of backward.
    """
    for place in range(position + 1, turn if position < turn else len(events)):
        moment, unit = events[place]
        if moment in (Moment.FORWARD_BEGIN, Moment.BACKWARD_BEGIN):
            yield unit


def needed_before(events: Sequence[Event], position: int, most: int) -> list[int] | None:
    """Return the units that backward needs before the one whose forward ends at ``position``.

    Without those around it, if it was the last to run. None if no forward ends there, another
    backward or forward comes first, or one of a unit that is not among them, or if as many as
    ``most`` run before then.
    """
    moment, unit = events[position]
    if moment is not Moment.FORWARD_END:
        return None
    begun: set[int] = set()
    around: set[int] = set()
    before: list[int] = []
    in_backward = False
    for place in range(position + 1, len(events)):
        moment, other = events[place]
        in_backward = in_backward or moment is Moment.BACKWARD_BEGIN
        begins = moment in (Moment.FORWARD_BEGIN, Moment.BACKWARD_BEGIN)
        if in_backward and begins:  # recomputed, or backward
            if other == unit:
                if not begun:
                    return [each for each in before if each not in around]
                return before if begun <= set(before) else None
            before.append(other)
        elif begins:
            begun.add(other)
            if other == unit or len(begun) >= most:
                break
        elif not in_backward and other not in begun:
            around.add(other)
    return None


_REMEMBERED = 8


class Habits:
    """Remembers, for each thing, the eight things that came after it last."""

    def __init__(self) -> None:
        self._after: dict[Hashable, deque[Any]] = {}

    def note(self, thing: Hashable, following: Any, times: int = 1) -> None:
        """Remember that ``following`` came after ``thing``, so many times in a row."""
        after = self._after.setdefault(thing, deque(maxlen=_REMEMBERED))
        after.extend([following] * min(times, _REMEMBERED))

    def usual(self, thing: Hashable) -> Any:
        """Return what came after ``thing`` in more than half of these times, or None."""
        after = self._after.get(thing)
        if not after:
            return None
        following, times = Counter(after).most_common(1)[0]
        return following if 2 * times > len(after) else None


class Followers:
    """Foresees what comes after a unit's forward from earlier steps. See [Note: Followers]."""

    def __init__(self) -> None:
        self._next = Habits()
        self._turned = Habits()

    def learn(self, events: Sequence[Event], times: int = 1) -> None:
        """Remember a step that has run ``times`` times in a row."""
        if not times:
            return
        turn = first_of_backward(events)
        begun = [unit for moment, unit in events[:turn] if moment is Moment.FORWARD_BEGIN]
        for unit, following in zip_longest(begun, begun[1:]):
            self._next.note(unit, following, times)
        for place, event in enumerate(events[:turn]):
            if event.moment is Moment.FORWARD_END:
                self._turned.note(event.unit, needed_before(events, place, 1) == [], times)

    def after(self, unit: int) -> Iterator[int]:
        """Yield the units that are likely to run forward after ``unit``, in order, each once."""
        seen = {unit}
        while (following := self._next.usual(unit)) is not None and following not in seen:
            yield following
            seen.add(following)
            unit = following

    def turns(self, unit: int) -> bool:
        """True if the unit's backward is likely to follow its forward."""
        return bool(self._turned.usual(unit))
