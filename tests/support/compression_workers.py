# SPDX-License-Identifier: Apache-2.0
"""Training with compressed communication, alike on threads and on processes."""

import torch
from support.models import place_of, seeded
from torch import nn

from fullshard.torch import CommunicationCompression, fully_shard

WIDTH = 64


def stack():
    return seeded(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))))


def shard_stack(comm, compression, **options):
    model = stack()
    for layer in model:
        fully_shard(layer, mesh=comm, compression=compression, **options)
    return fully_shard(model, mesh=comm, compression=compression, **options)


def inputs_of(rank):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))


def train(comm, choice, steps=3, **options):
    """Losses, and the whole parameters afterwards."""
    model = shard_stack(comm, choice, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank, _ = place_of(comm)
    losses = []
    for _ in range(steps):
        loss = model(inputs_of(rank)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach().full_tensor().detach() for name, p in model.named_parameters()}


def train_choices(group, choices):
    """What `train` gives for each set of choices, on a process group."""
    return [train(group, CommunicationCompression(**choice)) for choice in choices]
