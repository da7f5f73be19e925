# SPDX-License-Identifier: Apache-2.0
"""The interface with FSDP2's signature: `fully_shard`, the types it takes, and experts over it."""

from fullshard.torch.fsdp2.experts import StackedExperts, shard_experts
from fullshard.torch.fsdp2.fully_shard import fully_shard
from fullshard.torch.fsdp2.module import (
    FSDPGrad,
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fullshard.torch.sharding.options import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

__all__ = [
    "CPUOffloadPolicy", "DataParallelMeshDims", "FSDPGrad", "FSDPModule", "MixedPrecisionPolicy",
    "OffloadPolicy", "StackedExperts", "UnshardHandle", "fully_shard",
    "register_fsdp_forward_method", "shard_experts", "share_comm_ctx",
]  # fmt: skip
