# SPDX-License-Identifier: Apache-2.0
"""Random models under random options train as one process does; a failure's seed reproduces it."""

import random
import threading

import pytest
import torch
from support.random_models import WIDTH, build

from fullshard.torch import FullyShardedDataParallel, ShardingStrategy, fully_shard, set_prefetch
from fullshard.torch.local_world import LocalWorld

STEPS = 3
SAMPLES = 24  # divides by every world size times micro-batches


def batch(seed, step):
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)


def train(model, seed, rank, size, micro_batches, hold_back):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    share = SAMPLES // size // micro_batches
    for step in range(STEPS):
        mine = batch(seed, step)[rank * SAMPLES // size :][: SAMPLES // size]
        for number in range(micro_batches):
            hold_back(number < micro_batches - 1)
            inputs = mine[number * share :][:share].clone().requires_grad_(seed % 2 == 0)
            loss = model(inputs)["y"].square().mean() / micro_batches
            if loss.requires_grad:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def shard(model, units, comm, choose):
    """One of the doors, with options from ``choose``; returns what holds gradients back."""
    strategy = choose.choice(["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
    if choose.random() < 0.5 and strategy != "NO_SHARD":
        for name in sorted(units, key=lambda name: -name.count(".")):
            fully_shard(
                model.get_submodule(name), mesh=comm, reshard_after_forward=choose.random() < 0.7
            )
        wrapped = fully_shard(model, mesh=comm)
    else:
        chosen = {model.get_submodule(name) for name in units}
        wrapped = FullyShardedDataParallel(
            model,
            comm,
            ShardingStrategy[strategy],
            auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or module in chosen,
        )
        wrapped.set_requires_gradient_sync = lambda sync: [
            setattr(m.__dict__["_fullshard_unit"], "requires_gradient_sync", sync)
            for m in FullyShardedDataParallel.fsdp_modules(wrapped)
        ]
    set_prefetch(wrapped, choose.randrange(3), choose.randrange(3))
    return wrapped


def may_tie(seed):
    """Ties across units are for the door that sees all units at once."""
    choose = random.Random(seed + 1)
    strategy = choose.choice(["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
    return not (choose.random() < 0.5 and strategy != "NO_SHARD")


@pytest.mark.parametrize("seed", range(200))
def test_random_model(seed):
    ties = may_tie(seed)
    plain, _ = build(seed, ties=ties)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    micro_batches = 1 + seed % 3 % 2
    train(plain, seed, 0, 1, micro_batches, lambda _: None)
    building = threading.Lock()
    world = 1 + seed % 4

    def body(comm):
        with building:
            model, units = build(seed, ties=ties)
        model.load_state_dict(state)
        model = shard(model, units, comm, random.Random(seed + 1))
        train(
            model,
            seed,
            comm.rank,
            comm.size,
            micro_batches,
            lambda held: model.set_requires_gradient_sync(not held),
        )
        return {name: p.full_tensor().detach() for name, p in model.named_parameters()}

    for found in LocalWorld(world, eager=seed % 5 == 0).run(body):
        for name, param in plain.named_parameters():
            torch.testing.assert_close(found[name], param.detach(), rtol=2e-5, atol=2e-6)
