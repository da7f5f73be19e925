# SPDX-License-Identifier: Apache-2.0
"""Training under `torch.autocast`: sharded, and in one process that sums as ranks do."""

import contextlib
from functools import cache

import torch
from support.models import CASES, loss_of, make, make_batches, place_of
from support.training import shard
from torch.utils.checkpoint import checkpoint

from fullshard.torch.comm.protocol import rank_order_sum

STEPS = 4


def autocast(cache_enabled=True):
    return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache_enabled)


def built(name, checkpointing):
    """The case's model; with ``checkpointing`` the GPT's blocks are recomputed in backward."""
    model = make(name)
    if checkpointing is not None:
        reentrant = checkpointing == "reentrant"
        for path in CASES[name].units:
            run_again(model.get_submodule(path), reentrant)
    return model


def run_again(block, reentrant):
    forward = block.forward
    block.forward = lambda x: checkpoint(forward, x, use_reentrant=reentrant)


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@cache
def train_split(name, world, *, checkpointing=None, around="forward", cached=True):
    """Losses of each rank and step, and the parameters in the end, of one process."""
    model = built(name, checkpointing)
    optimizer = optimizer_of(model)
    ranks = [slice(2 * rank, 2 * rank + 2) for rank in range(world)]
    losses = []
    with autocast(cached) if around == "training" else contextlib.nullcontext():
        for inputs, targets in make_batches(name, STEPS, 2 * world):
            grads = []
            for part in ranks:
                with autocast(cached) if around == "forward" else contextlib.nullcontext():
                    loss = loss_of(model(inputs[part]), targets[part])
                loss.backward()
                grads.append([p.grad for p in model.parameters()])
                optimizer.zero_grad()
                losses.append(loss.item())
            for param, parts in zip(model.parameters(), zip(*grads, strict=True), strict=True):
                param.grad = torch.empty_like(param)
                rank_order_sum(parts, param.grad)
                param.grad.div_(world)
            optimizer.step()
            optimizer.zero_grad()
    return losses, {key: p.detach() for key, p in model.named_parameters()}


def train_sharded(comm, name, door, strategy, *, checkpointing=None, around="forward", cached=True):
    model = shard(built(name, checkpointing), name, comm, strategy, door)
    optimizer = optimizer_of(model)
    rank, size = place_of(comm)
    part = slice(2 * rank, 2 * rank + 2)
    losses = []
    with autocast(cached) if around == "training" else contextlib.nullcontext():
        for inputs, targets in make_batches(name, STEPS, 2 * size):
            with autocast(cached) if around == "forward" else contextlib.nullcontext():
                loss = loss_of(model(inputs[part]), targets[part])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, {key: p.detach().full_tensor() for key, p in model.named_parameters()}
