# SPDX-License-Identifier: Apache-2.0
"""Seconds of one operation on one device, and of collectives between devices."""

from dataclasses import dataclass

from fullshard.plan.cluster.cluster import Cluster, Constants, Device
from fullshard.plan.model.operations import Kind, Operation, Workload
from fullshard.plan.run import ONE_BY_ONE, AttentionKernel, Run


@dataclass(frozen=True)
class Group:
    """Ranks of one communicator: ``size`` of them, ``per_host`` of those in each host."""

    size: int
    per_host: int

    @property
    def hosts(self) -> int:
        """Number of hosts that the group touches."""
        return max(1, self.size // self.per_host)


def _bandwidth(group: Group, cluster: Cluster, constants: Constants) -> float:
    """Bytes/s that one rank receives in a ring.

    Rings enter and leave a host by all its links at once, so that the links of the group's ranks in
    a host add up; inside, each rank has its own.
    """
    inside = cluster.inside.bandwidth * constants.inside_share
    if group.hosts == 1:
        return inside
    between = cluster.between.bandwidth * constants.between_share * group.per_host
    return min(inside, between) if group.per_host > 1 else between


def _latency_s(group: Group, cluster: Cluster) -> float:
    """Seconds before the first bytes have gone all the way round.

    A ring passes every rank; libraries take trees, of log2 hosts, where that would be longer.
    """
    if group.size == 1:
        return 0.0
    across = (group.hosts - 1).bit_length() * cluster.between.latency_s * 2
    return (group.per_host - 1) * cluster.inside.latency_s + across


def gather_s(full_bytes: float, group: Group, cluster: Cluster, constants: Constants) -> float:
    """Seconds to gather ``full_bytes``, or to reduce and scatter them: the same bytes move."""
    if group.size == 1 or not full_bytes:
        return 0.0
    received = full_bytes * (group.size - 1) / group.size
    return _latency_s(group, cluster) + received / _bandwidth(group, cluster, constants)


def exchange_s(sent_bytes: float, group: Group, cluster: Cluster, constants: Constants) -> float:
    """Seconds of an all-to-all in which a rank has ``sent_bytes`` for all, itself among them.

    What goes to ranks in its host and what goes to others travels at once, by links of their own.
    """
    if group.size == 1:
        return 0.0
    each = sent_bytes / group.size
    inside = cluster.inside.bandwidth * constants.inside_share
    between = cluster.between.bandwidth * constants.between_share
    far = group.size - group.per_host
    travel = max((group.per_host - 1) * each / inside, far * each / between)
    return travel + (cluster.between if far else cluster.inside).latency_s


def reduce_all_s(whole_bytes: float, group: Group, cluster: Cluster, constants: Constants) -> float:
    """Seconds of an all-reduce of ``whole_bytes``: a reduce-scatter, then a gather."""
    return 2 * gather_s(whole_bytes, group, cluster, constants)


# Beside a mask PyTorch's kernels leave no score out. On an H100, over forward and backward of 4,096
# tokens and heads of 128, cuDNN's reach 156 of 515 TFLOP/s, the memory-efficient ones, which stand
# in for FlashAttention, 63 of 291 (benchmarks/data/measured).
_MASKED_SHARE = {"cudnn": 0.30, "flash2": 0.22}
_MASKED = (AttentionKernel.MASKED, AttentionKernel.EFFICIENT)
# Narrower heads reach less: of what heads of 128 do, on an H100 cuDNN's kernels reach 0.80 with
# heads of 96 and 0.78 with 64, FlashAttention-2 0.94 and 0.89.
_HEAD_POWER = 0.3
_USUAL_HEAD = 128
# FlashAttention-2 is 1.3 to 2.5 times as fast as the Triton kernel before it (its section 4.1).
_TRITON_SHARE = 1 / 1.7
_KERNELS = {each: each.value for each in AttentionKernel} | {
    AttentionKernel.TRITON: "flash2",
    AttentionKernel.EFFICIENT: "flash2",
}
_BY_MEMORY = (AttentionKernel.MATH, AttentionKernel.EAGER)
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
        if run.attention in _BY_MEMORY:
            return work.bytes / memory
        length, _, width = work.shape or (_USUAL_LENGTH, 1, _USUAL_HEAD)
        kernel = _KERNELS[run.attention]
        if run.attention in (AttentionKernel.FLASH, AttentionKernel.MASKED):
            kernel = device.sdpa
        reached = device.attention_flops(kernel, run.product_dtype, length)
        reached *= constants.attention_share
        reached *= float(min(1.0, width / _USUAL_HEAD) ** _HEAD_POWER)
        if run.attention in _MASKED:
            reached *= _MASKED_SHARE[kernel]
        if run.attention is AttentionKernel.TRITON:
            reached *= _TRITON_SHARE
        return max(work.flops / reached, work.bytes / memory)
    reached = device.peak(run.product_dtype) * device.sustained * constants.matmul_share
    if operation.forward.count > 1 and run.experts not in ONE_BY_ONE:
        reached *= device.grouped
    lost_s = work.flops / reached * _lost(work, constants.matmul_ramp)
    if not run.fp8 or operation.logits:
        return max(work.flops / reached + lost_s, work.bytes / memory)
    reached *= device.peak("float8_e4m3fn") / device.peak(run.product_dtype) * _FLOAT8_SHARE
    cast_s = _cast_bytes(operation, work) / memory
    return max(work.flops / reached + lost_s, work.bytes / memory) + cast_s


def masked_longer(device: Device) -> float:
    """The factor by which a mask that nobody told lengthens attention at most."""
    return device.attention[device.sdpa] / device.attention["flash2"] / _MASKED_SHARE["flash2"]


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
