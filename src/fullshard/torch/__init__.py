# SPDX-License-Identifier: Apache-2.0
"""fullshard's engine on torch.distributed.

`FullyShardedDataParallel` has FSDP1's signature, `fully_shard` FSDP2's; behind both interfaces is
the same engine. Outside of forward and backward, parameters are `ShardedParameter`s. ``__all__``
lists what to know first. Every further public name of the interfaces, of `inspection`
and of `checkpoint` is here, too.
"""

from torch.nn.utils import clip_grad_norm_

# Before all others: it refuses a torch that lacks what they take from it.
import fullshard.torch.private_names  # noqa: F401
from fullshard.core.strategy import ShardingStrategy
from fullshard.torch import inspection
from fullshard.torch.capture import capture_step
from fullshard.torch.checkpoint import load_checkpoint, save_checkpoint
from fullshard.torch.comm.compressed import CommunicationCompression
from fullshard.torch.comm.uneven_inputs import stop_together
from fullshard.torch.fsdp1.wrapper import FullyShardedDataParallel
from fullshard.torch.fsdp2.experts import shard_experts
from fullshard.torch.fsdp2.fully_shard import fully_shard
from fullshard.torch.fsdp2.module import FSDPModule
from fullshard.torch.inspection.traffic import tracing
from fullshard.torch.optim.exchange import exchange_matrices
from fullshard.torch.optim.grad_scaler import ShardedGradScaler
from fullshard.torch.optim.overlap_optimizer import overlap_optimizer
from fullshard.torch.sharding.memory_pool import use_memory_pool
from fullshard.torch.sharding.options import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
)
from fullshard.torch.sharding.owners import WholeMatrices
from fullshard.torch.sharding.settings import (
    keep_for_double_backward,
    mark_optional,
    reduce_once,
    set_prefetch,
    set_separate_reduce_scatter_group,
    using,
)
from fullshard.torch.sharding.summon import summon_full_params
from fullshard.torch.state.weights_file import load_full_weights, save_full_weights
from fullshard.torch.tensor.parameter import ShardedParameter

# Names beside those of __all__; a star and "as" say to type checkers that they are public, too.
from fullshard.torch.fsdp1 import *  # isort: skip # noqa: F403
from fullshard.torch.fsdp2 import *  # isort: skip # noqa: F403
from fullshard.torch.inspection import *  # isort: skip # noqa: F403
from fullshard.torch.checkpoint import *  # isort: skip # noqa: F403
from fullshard.torch.capture import CapturedStep as CapturedStep  # isort: skip
from fullshard.torch.comm.uneven_inputs import any_rank as any_rank  # isort: skip
from fullshard.torch.comm.uneven_inputs import pad_to_longest as pad_to_longest  # isort: skip

__all__ = [
    "CPUOffload", "CPUOffloadPolicy", "CommunicationCompression", "FSDPModule",
    "FullyShardedDataParallel", "MixedPrecision", "MixedPrecisionPolicy", "ShardedGradScaler",
    "ShardedParameter", "ShardingStrategy", "WholeMatrices", "capture_step", "clip_grad_norm_",
    "exchange_matrices", "fully_shard", "inspection", "keep_for_double_backward", "load_checkpoint",
    "load_full_weights", "mark_optional", "overlap_optimizer", "reduce_once", "save_checkpoint",
    "save_full_weights", "set_prefetch", "set_separate_reduce_scatter_group", "shard_experts",
    "stop_together", "summon_full_params", "tracing", "use_memory_pool", "using",
]  # fmt: skip
