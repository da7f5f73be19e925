# SPDX-License-Identifier: Apache-2.0
"""Memory that a rank keeps between steps, and what is taken beside tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.core.layout import Segment, stored_bytes
from fullshard.core.spec import item_bytes
from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.run import OPTIMIZERS, Run
from fullshard.plan.step.units import PlannedUnit

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


_NCCL_BYTES = 268_435_456
"""Memory of one NCCL communicator over many ranks: channels of 4 MiB, and NVLS's multicast."""

# Optimizer states are made in what the first step's logits left, which are then allocated anew: on
# an H100 a third of the smaller was lost so, on average of 57 runs (benchmarks/data/measured).
_HOLES = 0.3


def allocator_slack(held: Sequence[int], cluster: Cluster, run: Run) -> int:
    """Bytes that torch's allocator has reserved beyond what tensors hold at the peak.

    ``held`` are bytes of parameters, gradients, optimizer state, unit buffers, activations, logits.
    """
    if cluster.device.cpu:
        return 0
    holes = 0.0 if run.expandable_segments else _HOLES * min(held[2], held[5])
    return int(cluster.device.slack * sum(held) + cluster.device.slack_bytes + holes)


def context_bytes(cluster: Cluster, units: Sequence[PlannedUnit]) -> int:
    """Bytes that the driver's context and the communicators of gathers, reduces, replicas take."""
    if cluster.device.cpu:
        return 0
    replicated = any(unit.policy.replicated for unit in units)
    sharded = any(unit.layout.shards > 1 for unit in units)
    communicators = 2 * sharded + (replicated or not sharded) if cluster.devices > 1 else 0
    return cluster.device.context_bytes + communicators * _NCCL_BYTES
