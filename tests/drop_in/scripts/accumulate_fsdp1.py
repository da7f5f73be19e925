# SPDX-License-Identifier: Apache-2.0
"""Micro-batches without communication, clipping, loss scaling and recomputation, with FSDP."""

import argparse
import contextlib
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy

WIDTH = 20


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


POLICIES = {
    "size": functools.partial(size_based_auto_wrap_policy, min_num_params=400),
    "class": ModuleWrapPolicy({Layer}),
    "custom": CustomPolicy(lambda module: isinstance(module, Layer)),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", choices=POLICIES, default="size")
    parser.add_argument("--scale", action="store_true")
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--recompute", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = FSDP(
        nn.Sequential(*(Layer() for _ in range(4)), nn.Linear(WIDTH, 1)),
        auto_wrap_policy=POLICIES[args.policy],
        mixed_precision=MixedPrecision(param_dtype=torch.float16) if args.fp16 else None,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    if args.recompute:
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=functools.partial(
                checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT
            ),
            check_fn=lambda module: isinstance(module, Layer),
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = ShardedGradScaler(device="cpu", init_scale=2.0**10, enabled=args.scale)
    for step in range(10):
        for micro in range(3):
            generator = torch.Generator().manual_seed(10 * step + 2 * micro + rank)
            inputs = torch.randn(6, WIDTH, generator=generator)
            with model.no_sync() if micro < 2 else contextlib.nullcontext():
                outputs = model(inputs).float().squeeze(-1)
                loss = (outputs - inputs.sum(-1).sin()).square().mean() / 3
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = model.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.8f} norm {norm.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
