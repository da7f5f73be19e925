# SPDX-License-Identifier: Apache-2.0
"""What units hold beyond what rests, op by op: the engine's unit states with numbers for tensors.

`HeldUnits` carries out ops as `fullshard.torch` does, so that its bytes after each of them are
those which the engine's trace has as ``live_bytes``. Reduces are taken to complete when they are
waited for, as over a link that is never early: the most that can be held.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fullshard.core.schedule import Op, OpKind
from fullshard.plan.memory.resting import gradient_bytes
from fullshard.plan.run import Run
from fullshard.plan.step.units import PlannedUnit

__all__ = ["HeldUnits", "Holds"]


@dataclass(slots=True)
class _Held:
    """Of one unit: which of its buffers are there, and what they take."""

    full_bytes: int
    part_bytes: int
    grad_full_bytes: int
    scratch_bytes: int
    slice_bytes: int  # of reduced gradients, in the dtype in which they travel
    rest_bytes: int  # the same at rest
    solo: bool
    staged_bytes: int  # beside the full parameters, while they are gathered
    full: bool = False
    arriving: bool = False
    part: bool = False
    grads: bool = False
    reducing: bool = False
    sliced: bool = False  # a reduced slice is under way, or there and not delivered


class Holds(Protocol):
    """What an engine holds for its units, at some moment of a step; see `HeldUnits`."""

    buffers: int
    gradients: int

    def fill(self, number: int) -> bool:
        """The first gradient of a unit is there; returns true if that takes memory."""
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
    With ``accumulating`` the step is a later micro-batch: reduced gradients are there already, or
    full ones if these are kept between micro-batches. With ``cpu`` the device is the host's CPU:
    nothing leaves it.
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
        self._units = [
            _Held(
                unit.cost.full_bytes,
                unit.cost.part_bytes,
                unit.cost.grad_full_bytes,
                unit.cost.scratch_bytes,
                unit.cost.grad_full_bytes // unit.layout.shards,
                gradient_bytes(unit, run),
                unit.cost.solo,
                unit.cost.staged_bytes,
            )
            for unit in units
        ]
        self._delivered = [False] * len(units)
        if accumulating and run.sync_each:
            for number, unit in enumerate(self._units):
                self._rest(number, unit)
        elif accumulating:
            for number in range(len(units)):
                self.fill(number)

    @property
    def leaving(self) -> int:
        """Bytes of reduced gradients that are being copied to the host."""
        return sum(self._leaving)

    def fill(self, number: int) -> bool:
        """The first gradient of a unit is there; returns true if that takes memory."""
        unit = self._units[number]
        if unit.grads or not unit.grad_full_bytes:
            return False
        unit.grads = True
        self.buffers += unit.grad_full_bytes
        return True

    def carry_out(self, op: Op) -> int:
        """Do what ``op`` says; returns what is held for a moment beyond what is held after it."""
        unit, kind = self._units[op.unit], op.kind
        if kind is OpKind.GATHER:
            if not unit.full:
                unit.full, unit.arriving = True, not unit.part
                self.buffers += unit.full_bytes + unit.arriving * unit.staged_bytes
        elif kind is OpKind.AWAIT_GATHER:
            self._drop_part(unit)
            self.buffers -= unit.arriving * unit.staged_bytes
            unit.arriving = False
        elif kind is OpKind.FREE:
            self._drop_full(unit)
            self._drop_part(unit)
        elif kind is OpKind.SHRINK:
            self._drop_full(unit)
            unit.part = True
            self.buffers += unit.part_bytes
            return unit.full_bytes
        elif kind is OpKind.REDUCE:
            self._reduce(op.unit, unit)
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

    def _reduce(self, number: int, unit: _Held) -> None:
        self.fill(number)
        unit.reducing = unit.sliced = True
        if unit.solo:  # the full gradient is the slice: its memory goes with it
            self.buffers -= unit.grad_full_bytes
            unit.grads = unit.reducing = False
        else:
            self.buffers += unit.scratch_bytes
        self.gradients += unit.slice_bytes

    def _finish_sum(self, unit: _Held) -> None:
        if unit.reducing:
            unit.reducing = unit.grads = False
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
