# SPDX-License-Identifier: Apache-2.0
"""Training that survives kill -9: start it again, on as many ranks as you like.

torchrun --nproc-per-node 2 --max-restarts 3 examples/survive.py RUN_FOLDER
"""

import sys

import torch
from torch import nn

import fullshard as sft
from fullshard.torch import FullyShardedDataParallel as FSDP
from fullshard.torch import Keep, RunFolder, load_checkpoint, save_checkpoint

STEPS, BATCH = 60, 12  # of a step, over all ranks together

sft.initialize_distributed_training()
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
run = RunFolder(sys.argv[1], keep=Keep(last=2))
torch.manual_seed(0)
model = FSDP(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
position = 0  # the samples that were used: all there is to know of the data
if loaded := load_checkpoint(run, model, optimizer, fallback=True, if_any=True):
    position = loaded.extra["position"]
for step in range(position // BATCH + 1, STEPS + 1):
    samples = torch.arange((step - 1) * BATCH, step * BATCH).chunk(world)[rank]
    inputs = torch.sin(samples[:, None] * torch.arange(1.0, 9.0))  # stands for reading samples
    loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0:
        extra, aside = {"position": step * BATCH}, step < STEPS  # the last one not by a thread
        save_checkpoint(run, model, optimizer, step=step, extra=extra, asynchronous=aside)
        print(f"rank {rank}: step {step}, loss {loss.item():.4f}", flush=True)
sft.cleanup()
