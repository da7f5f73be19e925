# SPDX-License-Identifier: Apache-2.0
"""fullshard's engine on torch.distributed.

`FullyShardedDataParallel` has FSDP1's signature, `fully_shard` FSDP2's; behind both doors is the
same engine. Outside of forward and backward, parameters are `ShardedParameter`s.
"""

from fullshard.core.strategy import BackwardPrefetch, ShardingStrategy
from fullshard.core.trace import Trace
from fullshard.torch.checkpoint import (
    Background,
    Keep,
    Loaded,
    RunFolder,
    Saving,
    load_checkpoint,
    save_checkpoint,
)
from fullshard.torch.comm.compressed import CommunicationCompression
from fullshard.torch.comm.uneven_inputs import any_rank, pad_to_longest, stop_together
from fullshard.torch.fsdp1.wrapper import FullyShardedDataParallel
from fullshard.torch.fsdp2.fully_shard import fully_shard
from fullshard.torch.fsdp2.module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fullshard.torch.inspection.memory_summary import RestingBytes, resting_bytes
from fullshard.torch.inspection.traffic import tracing
from fullshard.torch.optim.checks import clip_grad_norm_
from fullshard.torch.optim.grad_scaler import ShardedGradScaler
from fullshard.torch.optim.overlap_optimizer import overlap_optimizer
from fullshard.torch.sharding.memory_pool import use_memory_pool
from fullshard.torch.sharding.options import (
    CPUOffload,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from fullshard.torch.sharding.shard import set_prefetch
from fullshard.torch.sharding.summon import summon_full_params
from fullshard.torch.state.state_dict_types import (
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
from fullshard.torch.state.weights_file import load_full_weights, save_full_weights
from fullshard.torch.tensor.parameter import ShardedParameter

__all__ = [
    "Background",
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CommunicationCompression",
    "DataParallelMeshDims",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "Keep",
    "Loaded",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "RestingBytes",
    "RunFolder",
    "Saving",
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
    "load_checkpoint",
    "load_full_weights",
    "overlap_optimizer",
    "pad_to_longest",
    "register_fsdp_forward_method",
    "resting_bytes",
    "save_checkpoint",
    "save_full_weights",
    "set_prefetch",
    "share_comm_ctx",
    "stop_together",
    "summon_full_params",
    "tracing",
    "use_memory_pool",
]
