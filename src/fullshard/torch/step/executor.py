# SPDX-License-Identifier: Apache-2.0
"""Carries ops out: asks the schedule what follows an event and moves the units."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch

from fullshard.core.schedule import Event, Moment, OpKind, Scheduler, UnitPolicy
from fullshard.core.strategy import Prefetch
from fullshard.core.trace import Trace, TraceRecord
from fullshard.torch.step.managed import ManagedUnit
from fullshard.torch.unit.streams import DeviceClock
from fullshard.torch.unit.unit import Unit

__all__ = ["Execution", "TraceRecorder", "unit_policy"]

_ACTIONS: dict[OpKind, Callable[[Unit], None]] = {
    OpKind.GATHER: Unit.gather,
    OpKind.AWAIT_GATHER: Unit.await_gather,
    OpKind.SHRINK: Unit.shrink,
    OpKind.FREE: Unit.free,
    OpKind.REDUCE: Unit.reduce,
    OpKind.ALL_REDUCE: Unit.all_reduce,
    OpKind.AWAIT_REDUCE: Unit.await_reduce,
}

_event = cache(Event)

_MOST_EVENTS = 64
"""Events for each unit after which a step that never ends is cut, so that its record does not grow
for ever when forward runs with gradients and nobody calls backward."""


class Execution:
    """The units of one root, what is under way, and the schedules that say what is next.

    There is a schedule for each set of units that are reduced, and one for steps without gradients.
    """

    def __init__(self, units: Sequence[ManagedUnit], prefetch: Prefetch):
        self._references = [weakref.ref(managed) for managed in units]
        self._reducing: list[Unit] = []
        self._evicting: list[Unit] = []  # whose gradients may still be on their way to the host
        self.recorder: TraceRecorder | None = None
        self.is_last_backward = True  # False: reduces may still be under way when backward ends
        self.set_prefetch(prefetch)

    @property
    def units(self) -> Iterator[ManagedUnit]:
        """The units that still exist, the root's first."""
        for reference in self._references:
            managed = reference()
            if managed is not None:
                yield managed

    def set_prefetch(self, prefetch: Prefetch) -> None:
        """Make new schedules, by the policies that the units have now; between steps only."""
        self.prefetch = prefetch
        policies = {
            m.number: UnitPolicy(
                _gathered(m.unit), reduced=False, full_bytes=m.unit.layout.full_bytes
            )
            for m in self.units
        }
        self._evaluation = Scheduler(policies, prefetch)
        self._by_reduced: dict[frozenset[int], Scheduler] = {}
        self._active = self._training

    @property
    def _training(self) -> Scheduler:
        """The schedule of a step that reduces the units which are to be reduced now."""
        reduced = frozenset(
            managed.number
            for managed in self.units
            if managed.unit.trainable and managed.requires_gradient_sync
        )
        if reduced not in self._by_reduced:
            policies = {
                m.number: unit_policy(m, reduced=m.number in reduced, root=m.number == 0)
                for m in self.units
            }
            self._by_reduced[reduced] = Scheduler(policies, self.prefetch)
        return self._by_reduced[reduced]

    @property
    def idle(self) -> bool:
        """True between steps: nothing is gathered ahead, kept or under way."""
        return self._active.idle

    @property
    def evaluating(self) -> bool:
        """True in a step without gradients."""
        return self._active is self._evaluation

    def go_on(self, *, training: bool) -> None:
        """Go on with the schedule for this; what another one holds gathered is freed first."""
        scheduler = self._training if training else self._evaluation
        if scheduler is not self._active:
            self.finish_step()
            self._active = scheduler

    def is_endless(self) -> bool:
        """True if this step has become so long that it will hardly end."""
        return self._active.recorded > _MOST_EVENTS * len(self._references)

    def is_stale(self) -> bool:
        """True if shards, or who is trained, have changed since this step began."""
        return any(m.unit.stale or m.unit.shards.toggled for m in self.units)

    def finish_step(self) -> None:
        """Free what is full, await what is under way."""
        if not self._active.idle:
            self.do(Moment.STEP_END, None)
        if self.is_last_backward:
            for unit in self._reducing:
                unit.await_reduce()
            self._reducing.clear()
        for managed in self.units:
            managed.unit.synchronize()
        self._evicting.clear()

    def make_sure_of(self, managed: ManagedUnit) -> None:
        """Gather a unit that somebody has resharded though the schedule counts on it."""
        unit = managed.unit
        if not unit.is_full and unit.params:
            unit.gather()
            unit.await_gather()

    def do(self, moment: Moment, managed: ManagedUnit | None) -> None:
        """Do what follows ``moment`` of a unit."""
        for kind, number in self._active.on(_event(moment, managed.number if managed else -1)):
            owner = self._references[number]()
            if owner is None or not self._has_to(kind, owner.unit, moment):
                continue
            unit = owner.unit
            _ACTIONS[kind](unit)
            if kind is OpKind.AWAIT_REDUCE:
                self._let_go_before(unit)
            elif kind is OpKind.REDUCE:
                self._reducing.append(unit)
            if self.recorder:
                self.recorder.note(kind.value, unit, self.live_bytes)
        if self._reducing:
            self._take_completed_reduces()

    def _has_to(self, kind: OpKind, unit: Unit, moment: Moment) -> bool:
        """False if what the schedule asks for was done already, by users or by itself."""
        if kind is OpKind.AWAIT_GATHER or kind is OpKind.REDUCE:
            return True
        if kind is OpKind.GATHER:
            if unit.is_full and unit.stale:
                unit.free()
            return not unit.is_full
        if kind is OpKind.FREE or kind is OpKind.SHRINK:
            return unit.is_full or unit.shrunk
        put_off = moment is Moment.STEP_END and not self.is_last_backward
        return unit.gradients.reducing and not put_off

    def _take_completed_reduces(self) -> None:
        # A reduce that is there already gives its memory back now, not when the schedule asks.
        still = []
        for unit in self._reducing:
            if unit.gradients.completed:
                unit.await_reduce()
                self._let_go_before(unit)
                if self.recorder:
                    self.recorder.note(OpKind.AWAIT_REDUCE.value, unit, self.live_bytes)
            elif unit.gradients.reducing:
                still.append(unit)
        self._reducing = still

    def _let_go_before(self, unit: Unit) -> None:
        # By now these copies had the time of a whole unit's backward.
        for earlier in self._evicting:
            earlier.gradients.let_go()
        self._evicting = [unit]

    def live_bytes(self) -> int:
        """Bytes that all units hold beyond their shards."""
        return sum(managed.unit.transient_bytes for managed in self.units)


