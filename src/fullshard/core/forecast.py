# SPDX-License-Identifier: Apache-2.0
"""Prices of the ops on units, the memory that units hold, and the forecast of a step.

One price and one model of held memory serve the planner, which has layouts alone, and the forecast
of sharded modules. `forecast` asks the schedule what it would do in a step in which every unit runs
once, in the order in which the model has them. A step that reuses units, or in another order, costs
something else: that is for a trace to tell.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fullshard.core.layout import Layout, stored_bytes
from fullshard.core.schedule import Event, Moment, Op, OpKind, UnitPolicy, compile_step
from fullshard.core.spec import item_bytes
from fullshard.core.strategy import Prefetch


@dataclass(frozen=True)
class GradientCost:
    """Bytes of one parameter's full gradient; all 0 if it is frozen.

    It takes ``made_bytes`` as autograd makes it, ``added_bytes`` in the dtype in which it travels,
    to which further parts are added. If it is ``moved``, it is copied as its reduce begins.
    """

    made_bytes: int = 0
    added_bytes: int = 0
    moved: bool = False


@dataclass(frozen=True)
class UnitCost:
    """The bytes that ops on one unit hold and send.

    ``part_bytes`` is what stays of the full parameters after SHRINK, and ``part_gather_bytes`` what
    a gather sends then. ``staged_bytes`` of the full parameters are held twice for a moment when a
    gather has been waited for, ``scratch_bytes`` what a reduce holds beside the full gradients.
    ``gradients`` are by parameter, in the order of the layout (none: one that is like the full
    gradients). A reduced gradient takes ``slice_bytes`` as it travels and ``rest_bytes`` at rest.
    ``solo`` units have one slice: their reduce drops full gradients at once, since they are it.
    """

    full_bytes: int
    grad_full_bytes: int
    part_bytes: int = 0
    scratch_bytes: int = 0
    gather_bytes: int = 0
    part_gather_bytes: int = 0
    reduce_bytes: int = 0
    all_reduce_bytes: int = 0
    solo: bool = False
    staged_bytes: int = 0
    gradients: tuple[GradientCost, ...] = ()
    slice_bytes: int = 0
    rest_bytes: int = 0


def unit_cost(
    layout: Layout,
    *,
    replicas: int = 1,
    block: int = 1,
    resident: bool = False,
    scratch_bytes: int = 0,
    sent_bytes: tuple[int, int] | None = None,
    rest_bytes: int | None = None,
) -> UnitCost:
    """Price the ops on a unit by its layout: bytes held and sent.

    An all-reduce of b bytes over R ``replicas`` sends 2 (R-1)/R b, as a ring does; the other
    collectives send the other ranks' slices, or the slice to the other ranks, whichever way they
    go. A ``block`` of ranks keeps a part after SHRINK; a ``resident`` unit is always full.
    ``sent_bytes`` are those of one slice in a gather and in a reduce, and ``rest_bytes`` those of
    the rank's gradients, if they are not the layout's.
    """
    shards = layout.shards
    parts = [(each.full_numel // block, each.full_dtype) for each in layout.segments]
    part_sent = sum(numel * item_bytes(dtype) for numel, dtype in parts)
    gathered, reduced = sent_bytes or (layout.sent_bytes, layout.grad_sent_bytes)
    return UnitCost(
        full_bytes=0 if resident else layout.full_bytes,
        grad_full_bytes=layout.grad_full_bytes,
        part_bytes=sum(stored_bytes(numel, dtype) for numel, dtype in parts),
        scratch_bytes=scratch_bytes,
        gather_bytes=gathered * (shards - 1),
        part_gather_bytes=part_sent * (block - 1),
        reduce_bytes=reduced * (shards - 1),
        all_reduce_bytes=2 * layout.grad_sent_bytes * (replicas - 1) // replicas,
        solo=shards == 1,
        staged_bytes=0 if resident else layout.staged_bytes,
        gradients=tuple(_gradient_costs(layout)),
        slice_bytes=layout.grad_full_bytes // shards,
        rest_bytes=layout.grad_shard_bytes if rest_bytes is None else rest_bytes,
    )


def _gradient_costs(layout: Layout) -> Iterator[GradientCost]:
    for segment, slot in layout:
        if not segment.trainable:
            yield GradientCost()
            continue
        added = stored_bytes(slot.spec.numel, segment.grad_dtype)
        yield GradientCost(segment.made_bytes(slot), added, not segment.sent_as_made)


@dataclass(frozen=True)
class Sent:
    """Bytes that one rank sends in a step, by what they are for."""

    gather_forward_bytes: int = 0
    gather_backward_bytes: int = 0
    reduce_bytes: int = 0
    all_reduce_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        gathers = self.gather_forward_bytes + self.gather_backward_bytes
        return gathers + self.reduce_bytes + self.all_reduce_bytes

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(
            self.gather_forward_bytes + other.gather_forward_bytes,
            self.gather_backward_bytes + other.gather_backward_bytes,
            self.reduce_bytes + other.reduce_bytes,
            self.all_reduce_bytes + other.all_reduce_bytes,
        )


@dataclass
class Forecast:
    """One step: the most bytes held beyond what rests, and what is sent for each unit."""

    peak_bytes: int = 0
    sent: dict[int, Sent] = field(default_factory=dict)


def step_events(around: Sequence[int | None], trained: Sequence[bool]) -> list[Event]:
    """The events of a step in which each unit runs once, forward in order and backward in reverse.

    ``around[n]`` is the unit that encloses unit n, None if there is none; it has a lower number.
    Units before the first one that is ``trained`` have no backward: nothing asks for gradients of
    what comes in.
    """
    below: dict[int | None, list[int]] = {}
    for unit, outer in enumerate(around):
        below.setdefault(outer, []).append(unit)
    inside_trained = list(trained)
    for unit in reversed(range(len(around))):
        outer = around[unit]
        if outer is not None and inside_trained[unit]:
            inside_trained[outer] = True
    first = next((unit for unit, each in enumerate(trained) if each), len(around))

    def forward(unit: int) -> Iterator[Event]:
        yield Event(Moment.FORWARD_BEGIN, unit)
        for inner in below.get(unit, ()):
            yield from forward(inner)
        yield Event(Moment.FORWARD_END, unit)

    def backward(unit: int) -> Iterator[Event]:
        if unit < first and not inside_trained[unit]:
            return
        yield Event(Moment.BACKWARD_BEGIN, unit)
        for inner in reversed(below.get(unit, ())):
            yield from backward(inner)
        yield Event(Moment.BACKWARD_END, unit)

    outermost = below.get(None, [])
    events = [event for unit in outermost for event in forward(unit)]
    events += [event for unit in reversed(outermost) for event in backward(unit)]
    return [*events, Event(Moment.STEP_END)]


def forecast(
    events: Sequence[Event],
    policies: Mapping[int, UnitPolicy],
    costs: Mapping[int, UnitCost],
    prefetch: Prefetch,
) -> Forecast:
    """Forecast the step made of ``events``, which begins with nothing gathered.

    A unit's full gradients are counted from the begin of its backward, the earliest they can come.
    """
    found = Forecast(sent={unit: Sent() for unit in costs})
    held = HeldUnits(costs)
    in_backward, shrunk = False, set[int]()
    for event, ops in zip(events, compile_step(events, policies, prefetch), strict=True):
        in_backward = in_backward or event.moment is Moment.BACKWARD_BEGIN
        for op in ops:
            found.sent[op.unit] += _sent(op, costs[op.unit], in_backward, op.unit in shrunk)
            if op.kind is OpKind.SHRINK:
                shrunk.add(op.unit)
            elif op.kind in (OpKind.FREE, OpKind.AWAIT_GATHER):
                shrunk.discard(op.unit)
            twice = held.carry_out(op)
            found.peak_bytes = max(found.peak_bytes, held.buffers + twice)
        if event.moment is Moment.BACKWARD_BEGIN:
            held.take_all(event.unit)
            found.peak_bytes = max(found.peak_bytes, held.buffers)
    return found


def _sent(op: Op, cost: UnitCost, in_backward: bool, shrunk: bool) -> Sent:
    if op.kind is OpKind.GATHER:
        size = cost.part_gather_bytes if shrunk else cost.gather_bytes
        return Sent(0, size) if in_backward else Sent(size)
    if op.kind is OpKind.REDUCE:
        return Sent(reduce_bytes=cost.reduce_bytes, all_reduce_bytes=cost.all_reduce_bytes)
    return Sent()


@dataclass(slots=True)
class _UnitMemory:
    """The buffers of one unit that are there."""

    cost: UnitCost
    gradients: tuple[GradientCost, ...]
    full: bool = False
    arriving: bool = False
    part: bool = False
    grads: dict[int, int] = field(default_factory=dict)  # bytes held, until the reduce begins
    reducing: bool = False
    sliced: bool = False  # a reduced slice is under way, or there and not delivered
    delivered: bool = False


class HeldUnits:
    """The memory of the units of a step at some moment of it: the engine's states with bytes.

    ``buffers`` are the bytes of full parameters, full gradients and scratch of reduces, as the
    engine's trace has them; ``gradients`` those of reduced ones: under way, leaving for the host,
    and at rest on the device. Reduces are taken to complete when they are waited for, as over a
    link that is never early: the most that can be held. With ``accumulating`` the step is a later
    micro-batch: reduced gradients are there. With ``offloads`` they leave for the host.
    """

    def __init__(
        self, costs: Mapping[int, UnitCost], *, accumulating: bool = False, offloads: bool = False
    ):
        self.buffers: int = 0
        self.gradients: int = 0
        self._leaving: list[int] = []  # bytes that are being copied to the host
        self._offloads = offloads
        self._units = {
            number: _UnitMemory(
                cost, cost.gradients or (GradientCost(cost.grad_full_bytes, cost.grad_full_bytes),)
            )
            for number, cost in costs.items()
        }
        if accumulating:
            for unit in self._units.values():
                self._rest(unit)

    @property
    def leaving(self) -> int:
        """Bytes of reduced gradients that are being copied to the host."""
        return sum(self._leaving)

    def take(self, number: int, index: int) -> int:
        """Give unit ``number`` the gradient of its parameter ``index``, or a further part of it.

        Returns the bytes that are held for a moment beyond those held after it.
        """
        unit = self._units[number]
        gradient = unit.gradients[index]
        if unit.cost.solo:  # copied as they come
            if not unit.grads:
                self.buffers += unit.cost.grad_full_bytes
            unit.grads[index] = 0
            return gradient.made_bytes
        before = unit.grads.get(index)
        unit.grads[index] = gradient.made_bytes if before is None else gradient.added_bytes
        self.buffers += unit.grads[index] - (before or 0)
        return 0

    def take_all(self, number: int) -> None:
        """Give unit ``number`` the gradients of all its parameters."""
        for index in range(len(self._units[number].gradients)):
            self.take(number, index)

    def carry_out(self, op: Op) -> int:
        """Do what ``op`` says; returns what is held for a moment beyond what is held after it."""
        unit, kind = self._units[op.unit], op.kind
        if kind is OpKind.GATHER:
            if not unit.full:
                unit.full, unit.arriving = True, not unit.part
                self.buffers += unit.cost.full_bytes
        elif kind is OpKind.AWAIT_GATHER:
            self._drop_part(unit)
            unit.arriving, arrived = False, unit.arriving
            return unit.cost.staged_bytes if arrived else 0
        elif kind is OpKind.FREE:
            self._drop_full(unit)
            self._drop_part(unit)
        elif kind is OpKind.SHRINK:
            self._drop_full(unit)
            unit.part = True
            self.buffers += unit.cost.part_bytes
            return unit.cost.full_bytes
        elif kind is OpKind.REDUCE:
            return self._reduce(unit)
        elif kind is OpKind.ALL_REDUCE:
            self._finish_sum(unit)
        else:
            return self._deliver(unit)
        return 0

    def _drop_full(self, unit: _UnitMemory) -> None:
        if unit.full:
            unit.full = False
            self.buffers -= unit.cost.full_bytes

    def _drop_part(self, unit: _UnitMemory) -> None:
        if unit.part:
            unit.part = False
            self.buffers -= unit.cost.part_bytes

    def _reduce(self, unit: _UnitMemory) -> int:
        cost = unit.cost
        unit.sliced = True
        self.gradients += cost.slice_bytes
        if cost.solo:  # the full gradient is the slice: its memory goes with it
            self.buffers -= cost.grad_full_bytes if unit.grads else 0
            unit.grads.clear()
            return 0
        unit.reducing = True
        self.buffers += cost.grad_full_bytes + cost.scratch_bytes - sum(unit.grads.values())
        moved = sum(size for index, size in unit.grads.items() if unit.gradients[index].moved)
        unit.grads.clear()
        return moved

    def _finish_sum(self, unit: _UnitMemory) -> None:
        if unit.reducing:
            unit.reducing = False
            self.buffers -= unit.cost.scratch_bytes + unit.cost.grad_full_bytes

    def _deliver(self, unit: _UnitMemory) -> int:
        if not unit.sliced:
            return 0
        self._finish_sum(unit)
        unit.sliced = False
        cost = unit.cost
        self.end_step()
        self.gradients -= cost.slice_bytes
        converted = cost.slice_bytes if cost.rest_bytes != cost.slice_bytes else 0
        if self._offloads:
            self._leaving.append(cost.rest_bytes)
            self.gradients += cost.rest_bytes
            return converted
        if not unit.delivered:
            self._rest(unit)
            return converted
        return cost.rest_bytes + converted  # what is added to gradients that rest is dropped then

    def _rest(self, unit: _UnitMemory) -> None:
        unit.delivered = True
        self.gradients += unit.cost.rest_bytes

    def end_step(self) -> None:
        """Complete the copies to the host."""
        self.gradients -= sum(self._leaving)
        self._leaving.clear()
