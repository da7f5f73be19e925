# SPDX-License-Identifier: Apache-2.0
"""Seconds of one operation on one device: a roofline whose matrix roof depends on the shape."""

from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.cluster.read import Constants
from fullshard.plan.model.operations import Kind, Operation, Work
from fullshard.plan.run import Run

__all__ = ["operation_s"]

_HEAD_RAMP = 32.0  # attention with heads of 64 runs at 0.83 of that with 128 (arXiv:2307.08691)


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
