# SPDX-License-Identifier: Apache-2.0
"""Training with scaled losses, sharded and in one process, where some gradients are spoilt."""

from dataclasses import dataclass

import torch
from support.models import loss_of, make, make_batches, place_of
from support.training import shard
from torch import nn

from fullshard.torch import ShardedGradScaler

DTYPE = torch.float64
INIT_SCALE = 2.0**10


@dataclass(frozen=True)
class Scaled:
    scales: list[float]
    params: dict[str, torch.Tensor]


def train(model, name, batches, *, spoil, scaler, max_norm=None, **options):
    """One step for each batch, with AdamW; ``spoil(step, model)`` comes before the scaler."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    scales = []
    for step, (inputs, targets) in enumerate(batches):
        scaler.scale(loss_of(model(inputs), targets)).backward()
        spoil(step, model)
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def train_plain(name, steps, world, **how):
    model = make(name, DTYPE)
    scales = train(model, name, make_batches(name, steps, 2 * world, DTYPE), **how)
    return Scaled(scales, {key: p.detach() for key, p in model.named_parameters()})


def train_sharded(comm, name, steps, door="function", **how):
    rank, size = place_of(comm)
    model = shard(make(name, DTYPE), name, comm, door=door)
    part = slice(2 * rank, 2 * rank + 2)
    batches = [(x[part], y[part]) for x, y in make_batches(name, steps, 2 * size, DTYPE)]
    scales = train(model, name, batches, **how)
    return Scaled(scales, {key: p.detach().full_tensor() for key, p in model.named_parameters()})


def found_by_the_last_rank(group):
    """What a scaler over all processes does on each when one of them alone has gradients."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    if group.rank() == group.size() - 1:
        weight.grad = torch.tensor([1.0, float("inf"), 1.0])
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), weight.tolist()


def spoil_nothing(step, model):
    pass
