# SPDX-License-Identifier: Apache-2.0
"""Training that survives kill -9: start it again, on as many ranks as you like.

torchrun --nproc-per-node 2 --max-restarts 3 examples/survive.py RUN_FOLDER
"""

import sys
from pathlib import Path

import torch
from torch import nn

import fullshard as sft
from fullshard.checkpoint import Files, steps_in
from fullshard.torch import FullyShardedDataParallel as FSDP
from fullshard.torch import Keep, RunFolder, load_checkpoint, save_checkpoint

STEPS, BATCH = 60, 12  # of a step, over all ranks together


def main(folder: Path) -> None:
    sft.initialize_distributed_training()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    run = RunFolder(folder, keep=Keep(last=2))
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    position = 0  # the samples that were used: all there is to know of the data
    if steps_in(Files(), folder):
        position = load_checkpoint(run, model, optimizer, fallback=True).extra["position"]
    while position < STEPS * BATCH:
        share = BATCH // world
        mine = torch.arange(position + rank * share, position + (rank + 1) * share)
        inputs = torch.sin(mine[:, None] * torch.arange(1.0, 9.0))  # stands for reading samples
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        position += BATCH
        step = position // BATCH
        if step % 5 == 0:
            extra = {"position": position}
            more = step < STEPS  # the last one is not left to a thread
            save_checkpoint(run, model, optimizer, step=step, extra=extra, asynchronous=more)
            print(f"rank {rank}: step {step}, loss {loss.item():.4f}", flush=True)
    sft.cleanup()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
