# SPDX-License-Identifier: Apache-2.0
"""A script that starts its ranks itself, in the manner of the first FSDP tutorial."""

import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn, optim
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.fc1, self.fc2 = nn.Linear(4 * 9, 30), nn.Linear(30, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x.flatten(1)))), dim=1)


def fsdp_main(rank, world_size, args):
    setup(rank, world_size, args.port)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = torch.randn(60, 1, 8, 8)
    data = TensorDataset(images, images.sum((1, 2, 3)).abs().long() % 5)
    sampler = DistributedSampler(data, rank=rank, num_replicas=world_size, shuffle=True)
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=500)
    model = FSDP(Net(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for pixels, labels in loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(pixels), labels, reduction="sum")
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item(), float(len(pixels))])
        dist.all_reduce(sums)
        scheduler.step()
        if rank == 0:
            print(f"epoch {epoch} loss {sums[0] / sums[1]:.8f}", flush=True)
    if rank == 0:
        print(type(model), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=12355)
    args = parser.parse_args()
    mp.spawn(fsdp_main, args=(2, args), nprocs=2, join=True)
