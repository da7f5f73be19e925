# SPDX-License-Identifier: Apache-2.0
"""Sharded training is equal to one process: strategies x worlds x prefetch x models, on threads.

In fp64 against one process that sees the whole batch, to 1e-9. In fp32 bit by bit against one
process that takes the ranks' parts of the batch in turn and sums in rank order, since rounding then
has no freedom left; and losses against the whole batch, to 1e-6.
"""

from functools import cache

import pytest
import torch
from support.models import CASES
from support.training import mean_losses, train_plain, train_sharded, train_split

from fullshard.torch.comm.local_world import LocalWorld

WORLDS = (1, 2, 3, 4, 5, 7, 8)
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")

plain = cache(train_plain)
split = cache(train_split)


def compare(name, dtype, runs, *, sharded):
    world = len(runs)
    whole = plain(name, dtype, world)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-6, torch.bfloat16: 3e-2}[dtype]
    assert mean_losses(runs) == pytest.approx(whole.losses, abs=tolerance)
    assert len({tuple(run.norms) for run in runs}) == 1, "every rank must see the same norms"
    if dtype is torch.float64:
        assert runs[0].norms == pytest.approx(whole.norms, abs=1e-9)
        assert runs[0].params.keys() == whole.params.keys()
        for key, expected in whole.params.items():
            torch.testing.assert_close(runs[0].params[key], expected, rtol=0, atol=1e-9)
        return
    reference = split(name, dtype, world, sharded)
    assert runs[0].norms == reference.norms
    for key, expected in reference.params.items():
        assert torch.equal(runs[0].params[key], expected), key


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_wrapper_door(dtype, name, strategy, prefetch):
    for world in WORLDS:
        runs = LocalWorld(world).run(
            lambda comm: train_sharded(comm, name, dtype, strategy=strategy, prefetch=prefetch)
        )
        compare(name, dtype, runs, sharded=strategy != "NO_SHARD")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["gpt", "nested"])
def test_bf16_parameters(name, strategy):
    """Bit by bit too: reduces add in fp32 and round once, as the reference does."""
    for world in (1, 2, 3, 5):
        runs = LocalWorld(world).run(
            lambda comm: train_sharded(comm, name, torch.bfloat16, strategy=strategy)
        )
        compare(name, torch.bfloat16, runs, sharded=strategy != "NO_SHARD")


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("eager", [False, True], ids=["late", "eager"])
def test_function_door(name, strategy, eager):
    for world in (2, 3):
        runs = LocalWorld(world, eager=eager).run(
            lambda comm: train_sharded(
                comm, name, torch.float32, strategy=strategy, door="function"
            )
        )
        compare(name, torch.float32, runs, sharded=True)


@pytest.mark.parametrize("door", ["wrapper", "function"])
@pytest.mark.parametrize("name", ["gpt", "nested", "odd"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_gloo_processes(gloo_world, world, name, door):
    runs = gloo_world.run(world, train_sharded, name, torch.float32, door=door)
    compare(name, torch.float32, runs, sharded=True)


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_gloo_processes_with_other_strategies(gloo_world, world, strategy):
    runs = gloo_world.run(world, train_sharded, "gpt", torch.float64, strategy=strategy)
    compare("gpt", torch.float64, runs, sharded=strategy != "NO_SHARD")
