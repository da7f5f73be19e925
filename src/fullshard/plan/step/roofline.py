# SPDX-License-Identifier: Apache-2.0
"""Seconds of one operation on one device: a roofline whose matrix roof depends on the shape."""

from fullshard.plan.cluster.cluster import Cluster, Constants
from fullshard.plan.model.operations import Kind, Operation, Workload
from fullshard.plan.run import AttentionKernel, ExpertKernel, Run
from fullshard.plan.step.collectives import Group, exchange_s

__all__ = ["operation_s"]

# FlashAttention-2 is 1.3 to 2.5 times as fast as the Triton kernel before it (its section 4.1).
_TRITON_SHARE = 1 / 1.7
_KERNELS = {each: each.value for each in AttentionKernel} | {AttentionKernel.TRITON: "flash2"}
_USUAL_LENGTH = 4096  # of recorded models, whose kernels do not say theirs
# The best products in float8 reach 70.9% of their peak, those in bfloat16 80.3% (H100, 2025,
# stas00/ml-engineering's table of matrix products).
_FLOAT8_SHARE = 0.709 / 0.803
_FLOAT8_CAST_BYTES = 4  # read in 16 bits, written as a number of 8 bits and once more transposed


def operation_s(
    operation: Operation, work: Workload, run: Run, cluster: Cluster, constants: Constants
) -> float:
    """Seconds of ``work``, which is one direction of ``operation``."""
    device = cluster.device
    if operation.kind is Kind.WIRE:
        return work.bytes / (cluster.inside.bandwidth * constants.inside_share)
    if operation.kind is Kind.EXCHANGE:
        ranks = Group(run.expert_parallel, min(run.expert_parallel, cluster.per_host))
        return exchange_s(work.bytes, ranks, cluster, constants)
    memory = device.bandwidth * constants.memory_share
    if operation.kind is Kind.MEMORY:
        return work.bytes / memory
    if operation.kind is Kind.ATTENTION:
        if run.attention is AttentionKernel.MATH:
            return work.bytes / memory
        length = work.shape[0] if work.shape else _USUAL_LENGTH
        kernel = _KERNELS[run.attention]
        if run.attention is AttentionKernel.FLASH:
            kernel = device.sdpa
        reached = device.attention_flops(kernel, run.compute_dtype, length)
        reached *= constants.attention_share
        if run.attention is AttentionKernel.TRITON:
            reached *= _TRITON_SHARE
        return max(work.flops / reached, work.bytes / memory)
    reached = device.peak(run.compute_dtype) * device.sustained * constants.matmul_share
    if work.count > 1 and run.experts is not ExpertKernel.LOOP:
        reached *= device.grouped
    lost_s = work.flops / reached * _lost(work, constants.matmul_ramp)
    if not run.fp8 or operation.logits:
        return max(work.flops / reached + lost_s, work.bytes / memory)
    reached *= device.peak("float8_e4m3fn") / device.peak(run.compute_dtype) * _FLOAT8_SHARE
    cast_s = _cast_bytes(operation, work) / memory
    return max(work.flops / reached + lost_s, work.bytes / memory) + cast_s


def _lost(work: Workload, ramp: float) -> float:
    """The share of time that a product with short dimensions takes on top.

    Loading a tile's operands and storing its result takes as long as ``ramp`` steps of the inner
    dimension. That is ``k`` in forward; the two products of backward have ``n`` and ``m`` inside.
    """
    if work.shape is None:
        return 0.0
    m, n, k = work.shape
    return ramp * (1 / k + 1 / n + 1 / m) / 3


def _cast_bytes(operation: Operation, work: Workload) -> float:
    """Bytes that casting to float8 moves: inputs and weights in forward, then gradients."""
    if work.shape is None:
        return 0.0
    m, n, k = work.shape
    cast = m * k + n * k if work is operation.forward else m * n
    return float(_FLOAT8_CAST_BYTES * cast)
