# SPDX-License-Identifier: Apache-2.0
"""Memory taken beside tensors: by torch's allocator, the driver's context, the collectives.

These are estimates: the allocator's slack depends on the order of sizes, and differs from run to
run of the same program. A CPU has none of them.
"""

from collections.abc import Sequence

from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.run import Run
from fullshard.plan.step.units import PlannedUnit

__all__ = ["allocator_slack", "context_bytes"]

_NCCL_BYTES = 268_435_456
"""Memory of one NCCL communicator over many ranks: channels of 4 MiB, and NVLS's multicast."""


def allocator_slack(held: Sequence[int], cluster: Cluster, run: Run) -> int:
    """Bytes that torch's allocator has reserved beyond what tensors hold at the peak.

    ``held`` are bytes of parameters, gradients, optimizer state, unit buffers, activations, logits.
    """
    if cluster.device.cpu:
        return 0
    return int(cluster.device.slack * sum(held))


def context_bytes(cluster: Cluster, units: Sequence[PlannedUnit]) -> int:
    """Bytes that the driver's context and the communicators of gathers, reduces, replicas take."""
    if cluster.device.cpu:
        return 0
    replicated = any(unit.policy.replicated for unit in units)
    sharded = any(unit.layout.shards > 1 for unit in units)
    communicators = 2 * sharded + (replicated or not sharded) if cluster.devices > 1 else 0
    return cluster.device.context_bytes + communicators * _NCCL_BYTES
