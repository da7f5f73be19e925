# SPDX-License-Identifier: Apache-2.0
"""Random models under random options train as one process does; a failure's seed reproduces it.

A sample of 200 seeds, which reaches each branch of the engine that they reach;
``FULLSHARD_TRIALS=full`` takes all.
"""

import random
import threading

import pytest
import torch
from support.beside import grid, params_of
from support.random_models import WIDTH, build
from support.sampling import FULL
from torch.distributed.tensor import Shard

from fullshard.core import layout
from fullshard.testing import LocalWorld
from fullshard.torch import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
    set_prefetch,
)
from fullshard.torch.sharding.settings import require_gradient_sync

STEPS = 3
FOUND_FAULTS = (587, 1133, 2009)  # beyond those that are always tried
RARE_WAYS = (
    *(47, 52, 53, 55, 58, 72, 73, 77, 82, 83, 85, 109, 116, 125, 127, 137, 138, 144, 148, 150, 153),
    *(160, 167, 172, 179, 182, 196),
)
SEEDS = range(200) if FULL else (*range(4), *RARE_WAYS)
SAMPLES = 24  # divides by every world size times micro-batches


def batch(seed, step):
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)


def train(model, seed, rank, size, micro_batches, hold_back):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    share = SAMPLES // size // micro_batches
    at_once = seed % 5 == 2  # all forwards come first
    for step in range(STEPS):
        if seed % 4 == 1:
            change_some(model, random.Random(seed + step))
        mine = batch(seed, step)[rank * SAMPLES // size :][: SAMPLES // size]
        losses = []
        for number in range(micro_batches):
            hold_back(number < micro_batches - 1 and not at_once)
            inputs = mine[number * share :][:share].clone().requires_grad_(seed % 2 == 0)
            losses.append(model(inputs)["y"].square().mean() / micro_batches)
            if not at_once and losses[-1].requires_grad:
                losses.pop().backward()
        for loss in reversed(losses) if seed % 4 else losses:
            if loss.requires_grad:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def change_some(model, choose):
    """Freeze some parameters and thaw others."""
    for _, param in sorted(model.named_parameters()):
        if choose.random() < 0.2:
            param.requires_grad_(not param.requires_grad)


def shard(model, units, comm, choose, align):
    """One of the doors, with options from ``choose``; along dimension 1 where that can be."""
    strategy = choose.choice(["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID"])
    where = comm
    if strategy == "HYBRID":
        inner = choose.choice([n for n in range(1, comm.size + 1) if comm.size % n == 0])
        where = grid(comm, inner)
    offload = choose.random() < 0.2
    if choose.random() < 0.5 and strategy != "NO_SHARD":
        options = (
            {"mesh": where, "offload_policy": CPUOffloadPolicy()} if offload else {"mesh": where}
        )
        options["align"] = align
        slices = where[0].size if strategy == "HYBRID" else comm.size
        if align == "row" and choose.random() < 0.3:
            options["shard_placement_fn"] = lambda param: (
                Shard(1) if param.dim() > 1 and param.shape[1] % slices == 0 else None
            )
        reshard = [True, True, False, *(n for n in range(1, slices + 1) if slices % n == 0)]
        for name in sorted(units, key=lambda name: -name.count(".")):
            module = model.get_submodule(name)
            fully_shard(module, reshard_after_forward=choose.choice(reshard), **options)
        wrapped = fully_shard(model, **options)
    else:
        chosen = {model.get_submodule(name) for name in units}
        strategy = "HYBRID_SHARD" if strategy == "HYBRID" else strategy
        wrapped = FullyShardedDataParallel(
            model,
            where,
            ShardingStrategy[strategy],
            CPUOffload(offload, choose.random() < 0.2),
            auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or module in chosen,
            align=align,
        )
        wrapped.set_requires_gradient_sync = lambda sync: require_gradient_sync(wrapped, sync)
    set_prefetch(wrapped, choose.randrange(3), choose.randrange(3))
    return wrapped


@pytest.mark.parametrize("seed", [*SEEDS, *FOUND_FAULTS])
def test_random_model(seed, monkeypatch):
    monkeypatch.setattr(layout, "PACKED_BYTES", (0, 400, 2**15)[seed % 3])
    plain, _ = build(seed)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    micro_batches = 1 + seed % 3 % 2
    try:
        train(plain, seed, 0, 1, micro_batches, lambda _: None)
    except RuntimeError as error:
        pytest.skip(f"torch itself refuses this model: {error}")
    building = threading.Lock()
    world = 1 + seed % 4

    def body(comm):
        with building:
            model, units = build(seed)
        model.load_state_dict(state)
        align = "element" if seed % 7 % 3 == 0 else "row"
        model = shard(model, units, comm, random.Random(seed + 1), align)
        train(
            model,
            seed,
            comm.rank,
            comm.size,
            micro_batches,
            lambda held: model.set_requires_gradient_sync(not held),
        )
        return params_of(model)

    for found in LocalWorld(world, eager=seed % 5 == 0).run(body):
        torch.testing.assert_close(found, params_of(plain), rtol=1e-4, atol=1e-5)
