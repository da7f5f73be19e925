# SPDX-License-Identifier: Apache-2.0
"""The interface with FSDP2's signature: `fully_shard`."""

from fullshard.torch.fsdp2.fully_shard import fully_shard
from fullshard.torch.fsdp2.module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)

__all__ = [
    "FSDPModule",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
