# SPDX-License-Identifier: Apache-2.0
"""fullshard's engine on torch.distributed.

`FullyShardedDataParallel` has FSDP1's signature, `fully_shard` FSDP2's; behind both doors is the
same engine. Outside of forward and backward, parameters are `ShardedParameter`s.
"""

from fullshard.core.strategy import BackwardPrefetch, ShardingStrategy
from fullshard.core.trace import Trace
from fullshard.torch.fsdp1 import FullyShardedDataParallel
from fullshard.torch.fsdp2 import fully_shard
from fullshard.torch.fsdp_module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fullshard.torch.grad_scaler import ShardedGradScaler
from fullshard.torch.memory_pool import use_memory_pool
from fullshard.torch.optim import clip_grad_norm_
from fullshard.torch.options import (
    CommunicationCompression,
    CPUOffload,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from fullshard.torch.overlap_optimizer import overlap_optimizer
from fullshard.torch.parameter import ShardedParameter
from fullshard.torch.shard_modules import set_prefetch
from fullshard.torch.state import RestingBytes, resting_bytes, tracing
from fullshard.torch.state_dict_types import (
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
from fullshard.torch.summon import summon_full_params
from fullshard.torch.uneven_inputs import any_rank, pad_to_longest, stop_together
from fullshard.torch.weights_file import load_full_weights, save_full_weights

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CommunicationCompression",
    "DataParallelMeshDims",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "RestingBytes",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedParameter",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "Trace",
    "UnshardHandle",
    "any_rank",
    "clip_grad_norm_",
    "fully_shard",
    "load_full_weights",
    "overlap_optimizer",
    "pad_to_longest",
    "register_fsdp_forward_method",
    "resting_bytes",
    "save_full_weights",
    "set_prefetch",
    "share_comm_ctx",
    "stop_together",
    "summon_full_params",
    "tracing",
    "use_memory_pool",
]
