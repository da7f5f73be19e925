# SPDX-License-Identifier: Apache-2.0
"""A stack of equal blocks, so that memory and ops can be counted in units by hand."""

import torch
from torch import nn

from fullshard.torch import fully_shard

WIDTH = 37
LAYERS = 4


class Stack(nn.Module):
    """Equal blocks, each two linear layers; no parameters of its own."""

    def __init__(self, layers=LAYERS, width=WIDTH):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
            for _ in range(layers)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def shard_stack(comm, layers=LAYERS, **options):
    model = Stack(layers)
    for block in model.blocks:
        fully_shard(block, mesh=comm, **options)
    return fully_shard(model, mesh=comm, **options)


def step(model, optimizer=None):
    model(torch.ones(2, WIDTH)).square().mean().backward()
    if optimizer is not None:
        optimizer.step()
