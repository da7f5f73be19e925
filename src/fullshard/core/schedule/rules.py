# SPDX-License-Identifier: Apache-2.0
"""The rules of a schedule: which ops follow an event, given what is used next.

The engine tells a `Scheduler` what happens: a unit's forward
begins, its backward ends, ... It gets back the ops to carry out, in order, by the rules here.
Nothing touches a tensor: the same function drives the engine, the planner and the tests.

[Note: The turnaround]
A unit whose backward follows its forward is not freed in between: it would be gathered again at
once, with nothing to compute meanwhile. Nor are the units before it if as many may be gathered
ahead in backward: with two ahead the last two are kept. Backward holds these anyway when it begins,
and nothing is gathered before then, so the peak stays what it was. Without prefetches in backward
all are freed, as somebody prefers memory to time. Only a record tells what comes next.

[Note: Gathers that nobody foresaw]
When a step leaves its record, gathers come when their units are needed. Then only the computation
of the unit before is there to hide them, and the host has queued it already: a gather must not wait
for it, nor take its memory. On a device it begins ``early``, and the unit before is freed when it
is under way. So that unit is still there if its backward comes instead. What was foreseen may still
come next, and is given up one unit later than elsewhere. At the turnaround, one unit more is
gathered ahead. All that takes one unit more than a step that follows its record.

[Note: Reduces in flight]
A reduce is issued before the ones ahead of it are waited for: the wire has something to do
meanwhile, and what gradients are copied into takes no more than the full parameters that have just
been dropped. If they travel in a wider dtype than that of computation it does take more, and the
earlier ones are waited for first. The wire has gathers to do meanwhile, but for the last unit.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple

from fullshard.core.layout import Layout
from fullshard.core.schedule.record import Event, Moment, first_of_backward, needed_before, upcoming
from fullshard.core.strategy import Prefetch


class OpKind(Enum):
    """An action of the engine on a unit."""

    __hash__: Any = object.__hash__  # that of Enum is slow, and there is one look-up for each op

    GATHER = "gather"  # start to gather the full parameters
    AWAIT_GATHER = "await_gather"  # they are needed now
    SHRINK = "shrink"  # drop the full parameters but for a part, to gather from fewer ranks
    FREE = "free"  # drop the full parameters, and such a part
    REDUCE = "reduce"  # start to reduce the full gradients to the shard gradient
    ALL_REDUCE = "all_reduce"  # drop the full gradients, start to sum shard gradients of replicas
    AWAIT_REDUCE = "await_reduce"  # deliver the shard gradient


OF_PARAMETERS = ("gather", "await_gather", "shrink", "free")
"""The names of the ops that are about a unit's full parameters; others are about its gradients."""


class Op(NamedTuple):
    """One action on one unit."""

    kind: OpKind
    unit: int


@dataclass(frozen=True)
class UnitPolicy:
    """The settings of one unit's schedule.

    ``full_bytes`` is its size when it is full. ``gathered`` is false for one whose resting state is
    the full one (replicated, or empty); ``reduced`` is false for one without trainable parameters.
    ``shrunk`` units keep a part of their full parameters when they are dropped after forward;
    ``replicated`` ones have shards on several ranks, whose gradients are summed after the reduce.
    ``unshard_in_backward`` is false if backward needs no parameters. ``prefetch_forward`` and
    ``prefetch_backward`` name the units that are gathered when this one's forward or backward
    begins, instead of those that come next. ``widened`` gradients take more memory when their
    reduce begins; earlier reduces are waited for before that, see [Note: Reduces in flight].
    ``optional`` units are gathered in forward when a rank runs them, and not ahead.
    """

    gathered: bool = True
    reduced: bool = True
    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    shrunk: bool = False
    replicated: bool = False
    unshard_in_backward: bool = True
    prefetch_forward: tuple[int, ...] | None = None
    prefetch_backward: tuple[int, ...] | None = None
    full_bytes: int = 0
    widened: bool = False
    optional: bool = False


