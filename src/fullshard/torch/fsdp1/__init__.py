# SPDX-License-Identifier: Apache-2.0
"""The interface with FSDP1's signature: `FullyShardedDataParallel`."""

from fullshard.torch.fsdp1.wrapper import FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel"]
