# SPDX-License-Identifier: Apache-2.0
"""fullshard's engine on torch.distributed.

`FullyShardedDataParallel` has FSDP1's signature, `fully_shard` FSDP2's; behind both interfaces is
the same engine. Outside of forward and backward, parameters are `ShardedParameter`s. ``__all__``
lists what to know first. Every further public name of `fullshard.torch.fsdp1`,
`fullshard.torch.fsdp2` and `fullshard.torch.inspection` can be imported from here, too.
"""

import importlib
from typing import Any

# First of all: it refuses a torch that lacks what the others take from it.
import fullshard.torch.private_names  # noqa: F401
from fullshard.core.strategy import ShardingStrategy
from fullshard.torch import inspection
from fullshard.torch.checkpoint import load_checkpoint, save_checkpoint
from fullshard.torch.comm.compressed import CommunicationCompression
from fullshard.torch.comm.uneven_inputs import stop_together
from fullshard.torch.fsdp1.wrapper import FullyShardedDataParallel
from fullshard.torch.fsdp2.fully_shard import fully_shard
from fullshard.torch.fsdp2.module import FSDPModule
from fullshard.torch.inspection.traffic import tracing
from fullshard.torch.optim.checks import clip_grad_norm_
from fullshard.torch.optim.grad_scaler import ShardedGradScaler
from fullshard.torch.optim.overlap_optimizer import overlap_optimizer
from fullshard.torch.sharding.memory_pool import use_memory_pool
from fullshard.torch.sharding.options import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
)
from fullshard.torch.sharding.shard import (
    keep_for_double_backward,
    set_prefetch,
    set_separate_reduce_scatter_group,
)
from fullshard.torch.sharding.summon import summon_full_params
from fullshard.torch.state.weights_file import load_full_weights, save_full_weights
from fullshard.torch.tensor.parameter import ShardedParameter

__all__ = [
    "CPUOffload",
    "CPUOffloadPolicy",
    "CommunicationCompression",
    "FSDPModule",
    "FullyShardedDataParallel",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "ShardedGradScaler",
    "ShardedParameter",
    "ShardingStrategy",
    "clip_grad_norm_",
    "fully_shard",
    "inspection",
    "keep_for_double_backward",
    "load_checkpoint",
    "load_full_weights",
    "overlap_optimizer",
    "save_checkpoint",
    "save_full_weights",
    "set_prefetch",
    "set_separate_reduce_scatter_group",
    "stop_together",
    "summon_full_params",
    "tracing",
    "use_memory_pool",
]

# Modules whose ``__all__`` can be imported from here, too, in the order in which they are asked.
_MORE = ("fsdp1", "fsdp2", "inspection", "checkpoint", "comm.uneven_inputs")


def __getattr__(name: str) -> Any:
    for home in _MORE if not name.startswith("_") else ():
        module = importlib.import_module(f"fullshard.torch.{home}")
        if name in module.__all__:
            return getattr(module, name)
    raise AttributeError(f"module 'fullshard.torch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
