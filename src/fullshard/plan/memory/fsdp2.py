# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's FSDP2 holds for its units, to compare with, and to read published figures.

FSDP2 issues gathers and reduces on streams of its own, and torch's allocator keeps what was
allocated on one stream for that stream. So what these two streams ever needed is reserved for good:
the buffer that is gathered into before it is copied out, the buffer that gradients are copied into
before they are reduced, and the reduced gradients themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.core.schedule import Op, OpKind
from fullshard.core.spec import item_bytes
from fullshard.plan.memory.resting import gradient_bytes
from fullshard.plan.run import Run
from fullshard.plan.step.units import PlannedUnit

__all__ = ["HeldByFSDP2"]


@dataclass(slots=True)
class _Held:
    full_bytes: int
    grads_bytes: int
    full: bool = False
    grads: bool = False


class HeldByFSDP2:
    """As `fullshard.plan.memory.held.HeldUnits`, for FSDP2 after some steps.

    ``buffers`` are full parameters and unreduced gradients, in the dtype of computation, and what
    the streams of collectives have reserved; ``gradients`` the reduced ones, which are among that.
    """

    def __init__(self, units: Sequence[PlannedUnit], run: Run):
        self._units = [_Held(unit.cost.full_bytes, _as_computed(unit)) for unit in units]
        gathered = sorted((unit.cost.full_bytes for unit in units), reverse=True)
        cast = max((unit.cost.full_bytes // unit.layout.shards for unit in units), default=0)
        blocks = [unit.cost.full_bytes for unit in units if unit.around is not None]
        into = max(gathered[0] if gathered else 0, 2 * max(blocks, default=0))
        reduced = max((unit.cost.grad_full_bytes for unit in units), default=0)
        sharded = any(unit.layout.shards > 1 for unit in units)
        self.buffers = (into + cast + reduced) if sharded else 0
        self.gradients = sum(gradient_bytes(unit, run) for unit in units)

    def take(self, number: int, index: int) -> int:
        """The first gradient of a unit stands for all."""
        unit = self._units[number]
        if not unit.grads:
            unit.grads = True
            self.buffers += unit.grads_bytes
        return 0

    def carry_out(self, op: Op) -> int:
        """Do what ``op`` says."""
        unit = self._units[op.unit]
        if op.kind is OpKind.AWAIT_GATHER and not unit.full:  # copied out when it is there
            unit.full = True
            self.buffers += unit.full_bytes
        elif op.kind is OpKind.FREE and unit.full:
            unit.full = False
            self.buffers -= unit.full_bytes
        elif op.kind is OpKind.REDUCE and unit.grads:
            unit.grads = False
            self.buffers -= unit.grads_bytes
        return 0

    def end_step(self) -> None:
        """Nothing leaves for the host here."""


def _as_computed(unit: PlannedUnit) -> int:
    """Bytes of unreduced gradients as autograd makes them."""
    return sum(
        segment.full_numel * item_bytes(segment.full_dtype)
        for segment in unit.layout.segments
        if segment.trainable
    )
