# SPDX-License-Identifier: Apache-2.0
"""Events of a running step turned into ops: steps recorded, foreseen and replayed.

[Note: Record, replay, fall back]
During the first step nobody knows what comes next, so units are gathered when they are needed
(backward is foreseen as forward in reverse). The events of that step are recorded and compiled into
one list of ops for every event, with prefetches in it, each bound once to what carries it out. The
next steps replay that list: one comparison for each event. An event that is not the recorded one
ends the replay; the rest of that step is decided on demand, recorded anew, and compiled again. Four
such lists are kept: the next step replays the one that usually follows, else the usual one, so that
two models in turn are each replayed, and one step of another kind does not spoil the next. On
demand, what used to follow is gathered ahead ([Note: Followers] in `record`), and freed again when
it is in the way.

"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.core.errors import UsageError
from fullshard.core.schedule.record import (
    Event,
    Followers,
    Habits,
    Moment,
    first_of_backward,
)
from fullshard.core.schedule.rules import Op, State, UnitPolicy
from fullshard.core.strategy import Prefetch

_STEP_END = Moment.STEP_END  # a member of an Enum is slow to look up
_KEPT = 4  # records
_ANY = 0


@dataclass(frozen=True)
class _Compiled:
    events: tuple[Event, ...]
    ops: tuple[list[Any], ...]  # bound
    before: tuple[State, ...]


class _Records:
    """Recorded steps, numbered as they came, and which of them comes next.

    Numbers are the same on ranks that run the same steps, so all choose the same.
    """

    def __init__(self) -> None:
        self._kept: dict[int, _Compiled] = {}  # the one that ran latest is the last
        self._number = -1  # of that one
        self._made = 0
        self._habits = Habits()

    def find(self, events: tuple[Event, ...]) -> int | None:
        """Return the number of the record of these events, if there is one."""
        return next((each for each in self._kept if self._kept[each].events == events), None)

    def add(self, record: _Compiled) -> int:
        """Keep a record instead of the one that has not run for longest; return its number."""
        if len(self._kept) == _KEPT:
            del self._kept[next(iter(self._kept))]
        self._made += 1
        self._kept[self._made] = record
        return self._made

    def next_after(self, number: int) -> int:
        """Return the number of what the next step is likely to replay, now that one has run."""
        self._habits.note(self._number, number)
        self._habits.note(_ANY, number)
        self._number = number
        self._kept[number] = self._kept.pop(number)
        usual = (self._habits.usual(number), self._habits.usual(_ANY))
        return next((each for each in usual if each in self._kept), number)

    def __getitem__(self, number: int) -> _Compiled:
        return self._kept[number]

    def __len__(self) -> int:
        return len(self._kept)


class Scheduler:
    """Turns events into ops as they happen. See [Note: Record, replay, fall back].

    ``bind`` makes of an op what `on` gives for it; ``bind_early`` where gathers are to begin early,
    on a device that can do that. See [Note: Gathers that nobody foresaw] in `rules`.
    """

    def __init__(
        self,
        policies: Mapping[int, UnitPolicy],
        prefetch: Prefetch,
        bind: Callable[[Op], Any] = lambda op: op,
        bind_early: Callable[[Op], Any] | None = None,
    ):
        self._bind = bind
        self._bind_early = bind_early
        self._policies = dict(policies)
        self._prefetch = prefetch
        self._compiled: _Compiled | None = None
        self._number = 0  # of what is replayed
        self._records = _Records()
        self._followers = Followers()
        self._to_learn: tuple[tuple[Event, ...], int] = ((), 0)  # a step, and how often it ran
        self._cursor = 0
        self._restart()

    def _restart(self) -> None:
        self._cursor = 0
        self._state: State | None = None
        self._events: list[Event] = []
        self._to_come_back: list[int] = []  # units whose backward is still due, in forward order
        self._in_backward = False
        self._turned = False  # a unit's backward is over

    @property
    def idle(self) -> bool:
        """True between steps."""
        return self._cursor == 0 and not self._events

    @property
    def has_records(self) -> bool:
        """True if a step has been recorded: one that is decided on demand is in another order."""
        return bool(self._records)

    @property
    def repeated(self) -> int:
        """The number of times in a row that the last step has run with the same events."""
        return self._to_learn[1]

    @property
    def _can_begin_early(self) -> bool:
        ahead = self._prefetch.forward or self._prefetch.least_bytes
        return self._bind_early is not None and bool(ahead) and self.has_records

    def _gathers_early(self, event: Event) -> bool:
        """True if gathers are to begin early: from where a record was left to the turnaround."""
        begins = Moment.BACKWARD_BEGIN if self._in_backward else Moment.FORWARD_BEGIN
        return self._can_begin_early and event.moment is begins and not self._turned

    @property
    def recorded(self) -> int:
        """Events of this step that were decided on demand."""
        return len(self._events)

    def on(self, event: Event) -> Sequence[Any]:
        """The ops to carry out now, in order, each as it was bound."""
        compiled = self._compiled  # whose last event is the end of a step
        if compiled is None:
            return self._decide_on_demand(event)
        cursor = self._cursor
        if compiled.events[cursor] != event:
            self._leave_the_record(compiled)
            return self._decide_on_demand(event)
        self._cursor = cursor + 1
        if event[0] is _STEP_END:
            self._end(self._number)
        return compiled.ops[cursor]

    def _leave_the_record(self, compiled: _Compiled) -> None:
        cursor = self._cursor
        self._followers.learn(*self._to_learn)
        self._to_learn = (self._to_learn[0], 0)
        self._state = compiled.before[cursor].copy()
        self._events = list(compiled.events[:cursor])
        for event in self._events:
            self._foresee(event)
        self._compiled = None

    def _foresee(self, event: Event) -> None:
        if event.moment is Moment.FORWARD_END and not self._in_backward:
            self._to_come_back.append(event.unit)
        elif event.moment is Moment.BACKWARD_BEGIN:
            self._in_backward = True
            if event.unit in self._to_come_back:
                last = len(self._to_come_back) - 1 - self._to_come_back[::-1].index(event.unit)
                del self._to_come_back[last]
        elif event.moment is Moment.BACKWARD_END:
            self._turned = True

    def _compile(self, events: tuple[Event, ...]) -> _Compiled:
        state, turn = State(self._policies, self._prefetch), first_of_backward(events)
        ops, before = [], []
        for position in range(len(events)):
            before.append(state.copy())
            ops.append(list(map(self._bind, state.follow(events, position, turn))))
        return _Compiled(events, tuple(ops), tuple(before))

    def _decide_on_demand(self, event: Event) -> Sequence[Any]:
        if self._state is None:
            self._state = State(self._policies, self._prefetch)
        if event.unit not in self._policies and event.moment is not Moment.STEP_END:
            raise UsageError(f"unit {event.unit} is not known to this schedule")
        self._events.append(event)
        self._foresee(event)
        coming: Iterable[int] = ()
        bind_early = self._bind_early if self._gathers_early(event) else None
        if self._in_backward:
            coming = reversed(self._to_come_back)
        elif event.moment is Moment.FORWARD_BEGIN:
            coming = self._followers.after(event.unit)
            if bind_early:  # nor is what has run gathered for another time
                coming = (each for each in coming if each not in self._to_come_back)
        ends = event.moment is Moment.FORWARD_END
        turns = ends and (self._can_begin_early or self._followers.turns(event.unit))
        before = () if turns else None
        decided = self._state.decide(event, coming, before, sure=False, early=bool(bind_early))
        ops = list(map(bind_early or self._bind, decided))
        if event.moment is Moment.STEP_END:
            events = tuple(self._events)
            number = self._records.find(events)
            if number is None:
                number = self._records.add(self._compile(events))
            self._end(number)
        return ops

    def _end(self, number: int) -> None:
        """End a step that has been recorded; choose what the next one is to replay."""
        events, (before, times) = self._records[number].events, self._to_learn
        if events is not before:
            self._followers.learn(before, times)
            times = 0
        self._to_learn = (events, times + 1)
        self._number = self._records.next_after(number)
        self._compiled = self._records[self._number]
        self._restart()
