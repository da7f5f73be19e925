# SPDX-License-Identifier: Apache-2.0
"""Shard within a group of ranks, replicate over the groups."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import always_wrap_policy, enable_wrap, wrap

WIDTH = 18


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="2x1", help="groups x ranks in each")
    parser.add_argument("--door", choices=["policy", "enable_wrap", "fully_shard"])
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    shape = tuple(int(size) for size in args.mesh.split("x"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    options = {
        "device_mesh": mesh,
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        "device_id": torch.device("cpu"),
    }
    if args.door == "fully_shard":
        model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif args.door == "enable_wrap":
        with enable_wrap(wrapper_cls=FullyShardedDataParallel, **options):
            model = wrap(nn.Sequential(*map(wrap, layers), nn.Linear(WIDTH, 1)))
    else:
        model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
        model = FullyShardedDataParallel(model, auto_wrap_policy=always_wrap_policy, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(10):
        generator = torch.Generator().manual_seed(2 * step + rank)
        inputs = torch.randn(5, WIDTH, generator=generator)
        loss = (model(inputs).squeeze(-1) - inputs.mean(-1)).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
