# SPDX-License-Identifier: Apache-2.0
"""Training steps: sharded over ranks, in one process, and in one that sums as ranks do."""

from dataclasses import dataclass

import torch
from support import beside
from support.beside import params_of
from support.models import CASES, loss_of, make, make_batches, place_of
from torch import nn

from fullshard.torch import ShardingStrategy, set_prefetch
from fullshard.torch.comm.protocol import rank_order_sum

STEPS = 5
MAX_NORM = 0.25
LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class Run:
    losses: list[float]
    norms: list[float]
    params: dict[str, torch.Tensor]


def shard(model, name, comm, strategy="FULL_SHARD", door="wrapper", prefetch=1):
    """Shard ``model`` over the ranks of ``comm`` (a Comm or process group) by one of the doors."""
    if door == "wrapper":
        options = {"sharding_strategy": ShardingStrategy[strategy]}
    else:
        options = {"reshard_after_forward": None if strategy == "FULL_SHARD" else False}
    wrapped = beside.shard(model, comm, door, CASES[name].units, **options)
    set_prefetch(wrapped, prefetch, prefetch)
    return wrapped


def train_sharded(comm, name, dtype, **how):
    """Train on this rank's part of the batches; losses are averaged over the ranks."""
    model = shard(make(name, dtype), name, comm, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, norms = [], []
    rank, size = place_of(comm)
    for inputs, targets in make_batches(name, STEPS, 2 * size, dtype):
        part = slice(2 * rank, 2 * rank + 2)
        loss = loss_of(model(inputs[part]), targets[part])
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, norms, params_of(model))


def mean_losses(runs):
    """Losses averaged over ranks, step by step."""
    return [sum(losses) / len(runs) for losses in zip(*(run.losses for run in runs), strict=True)]


def train_plain(name, dtype, world):
    """One process, the whole batch at once, torch's own everything."""
    model = make(name, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, norms = [], []
    for inputs, targets in make_batches(name, STEPS, 2 * world, dtype):
        loss = loss_of(model(inputs), targets)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, norms, params_of(model))


def train_split(name, dtype, world):
    """One process that takes each rank's part of the batch in turn and sums in rank order."""
    model = make(name, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, norms = [], []
    for inputs, targets in make_batches(name, STEPS, 2 * world, dtype):
        parts, step_losses = [], []
        for rank in range(world):
            part = slice(2 * rank, 2 * rank + 2)
            loss = loss_of(model(inputs[part]), targets[part])
            params = list(model.parameters())
            grads = torch.autograd.grad(loss, params, allow_unused=True)
            grads = [
                torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)
            ]
            parts.append(grads)
            step_losses.append(loss.item())
        for param, grads in zip(model.parameters(), zip(*parts, strict=True), strict=True):
            param.grad = torch.empty_like(param)
            rank_order_sum(grads, param.grad)
            param.grad.div_(world)
        norms.append(_clip(model).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(step_losses) / world)
    return Run(losses, norms, params_of(model))


def _clip(model):
    """Do what clip_grad_norm_ does, with norms that are taken in fp64 and rounded once."""
    norms = [torch.linalg.vector_norm(p.grad.double()).to(p.dtype) for p in model.parameters()]
    total = torch.linalg.vector_norm(torch.stack(norms).double()).to(norms[0].dtype)
    scale = torch.clamp(MAX_NORM / (total + 1e-6), max=1.0)
    for param in model.parameters():
        param.grad.mul_(scale)
    return total
