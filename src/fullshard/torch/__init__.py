# SPDX-License-Identifier: Apache-2.0
"""fullshard's engine on torch.distributed.

`FullyShardedDataParallel` has FSDP1's signature, `fully_shard` FSDP2's; behind both doors is the
same engine. Outside of forward and backward, parameters are `ShardedParameter`s.
"""

from fullshard.core.strategy import BackwardPrefetch, ShardingStrategy
from fullshard.core.trace import Trace
from fullshard.torch.fsdp1 import FullyShardedDataParallel
from fullshard.torch.fsdp2 import FSDPModule, fully_shard
from fullshard.torch.optim import clip_grad_norm_
from fullshard.torch.options import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from fullshard.torch.parameter import ShardedParameter
from fullshard.torch.shard_modules import set_prefetch
from fullshard.torch.state import RestingBytes, resting_bytes, save_full_weights, tracing

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "FSDPModule",
    "FullyShardedDataParallel",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "RestingBytes",
    "ShardedParameter",
    "ShardingStrategy",
    "Trace",
    "clip_grad_norm_",
    "fully_shard",
    "resting_bytes",
    "save_full_weights",
    "set_prefetch",
    "tracing",
]
