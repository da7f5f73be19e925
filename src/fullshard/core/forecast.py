# SPDX-License-Identifier: Apache-2.0
"""Forecast from the schedule what a training step will hold and send.

The schedule is asked what it would do in a step in which every unit runs once, in the order in
which the model has them; each op then has its price. A step that reuses units, or in another order,
costs something else: that is for a trace to tell.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fullshard.core.schedule import Event, Moment, Op, OpKind, UnitPolicy, compile_step
from fullshard.core.strategy import Prefetch

__all__ = ["Forecast", "Sent", "UnitCost", "forecast", "step_events"]


@dataclass(frozen=True)
class UnitCost:
    """The bytes that ops on one unit hold and send.

    ``part_bytes`` is what stays of the full parameters after SHRINK, and ``part_gather_bytes`` what
    a gather sends then. ``staged_bytes`` of the full parameters are held twice for a moment when a
    gather has been waited for, ``scratch_bytes`` what a reduce holds beside the full gradients.
    ``grad_made_bytes`` are those of full gradients before their reduce begins, as autograd makes
    them (None: as many as afterwards), of which it holds ``grad_moved_bytes`` twice for a moment.
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
    grad_made_bytes: int | None = None
    grad_moved_bytes: int = 0

    def held_twice_bytes(self, kind: OpKind) -> int:
        """Bytes that are copied from one place to another while such an op is carried out."""
        twice = {OpKind.AWAIT_GATHER: self.staged_bytes, OpKind.REDUCE: self.grad_moved_bytes}
        return twice.get(kind, 0)


@dataclass(frozen=True)
class Sent:
    """Bytes that one rank sends in a step, by what they are for."""

    gather_forward_bytes: int = 0
    gather_backward_bytes: int = 0
    reduce_bytes: int = 0
    all_reduce_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
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
    held = {unit: _Held(cost) for unit, cost in costs.items()}
    in_backward = False
    for event, ops in zip(events, compile_step(events, policies, prefetch), strict=True):
        in_backward = in_backward or event.moment is Moment.BACKWARD_BEGIN
        for op in ops:
            found.sent[op.unit] += held[op.unit].carry_out(op, in_backward=in_backward)
            twice = costs[op.unit].held_twice_bytes(op.kind)
            now = sum(each.bytes for each in held.values()) + twice
            found.peak_bytes = max(found.peak_bytes, now)
        if event.moment is Moment.BACKWARD_BEGIN:
            held[event.unit].gradients = True
            found.peak_bytes = max(found.peak_bytes, sum(each.bytes for each in held.values()))
    return found


class _Held:
    """The buffers of one unit in the middle of the step."""

    def __init__(self, cost: UnitCost):
        self.cost = cost
        self.full = self.part = self.gradients = self.reducing = False

    @property
    def bytes(self) -> int:
        cost = self.cost
        parameters = self.full * cost.full_bytes + self.part * cost.part_bytes
        made = cost.grad_full_bytes if cost.grad_made_bytes is None else cost.grad_made_bytes
        if self.reducing:
            return parameters + cost.grad_full_bytes + cost.scratch_bytes
        return parameters + self.gradients * made

    def carry_out(self, op: Op, *, in_backward: bool) -> Sent:
        """Do what ``op`` says; returns what it sends."""
        cost = self.cost
        if op.kind is OpKind.GATHER:
            self.full = True
            size = cost.part_gather_bytes if self.part else cost.gather_bytes
            return Sent(0, size) if in_backward else Sent(size)
        if op.kind is OpKind.REDUCE:
            self.gradients = self.reducing = not cost.solo
            return Sent(reduce_bytes=cost.reduce_bytes, all_reduce_bytes=cost.all_reduce_bytes)
        if op.kind is OpKind.SHRINK:
            self.full, self.part = False, True
        elif op.kind is OpKind.FREE:
            self.full = self.part = False
        elif op.kind is OpKind.AWAIT_GATHER:
            self.part = False
        else:  # the first sum is there: full gradients go
            self.gradients = self.reducing = False
        return Sent()
