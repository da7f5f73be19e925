# SPDX-License-Identifier: Apache-2.0
"""The memory that PyTorch's FSDP2 holds for its units.

FSDP2 issues gathers and reduces on streams of its own, and torch's allocator keeps what was
allocated on one stream for that stream. So what these two streams ever needed is reserved for good:
the buffer that is gathered into before it is copied out, and the reduced gradients. What gradients
are copied into before they are reduced is the compute stream's, which has it for other tensors.
"""

from collections.abc import Sequence

from fullshard.core.forecast import HeldUnits
from fullshard.core.schedule import Op, OpKind
from fullshard.core.spec import item_bytes
from fullshard.plan.run import Engine, Run
from fullshard.plan.step.units import PlannedUnit


class HeldByFSDP2(HeldUnits):
    """Units after some steps of FSDP2, in a later micro-batch if there are several.

    ``buffers`` are full parameters and unreduced gradients, in the dtype of computation, and what
    the streams of collectives have reserved; ``gradients`` the reduced ones, which are
    among that if there is more than one device. Without ``pooled`` both are what tensors hold:
    what is gathered into until it is copied out, and gradients, which an accumulating step has
    from the beginning. Those that are not reduced in between are full, in FSDP2 in the dtype in
    which they travel. A compiled model that nothing cuts is one graph, whose backward gives all
    gradients when it has ended.
    """

    def __init__(self, units: Sequence[PlannedUnit], run: Run, *, pooled: bool = True):
        super().__init__({number: unit.cost for number, unit in enumerate(units)})
        self._full = [unit.cost.full_bytes for unit in units]
        self._grads = [_as_computed(unit) for unit in units]
        self._reduced = [unit.cost.grad_full_bytes for unit in units]
        self._waiting = self._reduced if run.engine is Engine.FSDP2 else self._grads
        self._are_full: set[int] = set()
        self._have_grads: dict[int, int] = {}
        cast = max((unit.cost.full_bytes // unit.layout.shards for unit in units), default=0)
        blocks = [unit.cost.full_bytes for unit in units if unit.around is not None]
        into = max(max(self._full, default=0), 2 * max(blocks, default=0))
        self._sharded = any(unit.layout.shards > 1 for unit in units)
        alone = all(unit.cost.solo and not unit.cost.all_reduce_bytes for unit in units)
        self._whole = run.compiled and alone
        self._pooled = pooled and self._sharded
        self.buffers = (into + cast) if self._pooled else 0
        self._rests = [unit.cost.rest_bytes for unit in units]
        accumulating = run.accumulate > 1
        self._waits = full = accumulating and not run.sync_each and self._sharded
        if full:
            self._have_grads = {number: size for number, size in enumerate(self._waiting) if size}
            self.buffers += sum(self._have_grads.values())
        self._has_gradients = self._pooled or (accumulating and not full)
        self.gradients = sum(self._rests) if self._has_gradients else 0

    def take(self, number: int, index: int) -> int:
        """The first gradient of a unit stands for all; what waits is added to, and held beside."""
        if number in self._have_grads:
            return self._grads[number] if self._waits else 0
        self._have_grads[number] = self._grads[number]
        self.buffers += self._grads[number]
        return 0

    def carry_out(self, op: Op) -> int:
        """Do what ``op`` says."""
        unit = op.unit
        if op.kind is OpKind.GATHER and unit not in self._are_full and not self._pooled:
            self.buffers += self._full[unit] if self._sharded else 0
        elif op.kind is OpKind.AWAIT_GATHER and unit not in self._are_full:
            self._are_full.add(unit)  # copied out when it is there
            if self._pooled or not self._sharded:
                self.buffers += self._full[unit]
            else:
                return self._full[unit]
        elif op.kind is OpKind.FREE and unit in self._are_full:
            self._are_full.remove(unit)
            self.buffers -= self._full[unit]
        elif op.kind is OpKind.REDUCE and unit in self._have_grads and not self._whole:
            self.buffers -= self._have_grads.pop(unit)
            self.gradients += 0 if self._has_gradients else self._rests[unit]
            return self._grads[unit] + self._reduced[unit] if self._sharded else 0
        return 0

    def end_step(self) -> None:
        """Add what a whole graph gave to what waits, or let it rest."""
        if self._whole:
            self.buffers -= sum(self._have_grads.values())
            self.gradients = sum(self._rests)


def _as_computed(unit: PlannedUnit) -> int:
    """Bytes of unreduced gradients as autograd makes them."""
    return sum(
        segment.full_numel * item_bytes(segment.full_dtype)
        for segment in unit.layout.segments
        if segment.trainable
    )
