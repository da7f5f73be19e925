# SPDX-License-Identifier: Apache-2.0
"""Seconds of one operation on one device: a roofline whose matrix roof depends on the shape."""

from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.cluster.read import Constants
from fullshard.plan.model.operations import Kind, Operation, Work
from fullshard.plan.run import Attention, Run

__all__ = ["operation_s"]

# FlashAttention-2 is 1.3 to 2.5 times as fast as the Triton kernel before it: arXiv:2307.08691, 4.1.
_TRITON_SHARE = 1 / 1.7


def operation_s(
    operation: Operation, work: Work, run: Run, cluster: Cluster, constants: Constants
) -> float:
    """Seconds of ``work``, which is one direction of ``operation``."""
    device = cluster.device
    if operation.kind is Kind.WIRE:
        return work.bytes / (cluster.inside.bandwidth * constants.inside_share)
    moved_s = work.bytes / (device.bandwidth * constants.memory_share)
    if operation.kind is Kind.MEMORY:
        return moved_s
    if operation.kind is Kind.ATTENTION:
        reached = device.peak(run.compute_dtype) * device.attention * constants.attention_share
        if run.attention is Attention.TRITON:
            reached *= _TRITON_SHARE
        return max(work.flops / reached, moved_s)
    reached = device.peak(_matmul_dtype(run)) * device.sustained * constants.matmul_share
    return max(work.flops / reached * _slowed(work, constants.matmul_ramp), moved_s)


def _matmul_dtype(run: Run) -> str:
    return "float8_e4m3fn" if run.fp8 else run.compute_dtype


def _slowed(work: Work, ramp: float) -> float:
    """By how much products with short dimensions are slower than large ones.

    A tile's products are preceded by loading it and followed by storing it, which takes as long as
    ``ramp`` steps of the inner dimension. Backward has two products, with ``n`` and ``m`` inside.
    """
    if work.shape is None:
        return 1.0
    m, n, k = work.shape
    return 1.0 + ramp * (1 / k + 1 / n + 1 / m) / 3
