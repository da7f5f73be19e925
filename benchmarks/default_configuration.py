# SPDX-License-Identifier: Apache-2.0
"""The default configuration: what benchmarks of steps and of memory set, the same in every engine.

- Units: each block of the model, and the root with what is left over.
- Prefetch: one unit ahead of the one in use, in forward and in backward.
- Optimizer: AdamW in its fused form, after the whole of backward; gradients are None after it.
- Gradients are not clipped. One micro-batch a step.
- Precision: float32 throughout, or with a ``dtype`` parameters and gradients travel in that and
  the model computes in it, while what rests and the optimizer stay in float32.

Time and memory are measured under this one, so a figure of one table may be held against the other.
"""

from itertools import pairwise

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from fullshard.torch import MixedPrecisionPolicy, fully_shard, set_prefetch

AHEAD_UNITS = 1
ADAMW = {"lr": 1e-3, "fused": True}


def adamw(params, **otherwise):
    return torch.optim.AdamW(params, **(otherwise or ADAMW))


class Autocast(nn.Module):
    """What engines that know no precision compute in ``dtype`` with: PyTorch's autocast."""

    def __init__(self, module, dtype):
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, inputs):
        with torch.autocast(inputs.device.type, self.dtype):
            return self.module(inputs)


def plain(model, dtype=None):
    return model if dtype is None else Autocast(model, dtype)


def ddp(model, dtype=None):
    replicated = DistributedDataParallel(plain(model, dtype))
    if dtype is not None:
        assert dtype == torch.bfloat16, "DDP compresses gradients to bfloat16 only"
        replicated.register_comm_hook(None, compressed)
    return replicated


def compressed(group, bucket):
    """PyTorch's own hook, which DDP takes by its name on NCCL only; Gloo can do it too."""
    return bf16_compress_hook(group, bucket)


def fsdp1(model, block, dtype=None, **options):
    if dtype is not None:
        options["mixed_precision"] = torch_fsdp.MixedPrecision(dtype, dtype)
    assert AHEAD_UNITS == 1, "FSDP1 gathers one unit ahead, or none"
    return torch_fsdp.FullyShardedDataParallel(
        model,
        auto_wrap_policy=torch_fsdp.wrap.ModuleWrapPolicy({block}),
        use_orig_params=True,
        device_id=next(model.parameters()).device,
        forward_prefetch=True,
        backward_prefetch=torch_fsdp.BackwardPrefetch.BACKWARD_PRE,
        **options,
    )


def fsdp2(model, block, dtype=None, **options):
    if dtype is not None:
        options["mp_policy"] = torch_fsdp.MixedPrecisionPolicy(dtype, dtype)
    blocks = _bottom_up(torch_fsdp.fully_shard, model, block, options)
    assert AHEAD_UNITS == 1
    for earlier, later in pairwise(blocks):
        earlier.set_modules_to_forward_prefetch([later])
        later.set_modules_to_backward_prefetch([earlier])
    return model


def fullshard(model, block, dtype=None, **options):
    if dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(dtype, dtype)
    _bottom_up(fully_shard, model, block, options)
    set_prefetch(model, forward=AHEAD_UNITS, backward=AHEAD_UNITS)
    return model


def _bottom_up(shard, model, block, options):
    blocks = [module for module in model.modules() if isinstance(module, block)]
    for each in blocks:
        shard(each, **options)
    shard(model, **options)
    return blocks
