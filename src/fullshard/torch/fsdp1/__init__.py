# SPDX-License-Identifier: Apache-2.0
"""The interface with FSDP1's signature: `FullyShardedDataParallel`, and the types it takes."""

from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from fullshard.core.strategy import ShardingStrategy
from fullshard.torch.fsdp1.flat_params import FlatParameter
from fullshard.torch.fsdp1.wrapper import FullyShardedDataParallel
from fullshard.torch.optim.grad_scaler import ShardedGradScaler
from fullshard.torch.sharding.options import CPUOffload, MixedPrecision

__all__ = [
    "BackwardPrefetch", "CPUOffload", "FlatParameter", "FullOptimStateDictConfig",
    "FullStateDictConfig", "FullyShardedDataParallel", "LocalOptimStateDictConfig",
    "LocalStateDictConfig", "MixedPrecision", "OptimStateDictConfig", "OptimStateKeyType",
    "ShardedGradScaler", "ShardedOptimStateDictConfig", "ShardedStateDictConfig",
    "ShardingStrategy", "StateDictConfig", "StateDictSettings", "StateDictType",
]  # fmt: skip