def unit_policy(
    layout: Layout,
    *,
    root: bool,
    resident: bool,
    reduced: bool,
    reshard_after_forward: bool | None,
    replicas: int,
    on_cpu: bool,
) -> UnitPolicy:
    """Return the policy of a unit by its layout.

    ``reshard_after_forward`` None is for all units but the ``root``'s, whose parameters are needed
    again as soon as its forward is over. A ``resident`` one is full at rest. On a CPU the host
    would wait for the earlier reduces of `UnitPolicy.widened` gradients.
    """
    return UnitPolicy(
        gathered=bool(layout.segments) and not resident,
        reduced=reduced,
        reshard_after_forward=not root if reshard_after_forward is None else reshard_after_forward,
        replicated=layout.shards > 1 and replicas > 1,
        full_bytes=layout.full_bytes,
        widened=not on_cpu and layout.grad_copied_bytes > layout.full_bytes,
    )


class State:
    """The state of all units in the middle of a step, and the rules that change it."""

    def __init__(self, policies: Mapping[int, UnitPolicy], prefetch: Prefetch):
        self.policies = policies
        self.prefetch = prefetch
        self.gathering: set[int] = set()
        self.full: set[int] = set()
        self.shrunk: set[int] = set()
        self.reducing: list[int] = []
        self.all_reducing: list[int] = []
        self.open: dict[int, int] = {}
        self.turning: set[int] = set()  # kept for a backward that is to come next
        self.passed_over: set[int] = set()  # gathered ahead, when another unit came
        self.in_backward: bool = False
        self.early: bool = False  # gathers of this event begin early

    def copy(self) -> "State":
        """Return a state that changes by itself."""
        twin = State(self.policies, self.prefetch)
        twin.gathering = set(self.gathering)
        twin.full = set(self.full)
        twin.shrunk = set(self.shrunk)
        twin.reducing = list(self.reducing)
        twin.all_reducing = list(self.all_reducing)
        twin.open = dict(self.open)
        twin.turning = set(self.turning)
        twin.passed_over = set(self.passed_over)
        twin.in_backward = self.in_backward
        return twin

    def follow(self, events: Sequence[Event], position: int, turn: int) -> list[Op]:
        """Return the ops that follow ``events[position]`` in a step that is known to its end.

        Its backward begins at position ``turn``.
        """
        most = len(events) if self.prefetch.least_bytes else self.prefetch.backward
        before = needed_before(events, position, most) if position < turn else None
        return self.decide(events[position], upcoming(events, position, turn), before)

    def decide(
        self,
        event: Event,
        coming: Iterable[int],
        before: Sequence[int] | None = None,
        *,
        sure: bool = True,
        early: bool = False,
    ) -> list[Op]:
        """The ops that follow ``event`` when the units in ``coming`` are used next, in order.

        ``before`` are the units that backward needs before the one whose forward ends, None if its
        backward does not follow. See [Note: The turnaround]. Unless it is ``sure``, something else
        may follow. ``early``: what is needed is gathered before the unit that ran before is freed,
        see [Note: Gathers that nobody foresaw].
        """
        moment, unit = event
        self.early = early
        if moment is Moment.STEP_END:
            return self._end_step()
        policy = self.policies[unit]
        if moment in (Moment.FORWARD_BEGIN, Moment.BACKWARD_BEGIN):
            self.open[unit] = self.open.get(unit, 0) + 1
            self.in_backward = self.in_backward or moment is Moment.BACKWARD_BEGIN
            needed = moment is Moment.FORWARD_BEGIN or policy.unshard_in_backward
            need, end_turn = self._need(unit) if needed else (), self._end_turn(unit, sure)
            both = chain(need, end_turn) if early else chain(end_turn, need)
            return [*both, *self._gather_ahead(unit, coming, sure)]
        self.open[unit] = max(0, self.open.get(unit, 0) - 1)
        if moment is Moment.FORWARD_END:
            # Recomputation runs forward inside backward: what it needs, backward needs next.
            keep = not policy.reshard_after_forward or self.in_backward
            if not keep and before is not None and self._turns_around(policy, before):
                self.turning.add(unit)
                keep = True
            return [] if keep else self._free(unit, shrink=policy.shrunk)
        free = self._free(unit) if policy.reshard_after_backward else []
        return [*self._finish_earlier_reduce(unit), *free, *self._reduce(unit)]

    def _turns_around(self, policy: UnitPolicy, before: Sequence[int]) -> bool:
        """True if backward holds the unit from its begin on, while it needs those ``before``."""
        held = [
            each
            for number in before
            if (each := self.policies[number]).gathered
            # Around the unit are those that are open; they are full anyway.
            if each.reshard_after_forward or not self.open.get(number, 0)
        ]
        if any(each.prefetch_backward is not None or not each.unshard_in_backward for each in held):
            return False
        return policy.unshard_in_backward and self._has_room_beside(held, self.prefetch.backward)

    def _end_turn(self, unit: int, sure: bool) -> Iterator[Op]:
        """Free what was kept for a backward if a forward comes instead; ``unit`` is needed now."""
        self.turning.discard(unit)
        if self.turning and not self.in_backward and not sure:
            for kept in sorted(self.turning):
                yield from self._free(kept, shrink=self.policies[kept].shrunk)
            self.turning.clear()

    def _need(self, unit: int) -> Iterator[Op]:
        if not self.policies[unit].gathered or unit in self.full:
            return
        yield from self._gather(unit)
        self.gathering.discard(unit)
        self.full.add(unit)
        # Waited for before others are gathered ahead, with which it would share the wire on Gloo.
        yield Op(OpKind.AWAIT_GATHER, unit)

    def _gather(self, unit: int) -> Iterator[Op]:
        if unit not in self.gathering:
            self.gathering.add(unit)
            self.shrunk.discard(unit)
            yield Op(OpKind.GATHER, unit)

    def _gather_ahead(self, unit: int, coming: Iterable[int], sure: bool) -> Iterator[Op]:
        policy = self.policies[unit]
        chosen = policy.prefetch_backward if self.in_backward else policy.prefetch_forward
        if chosen is not None:
            for following in dict.fromkeys(chosen):
                if following != unit and self._gathers(following) and following not in self.full:
                    yield from self._gather(following)
            return
        rest = iter(coming)
        wanted: list[int] = []
        while self._has_room_ahead(wanted):  # what there is no room for stays in the rest
            each = next(rest, None)
            if each is None:
                break
            if each not in (unit, *wanted) and self._gathers(each):
                wanted.append(each)
        if not sure and not self.gathering <= {unit, *wanted}:
            held = self.gathering.difference(wanted)
            strays = held.difference(rest)
            if self.early and not self.in_backward:  # what was foreseen may come next
                strays, self.passed_over = strays & self.passed_over, strays
            wanted = yield from self._give_up(held - strays, strays, wanted)
        for following in wanted:
            if following not in self.full:
                yield from self._gather(following)

    def _has_room_ahead(self, ahead: Sequence[int]) -> bool:
        """True if one more unit may be gathered ahead of use beside those."""
        depth = self.prefetch.backward if self.in_backward else self.prefetch.forward
        depth += self.in_backward and self.early
        return self._has_room_beside([self.policies[each] for each in ahead], depth)

    def _has_room_beside(self, others: Sequence[UnitPolicy], depth: int) -> bool:
        held_bytes = sum(each.full_bytes for each in others)
        return len(others) < depth or held_bytes < self.prefetch.least_bytes

    def _give_up(
        self, kept: AbstractSet[int], strays: AbstractSet[int], wanted: list[int]
    ) -> Generator[Op, None, list[int]]:
        """Free what was gathered ahead in vain if it is in the way; return what there is room for.

        What was gathered ahead, and is not ``wanted`` next, is either ``kept`` or of the
        ``strays``. In forward those stay too while nobody needs their place: blocks may be in
        another order.
        """
        ahead = [*sorted(kept), *(each for each in wanted if each in self.gathering)]
        fitting = []
        for each in wanted:
            if each not in self.gathering and self._has_room_ahead(ahead):
                ahead.append(each)
                fitting.append(each)
        more = bool(fitting)
        if self.in_backward or (more and not self._has_room_ahead([*ahead, *strays][:-1])):
            for stray in sorted(strays):
                self.gathering.discard(stray)
                yield Op(OpKind.AWAIT_GATHER, stray)
                yield Op(OpKind.FREE, stray)
        return fitting

    def _gathers(self, unit: int) -> bool:
        policy = self.policies.get(unit)
        if policy is None or not policy.gathered:
            return False
        return policy.unshard_in_backward if self.in_backward else not policy.optional

    def _free(self, unit: int, *, shrink: bool = False) -> list[Op]:
        if self.open.get(unit, 0) or unit not in self.full:
            return []
        self.full.discard(unit)
        if shrink:
            self.shrunk.add(unit)
        return [Op(OpKind.SHRINK if shrink else OpKind.FREE, unit)]

    def _finish_earlier_reduce(self, unit: int) -> Iterator[Op]:
        """Await the earlier reduce of the same unit, whose buffers the next one needs."""
        if self.policies[unit].reduced:
            while unit in self.all_reducing:
                yield Op(OpKind.AWAIT_REDUCE, self.all_reducing.pop(0))
            while unit in self.reducing:
                yield from self._after_reduce(self.reducing.pop(0), unit)

    def _after_reduce(self, reduced: int, next_to_reduce: int) -> Iterator[Op]:
        if not self.policies[reduced].replicated or reduced == next_to_reduce:
            yield Op(OpKind.AWAIT_REDUCE, reduced)
            return
        # Sums over replicas are small: they have until the next one begins.
        yield from (Op(OpKind.AWAIT_REDUCE, earlier) for earlier in self.all_reducing)
        self.all_reducing = [reduced]
        yield Op(OpKind.ALL_REDUCE, reduced)

    def _reduce(self, unit: int) -> Iterator[Op]:
        """See [Note: Reduces in flight]."""
        policy = self.policies[unit]
        if policy.reduced:
            self.reducing.append(unit)
            if policy.widened:
                yield from self._finish_reduces(unit, but=max(self.prefetch.reduces_in_flight, 1))
            yield Op(OpKind.REDUCE, unit)
            yield from self._finish_reduces(unit, but=self.prefetch.reduces_in_flight)

    def _finish_reduces(self, unit: int, *, but: int) -> Iterator[Op]:
        """Wait for the earliest reduces, ``but`` the last ones; the last is that of ``unit``."""
        while len(self.reducing) > but:
            held_bytes = sum(self.policies[each].full_bytes for each in self.reducing[1:])
            if held_bytes < self.prefetch.least_bytes:
                return
            yield from self._after_reduce(self.reducing.pop(0), unit)

    def _end_step(self) -> list[Op]:
        ops = [Op(OpKind.AWAIT_GATHER, unit) for unit in sorted(self.gathering)]
        ops += [
            Op(OpKind.FREE, unit)
            for unit in sorted(self.gathering | self.full | self.shrunk)
            if self.policies[unit].reshard_after_backward
        ]
        replicated = [unit for unit in self.reducing if self.policies[unit].replicated]
        ops += [Op(OpKind.ALL_REDUCE, unit) for unit in replicated]
        ops += [Op(OpKind.AWAIT_REDUCE, unit) for unit in [*self.all_reducing, *self.reducing]]
        for held in (self.gathering, self.full, self.shrunk, self.reducing, self.all_reducing):
            held.clear()
        self.open.clear()
        self.turning.clear()
        self.passed_over.clear()
        self.in_backward = False
        return ops


def compile_step(
    events: Sequence[Event], policies: Mapping[int, UnitPolicy], prefetch: Prefetch
) -> tuple[tuple[Op, ...], ...]:
    """The ops that follow each event of a step whose events are all known.

    ``policies`` holds one entry for each unit number in ``events``.
    """
    state, turn = State(policies, prefetch), first_of_backward(events)
    return tuple(tuple(state.follow(events, position, turn)) for position in range(len(events)))
