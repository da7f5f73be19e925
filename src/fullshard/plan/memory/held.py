# SPDX-License-Identifier: Apache-2.0
"""What units hold beyond what rests, op by op: the engine's unit states with numbers for tensors.

`HeldUnits` carries out ops as `fullshard.torch` does, so that its bytes after each of them are
those which the engine's trace has as ``live_bytes``. Reduces are taken to complete when they are
waited for, as over a link that is never early: the most that can be held.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fullshard.core.layout import stored_bytes
from fullshard.core.schedule import Op, OpKind
from fullshard.plan.memory.resting import gradient_bytes
from fullshard.plan.run import Run
from fullshard.plan.step.units import PlannedUnit

__all__ = ["HeldUnits", "Holds"]


@dataclass(slots=True)
class _Held:
    """The buffers of one unit that are there, and their bytes."""

    full_bytes: int
    part_bytes: int
    grad_full_bytes: int
    made: tuple[int, ...]  # bytes of each parameter's full gradient, as autograd makes it
    added: tuple[int, ...]  # the same in the dtype in which it travels
    moved: tuple[bool, ...]  # whether it is copied when the reduce begins
    scratch_bytes: int
    slice_bytes: int  # of reduced gradients, in the dtype in which they travel
    rest_bytes: int  # the same at rest
    solo: bool
    staged_bytes: int  # held twice when a gather has been waited for
    full: bool = False
    arriving: bool = False
    part: bool = False
    grads: dict[int, int] = field(default_factory=dict)  # bytes held, until the reduce begins
    reducing: bool = False
    sliced: bool = False  # a reduced slice is under way, or there and not delivered

    @classmethod
    def of(cls, unit: PlannedUnit, run: Run) -> "_Held":
        """A unit that holds nothing yet."""
        cost, slots = unit.cost, list(unit.layout)
        return cls(
            cost.full_bytes,
            cost.part_bytes,
            cost.grad_full_bytes,
            tuple(segment.made_bytes(slot) for segment, slot in slots),
            tuple(stored_bytes(slot.spec.numel, segment.grad_dtype) for segment, slot in slots),
            tuple(not segment.sent_as_made for segment, _ in slots),
            cost.scratch_bytes,
            cost.grad_full_bytes // unit.layout.shards,
            gradient_bytes(unit, run),
            cost.solo,
            cost.staged_bytes,
        )


class Holds(Protocol):
    """The memory that an engine holds for its units at a moment of a step; see `HeldUnits`."""

    buffers: int
    gradients: int

    def take(self, number: int, index: int) -> int:
        """A unit is given a gradient, or a further part of it; returns as `carry_out`.

        ``index`` is that of the parameter in the unit.
        """
        ...

    def carry_out(self, op: Op) -> int:
        """Do what ``op`` says; returns what is held for a moment beyond what is held after it."""
        ...

    def end_step(self) -> None:
        """The step is over: copies to the host are complete."""
        ...


class HeldUnits:
    """The units of a step, at some moment of it.

    ``buffers`` are the bytes of full parameters, full gradients and scratch of reduces,
    ``gradients`` those of reduced ones: under way, leaving for the host, and at rest on the device.
    With ``accumulating`` the step is a later micro-batch: reduced gradients are there. (Full
    ones that are kept between micro-batches are for the caller to `take`.) With ``cpu`` the device
    is the host's CPU: nothing leaves it.
    """

    def __init__(
        self,
        units: Sequence[PlannedUnit],
        run: Run,
        *,
        accumulating: bool = False,
        cpu: bool = False,
    ):
        self.buffers = 0
        self.gradients = 0
        self._leaving: list[int] = []  # bytes that are being copied to the host
        self._offloads = run.offload.to_host and not cpu
        self._units = [_Held.of(unit, run) for unit in units]
        self._delivered = [False] * len(units)
        if accumulating and run.sync_each:
            for number, unit in enumerate(self._units):
                self._rest(number, unit)

    @property
    def leaving(self) -> int:
        """Bytes of reduced gradients that are being copied to the host."""
        return sum(self._leaving)

    def take(self, number: int, index: int) -> int:
        """See `Holds.take`."""
        unit = self._units[number]
        if unit.solo:  # copied as they come
            if not unit.grads:
                self.buffers += unit.grad_full_bytes
            unit.grads[index] = 0
            return unit.made[index]
        before = unit.grads.get(index)
        unit.grads[index] = unit.made[index] if before is None else unit.added[index]
        self.buffers += unit.grads[index] - (before or 0)
        return 0

    def carry_out(self, op: Op) -> int:
        """Do what ``op`` says; returns what is held for a moment beyond what is held after it."""
        unit, kind = self._units[op.unit], op.kind
        if kind is OpKind.GATHER:
            if not unit.full:
                unit.full, unit.arriving = True, not unit.part
                self.buffers += unit.full_bytes
        elif kind is OpKind.AWAIT_GATHER:
            self._drop_part(unit)
            unit.arriving, arrived = False, unit.arriving
            return unit.staged_bytes if arrived else 0
        elif kind is OpKind.FREE:
            self._drop_full(unit)
            self._drop_part(unit)
        elif kind is OpKind.SHRINK:
            self._drop_full(unit)
            unit.part = True
            self.buffers += unit.part_bytes
            return unit.full_bytes
        elif kind is OpKind.REDUCE:
            return self._reduce(unit)
        elif kind is OpKind.ALL_REDUCE:
            self._finish_sum(unit)
        else:
            return self._deliver(op.unit, unit)
        return 0

    def _drop_full(self, unit: _Held) -> None:
        if unit.full:
            unit.full = False
            self.buffers -= unit.full_bytes

    def _drop_part(self, unit: _Held) -> None:
        if unit.part:
            unit.part = False
            self.buffers -= unit.part_bytes

    def _reduce(self, unit: _Held) -> int:
        unit.sliced = True
        self.gradients += unit.slice_bytes
        if unit.solo:  # the full gradient is the slice: its memory goes with it
            self.buffers -= unit.grad_full_bytes if unit.grads else 0
            unit.grads.clear()
            return 0
        unit.reducing = True
        self.buffers += unit.grad_full_bytes + unit.scratch_bytes - sum(unit.grads.values())
        moved = sum(size for index, size in unit.grads.items() if unit.moved[index])
        unit.grads.clear()
        return moved

    def _finish_sum(self, unit: _Held) -> None:
        if unit.reducing:
            unit.reducing = False
            self.buffers -= unit.scratch_bytes + unit.grad_full_bytes

    def _deliver(self, number: int, unit: _Held) -> int:
        if not unit.sliced:
            return 0
        self._finish_sum(unit)
        unit.sliced = False
        converted = unit.rest_bytes != unit.slice_bytes
        self.gradients -= sum(self._leaving)
        self._leaving.clear()
        self.gradients -= unit.slice_bytes
        if self._offloads:
            self._leaving.append(unit.rest_bytes)
            self.gradients += unit.rest_bytes
            return unit.slice_bytes if converted else 0
        momentary = unit.rest_bytes  # what is added to gradients that rest already is dropped then
        if not self._delivered[number]:
            self._rest(number, unit)
            momentary = 0
        return momentary + (unit.slice_bytes if converted else 0)

    def _rest(self, number: int, unit: _Held) -> None:
        self._delivered[number] = True
        self.gradients += unit.rest_bytes

    def end_step(self) -> None:
        """The step is over: copies to the host are complete."""
        self.gradients -= sum(self._leaving)
        self._leaving.clear()
