# SPDX-License-Identifier: Apache-2.0
"""`torch.autocast` around sharded models gives bit by bit what it gives in one process.

The reference is one process that takes the ranks' parts of the batch in turn, each in an autocast
context of its own, as ranks do, and sums gradients in rank order.
"""

import contextlib
from functools import cache

import pytest
import torch
from support.beside import params_of
from support.models import CASES, loss_of, make, make_batches, place_of
from support.training import shard
from torch.utils.checkpoint import checkpoint

from fullshard.testing import LocalWorld
from fullshard.torch.comm.protocol import rank_order_sum

STEPS = 3


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
    return losses, params_of(model)


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
    return losses, params_of(model)


WAYS = [
    *(("wrapper", strategy) for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")),
    *(("function", strategy) for strategy in ("FULL_SHARD", "SHARD_GRAD_OP")),
]


def compare(name, runs, **how):
    losses, params = train_split(name, len(runs), **how)
    for step in range(STEPS):
        assert [run[0][step] for run in runs] == losses[step * len(runs) : (step + 1) * len(runs)]
    for _, found in runs:
        torch.testing.assert_close(found, params, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gpt", "nested"])
@pytest.mark.parametrize(("door", "strategy"), WAYS)
def test_around_forward(name, door, strategy):
    compare(name, LocalWorld(3).run(lambda comm: train_sharded(comm, name, door, strategy)))


@pytest.mark.parametrize(("door", "strategy"), [WAYS[0], WAYS[-1]])
def test_a_module_called_twice_shares_one_cast(gloo_world, door, strategy):
    """Its gradients meet in bf16. In processes: threads share, and empty, one cache of casts."""
    compare("twice", gloo_world.run(2, train_sharded, "twice", door, strategy))


@pytest.mark.parametrize("checkpointing", ["reentrant", "not reentrant"])
@pytest.mark.parametrize(("door", "strategy"), WAYS)
def test_with_checkpointing(gloo_world, door, strategy, checkpointing):
    """Units are gathered a second time inside the recomputation's own context.

    In processes: once in some hundred runs a thread met the cast of an old weight in their cache.
    """
    how = {"checkpointing": checkpointing}
    compare("gpt", gloo_world.run(2, train_sharded, "gpt", door, strategy, **how), **how)


@pytest.mark.parametrize("cached", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize(("door", "strategy"), WAYS)
def test_around_whole_training(door, strategy, cached):
    """With its cache autocast computes with the casts of old weights after a step, in torch too."""
    how = {"around": "training", "cached": cached}
    runs = LocalWorld(2).run(lambda comm: train_sharded(comm, "gpt", door, strategy, **how))
    compare("gpt", runs, **how)


def test_the_cache_of_one_context_is_not_seen_by_the_next():
    """And the reference does see a difference where there is one."""
    fresh, _ = train_split("gpt", 2)
    stale, _ = train_split("gpt", 2, around="training")
    assert fresh[:2] == stale[:2]
    assert fresh[2:] != stale[2:]
