# SPDX-License-Identifier: Apache-2.0
"""Parameters, gradients and optimizer state that one rank keeps between steps."""

from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.core.layout import Segment, stored_bytes
from fullshard.core.spec import item_bytes
from fullshard.plan.run import OPTIMIZERS, Run
from fullshard.plan.step.units import PlannedUnit

__all__ = ["RestingMemory", "resting_memory"]

_STEP_COUNT_BYTES = {"adamw": 4, "adam": 4}
"""These count the steps of each parameter in a float32 beside their moments."""


@dataclass(frozen=True)
class RestingMemory:
    """Bytes of one rank between steps, padding included, after a backward.

    ``working_bytes`` is the copy of the shard that stays on the device if only optimizer state is
    offloaded; ``on_host`` is true if parameters, gradients and optimizer state rest there.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    working_bytes: int = 0
    on_host: bool = False

    @property
    def total_bytes(self) -> int:
        """All of it, wherever it is."""
        rests = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes
        return rests + self.working_bytes

    @property
    def device_bytes(self) -> int:
        """The part that is in the device's memory."""
        return self.working_bytes if self.on_host else self.total_bytes

    @property
    def host_bytes(self) -> int:
        """The part that is in the host's memory."""
        return self.total_bytes - self.device_bytes


def resting_memory(
    units: Sequence[PlannedUnit], run: Run, *, rank: int = 0, cpu: bool = False
) -> RestingMemory:
    """Add up what ``rank`` (among those that share slices) keeps of ``units`` between steps.

    Slices are equal on all ranks; optimizer state is that of the rank's own elements, without the
    padding. With ``cpu`` the device is the host's CPU, whose memory is where offloaded state is.
    """
    copies = run.offload.optimizer and not run.offload.params
    working = (
        stored_bytes(segment.slice_numel, segment.full_dtype)
        for unit in units
        for segment in unit.layout.segments
    )
    return RestingMemory(
        sum(unit.layout.shard_bytes for unit in units),
        sum(unit.cost.rest_bytes for unit in units),
        sum(_optimizer_bytes(s, run, rank) for unit in units for s in unit.layout.segments),
        sum(working) if copies else 0,
        run.offload.to_host and not cpu,
    )


def _optimizer_bytes(segment: Segment, run: Run, rank: int) -> int:
    if not segment.trainable:
        return 0
    held = sum(segment.span(slot, rank).numel for slot in segment.slots)
    states = OPTIMIZERS[run.optimizer]
    # SGD's momentum begins as a copy of the first gradient, and keeps its dtype.
    low = run.optimizer == "momentum" and run.precision.keep_low_grads
    state_bytes = states * held * item_bytes(segment.grad_dtype if low else segment.dtype)
    return state_bytes + _STEP_COUNT_BYTES.get(run.optimizer, 0) * len(segment.slots)