def _gathered(unit: Unit) -> bool:
    return not unit.resident and bool(unit.params)


def unit_policy(managed: ManagedUnit, *, reduced: bool, root: bool) -> UnitPolicy:
    """How the schedule treats a unit by its settings now; ``root`` is true for the root's."""
    reshard, ranks = managed.reshard_after_forward, managed.unit.ranks
    if reshard is None:
        # The root's parameters are needed again as soon as its forward is over.
        reshard = not root

    def numbers(chosen: "list[ManagedUnit] | None") -> tuple[int, ...] | None:
        return None if chosen is None else tuple(other.number for other in chosen)

    return UnitPolicy(
        gathered=_gathered(managed.unit),
        reduced=reduced,
        reshard_after_forward=reshard,
        reshard_after_backward=managed.reshard_after_backward,
        shrunk=ranks.block is not None,
        replicated=ranks.gather.size > 1 and ranks.replicas.size > 1,
        unshard_in_backward=managed.unshard_in_backward,
        prefetch_forward=numbers(managed.prefetch_forward),
        prefetch_backward=numbers(managed.prefetch_backward),
        full_bytes=managed.unit.layout.full_bytes,
    )


class TraceRecorder:
    """Collects ops with marks of the device's clock; `fill` turns the marks into seconds."""

    def __init__(self, device: torch.device):
        self._clock = DeviceClock(device)
        self._notes: list[tuple[str, str, Any, int, int]] = []

    def note(self, op: str, unit: "Unit", live_bytes: Callable[[], int]) -> None:
        """One op on ``unit`` has just been issued."""
        size = unit.layout.full_bytes
        if op in ("fill", "reduce", "await_reduce"):
            size = unit.layout.grad_full_bytes
        self._notes.append((op, unit.name, self._clock.mark(), size, live_bytes()))

    def fill(self, trace: Trace) -> None:
        """Append what was recorded to ``trace``, in order."""
        for op, unit, mark, size, live in self._notes:
            at_s = self._clock.elapsed_s(self._clock.start, mark)
            trace.records.append(TraceRecord(op, unit, at_s, size, live))
        self._notes.clear()
