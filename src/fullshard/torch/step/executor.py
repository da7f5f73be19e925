# SPDX-License-Identifier: Apache-2.0
"""The executor: asks the schedule which ops follow an event, and has units carry them out."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import call

from fullshard.core.schedule import Event, Moment, Op, OpKind, Scheduler, UnitPolicy, unit_policy
from fullshard.core.strategy import Prefetch
from fullshard.torch.step.managed import ManagedUnit
from fullshard.torch.step.profiling import OpRecorder, UnitMarks, profiler_runs
from fullshard.torch.unit.streams import EarlyStream, has_streams
from fullshard.torch.unit.unit import ACTIONS, Unit

_ENDS_OF_REDUCES = (OpKind.ALL_REDUCE, OpKind.AWAIT_REDUCE)
_NAMES = {kind: kind.value for kind in OpKind}  # to ask a member of an Enum is slow, too
_NAMED = frozenset(OpKind) - {OpKind.SHRINK, OpKind.FREE}  # ranges in a profile

_MOST_EVENTS = 64
"""The number of events per unit after which an endless step is cut, so that its record does not
grow for ever when forward runs with gradients and nobody calls backward."""


_BoundOp = tuple[OpKind, "weakref.ref[Unit]", Callable[[Unit], bool]]
"""An op as a schedule replays it: its unit, and what is called with that."""


def _bound(
    units: Sequence["weakref.ref[Unit]"], actions: Mapping[OpKind, Callable[[Unit], bool]], op: Op
) -> _BoundOp:
    return op.kind, units[op.unit], actions[op.kind]


class Executor:
    """Carries out ops on the units of one root, as its schedules ask for them.

    There is one schedule for each set of units that are reduced, and one for steps without
    gradients.
    """

    def __init__(self, units: Sequence[ManagedUnit], prefetch: Prefetch):
        # by number
        self.references: list[weakref.ref[ManagedUnit]] = [weakref.ref(unit) for unit in units]
        found = [weakref.ref(managed.unit) for managed in units]
        ours = {OpKind.REDUCE: self._reduce, OpKind.AWAIT_REDUCE: self._await_reduce}
        self._schedule = partial(Scheduler, bind=partial(_bound, found, ACTIONS | ours))
        self._early: EarlyStream | None = None
        if has_streams(device := units[0].unit.device):
            self._early = EarlyStream(device)
            early = ACTIONS | ours | {OpKind.GATHER: partial(Unit.gather, early=self._early)}
            self._schedule.keywords["bind_early"] = partial(_bound, found, early)
        self._with_copies = [weakref.ref(managed) for managed in units if managed.unit.copies]
        self._marks = UnitMarks()
        self._reducing: list[Unit] = []
        self._evicting: list[Unit] = []  # whose gradients may still be on their way to the host
        self.recorders: tuple[OpRecorder, ...] = ()
        self.fill_recorders: tuple[OpRecorder, ...] = ()  # those that note gradients, too
        self._recorded: frozenset[OpKind] = frozenset()
        self.evaluating: bool = False  # in a step without gradients
        self.profiled: bool = False  # asked once for each forward of the root, and each backward
        self.is_last_backward = True  # False: reduces may still be under way when backward ends
        self.set_prefetch(prefetch)

    @property
    def units(self) -> list[ManagedUnit]:
        """The units that still exist, the root's first."""
        return _alive(self.references)

    def attach(self, recorder: OpRecorder) -> None:
        """Tell ``recorder`` of ops from now on; say it again when its kinds have changed."""
        self.detach(recorder)
        self._tell((*self.recorders, recorder))

    def detach(self, recorder: OpRecorder) -> None:
        """Tell it no more."""
        self._tell(tuple(each for each in self.recorders if each is not recorder))

    def _tell(self, recorders: tuple[OpRecorder, ...]) -> None:
        self.recorders = recorders
        self.fill_recorders = tuple(each for each in recorders if each.notes_fills)
        self._recorded = frozenset().union(*(each.kinds for each in recorders))

    def set_prefetch(self, prefetch: Prefetch) -> None:
        """Make new schedules from the policies that the units have now; between steps only."""
        self.prefetch = prefetch
        policies = {
            m.number: UnitPolicy(
                gathered=bool(m.unit.params) and not m.unit.resident,
                reduced=False,
                full_bytes=m.unit.layout.full_bytes,
                optional=m.optional,
            )
            for m in self.units
        }
        self._evaluation = self._schedule(policies, prefetch)
        self._by_reduced: dict[frozenset[int], Scheduler] = {}
        self._active = self._training
        self.evaluating = False

    @property
    def _training(self) -> Scheduler:
        """The schedule of a step that reduces the units whose gradients are wanted now."""
        reduced = frozenset(
            [m.number for m in self.units if m.unit.trainable and m.step.requires_gradient_sync]
        )
        if reduced not in self._by_reduced:
            policies = {
                m.number: policy_of(m, reduced=m.number in reduced, root=m.number == 0)
                for m in self.units
            }
            self._by_reduced[reduced] = self._schedule(policies, self.prefetch)
        return self._by_reduced[reduced]

    @property
    def idle(self) -> bool:
        """True between steps: nothing is gathered ahead, kept or in flight."""
        return self._active.idle

    @property
    def repeated(self) -> int:
        """The number of times in a row that the last step has run with the same events."""
        return self._active.repeated

    def go_on(self, *, training: bool) -> None:
        """Continue with the schedule for this kind of step; free first what another one holds."""
        self.profiled = profiler_runs()
        scheduler = self._training if training else self._evaluation
        if scheduler is not self._active:
            self.finish_step()
            self._active = scheduler
        self.evaluating = not training

    def begin(self, *, training: bool) -> bool:
        """Begin a forward of the root; True between steps.

        A step that is still running ends here if forwards went on without a backward for so long
        that it will hardly come, or if an optimizer has stepped since.
        """
        self.go_on(training=training)
        if self._active.idle:
            return True
        endless = self._active.recorded > _MOST_EVENTS * len(self.references)
        if endless or any(m.unit.stale or m.unit.shards.toggled for m in self.units):
            self.finish_step()
        return self._active.idle

    def note_shards(self) -> None:
        """Let gathers of the root's forward that begins read the shards as they are here."""
        if self._early is not None and self._active.has_records:
            self._early.begin()
            for managed in self.units:
                managed.unit.full.note_version()

    def finish_step(self) -> None:
        """Free what is full, await what is in flight."""
        if not self._active.idle:
            ops = self._active.on(Event(Moment.STEP_END))
            if not self.is_last_backward:
                ops = [op for op in ops if op[0] not in _ENDS_OF_REDUCES]
            self._do_in_sight(ops, -1)
        if self.is_last_backward:
            for unit in self._reducing:
                unit.await_reduce()
            self._reducing.clear()
        elif self._reducing:
            self._take_completed_reduces()
        for managed in _alive(self._with_copies):
            managed.unit.settle()
            for recorder in self.recorders:
                recorder.weigh(managed.unit)
        self._evicting.clear()

    def do(self, event: Event) -> None:
        """Carry out the ops that follow ``event``."""
        ops = self._active.on(event)
        if self._recorded or self.profiled:
            self._do_in_sight(ops, event[1])
        else:
            for _, reference, act in ops:
                unit = reference()
                if unit is not None:
                    act(unit)
        if self._reducing:
            self._take_completed_reduces()

    def _reduce(self, unit: Unit) -> bool:
        """Have the reduce of ``unit`` begin."""
        unit.reduce()
        self._reducing.append(unit)
        return True

    def _await_reduce(self, unit: Unit) -> bool:
        """Have the reduce of ``unit`` delivered; False if it has been, or there is none."""
        if unit not in self._reducing:
            return False
        self._reducing.remove(unit)
        done = unit.await_reduce()
        if done and unit.copies:
            self._let_go_before(unit)
        return done

    def _do_in_sight(self, ops: Sequence[_BoundOp], asked_by: int) -> None:
        """Carry out ops in sight of the profiler and of recorders."""
        named = _NAMED if self.profiled else ()
        for kind, reference, act in ops:
            unit = reference()
            if unit is None or (kind is OpKind.AWAIT_REDUCE and unit not in self._reducing):
                continue
            if kind in named:
                with self._marks.around(_NAMES[kind], unit):
                    self._show(kind, unit, act, asked_by)
            elif kind in self._recorded:
                self._show(kind, unit, act, asked_by)
            else:
                act(unit)

    def _show(
        self, kind: OpKind, unit: Unit, act: Callable[[Unit], bool], asked_by: int = -1
    ) -> None:
        """Carry out an op in sight of recorders."""
        recorders = self.recorders
        if not recorders:
            act(unit)
            return
        mark = recorders[0].mark
        begin = mark()
        if act(unit):  # else there was nothing to do
            end = mark()
            for recorder in recorders:
                recorder.note(_NAMES[kind], unit, begin, end, asked_by)

    def _take_completed_reduces(self) -> None:
        # A reduce that has completed gives its memory back now, not when the schedule asks for it.
        for unit in self._reducing.copy():
            if not unit.gradients.completed:
                continue
            self._show(OpKind.AWAIT_REDUCE, unit, self._await_reduce)

    def _let_go_before(self, unit: Unit) -> None:
        # Their copies have had the time of a whole unit's backward.
        for earlier in self._evicting:
            earlier.gradients.let_go()
            for recorder in self.recorders:
                recorder.weigh(earlier)
        self._evicting = [unit]


def _alive(references: Sequence[weakref.ref[ManagedUnit]]) -> list[ManagedUnit]:
    return list(filter(None, map(call, references)))


def policy_of(managed: ManagedUnit, *, reduced: bool, root: bool) -> UnitPolicy:
    """Return how the schedule is to treat a unit with its present settings.

    ``root`` is true for the root's unit.
    """
    unit = managed.unit

    def numbers(chosen: "list[ManagedUnit] | None") -> tuple[int, ...] | None:
        return None if chosen is None else tuple(other.number for other in chosen)

    policy = unit_policy(
        unit.layout,
        root=root,
        resident=unit.resident,
        reduced=reduced,
        reshard_after_forward=managed.reshard_after_forward,
        replicas=unit.ranks.replicas.size,
        on_cpu=unit.device.type == "cpu",
    )
    return replace(
        policy,
        reshard_after_backward=managed.reshard_after_backward,
        shrunk=unit.ranks.block is not None,
        unshard_in_backward=managed.unshard_in_backward,
        optional=managed.optional,
        prefetch_forward=numbers(managed.prefetch_forward),
        prefetch_backward=numbers(managed.prefetch_backward),
    )
