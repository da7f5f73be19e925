# SPDX-License-Identifier: Apache-2.0
"""Runs that ranks record, each a process."""

import torch
import torch.distributed.fsdp as torch_fsdp
from support.stack import Stack, shard_stack, step

from fullshard.report import recording


def train_fsdp2(folder):
    torch.manual_seed(0)
    model = Stack(2)
    for block in model.blocks:
        torch_fsdp.fully_shard(block)
    _train(torch_fsdp.fully_shard(model), folder)


def train_ours(folder):
    torch.manual_seed(0)
    _train(shard_stack(None, 2), folder)


def _train(model, folder):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(folder, model, optimizer):
        for _ in range(3):
            step(model, optimizer)
            optimizer.zero_grad()
