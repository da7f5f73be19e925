# SPDX-License-Identifier: Apache-2.0
"""A plain training loop, sharded: three lines differ from one process.

    torchrun --nproc-per-node 2 examples/train_loop.py

Each rank trains on its own samples of a small regression and prints what it holds.
"""

import torch
import torch.distributed as dist
from torch import nn

from fullshard.torch import fully_shard, resting_bytes

STEPS = 60


def main() -> None:
    torch.manual_seed(0)  # every rank builds the same weights
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    for block in model:
        fully_shard(block)  # each block is a unit: gathered when it runs, freed after
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # after sharding, not before

    data = torch.Generator().manual_seed(dist.get_rank())  # every rank has its own samples
    for step in range(STEPS):
        inputs = torch.randn(32, 64, generator=data)
        loss = nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm over all ranks
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19 and dist.get_rank() == 0:
            print(f"step {step + 1}  loss {loss.item():.4f}  gradient norm {norm.item():.4f}")

    held = resting_bytes(model, optimizer)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    print(
        f"rank {dist.get_rank()} holds {held.parameters_bytes:,} of {whole:,} parameter bytes "
        f"and {held.optimizer_bytes:,} bytes of Adam's state"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
