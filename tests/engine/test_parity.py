# SPDX-License-Identifier: Apache-2.0
"""Sharded training is equal to one process: strategies x worlds x prefetch x models, on threads.

In fp64 against one process that sees the whole batch, to 1e-9. In fp32 bit by bit against one
process that takes the ranks' parts of the batch in turn and sums in rank order, since rounding then
has no freedom left; and losses against the whole batch, as close as rounding allows.
"""

from functools import cache

import pytest
import torch
from support.models import CASES
from support.rounding import rounding
from support.training import mean_losses, train_plain, train_sharded, train_split

from fullshard.testing import LocalWorld

WORLDS = (1, 2, 3, 4, 5, 7, 8)
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")

plain = cache(train_plain)
split = cache(train_split)


def compare(name, dtype, runs):
    world = len(runs)
    whole = plain(name, dtype, world)
    for updates, (loss, expected) in enumerate(zip(mean_losses(runs), whole.losses, strict=True)):
        assert loss == pytest.approx(expected, abs=1e-9, rel=rounding(updates, dtype, dtype))
    assert len({tuple(run.norms) for run in runs}) == 1, "every rank must see the same norms"
    if dtype is torch.float64:
        assert runs[0].norms == pytest.approx(whole.norms, abs=1e-9)
        torch.testing.assert_close(runs[0].params, whole.params, rtol=0, atol=1e-9)
        return
    reference = split(name, dtype, world)
    assert runs[0].norms == reference.norms
    torch.testing.assert_close(runs[0].params, reference.params, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("world", WORLDS)
def test_wrapper_door(dtype, name, strategy, prefetch, world):
    runs = LocalWorld(world).run(
        lambda comm: train_sharded(comm, name, dtype, strategy=strategy, prefetch=prefetch)
    )
    compare(name, dtype, runs)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("eager", [False, True], ids=["late", "eager"])
@pytest.mark.parametrize("world", [2, 3])
def test_function_door(name, strategy, eager, world):
    runs = LocalWorld(world, eager=eager).run(
        lambda comm: train_sharded(comm, name, torch.float32, strategy=strategy, door="function")
    )
    compare(name, torch.float32, runs)


@pytest.mark.parametrize(
    ("world", "name", "how"),
    [
        (2, "gpt", {"door": "wrapper", "strategy": "NO_SHARD"}),
        (3, "odd", {"door": "wrapper", "strategy": "SHARD_GRAD_OP"}),
        (4, "nested", {"door": "function"}),
    ],
)
def test_gloo_processes(gloo_world, world, name, how):
    runs = gloo_world.run(world, train_sharded, name, torch.float32, **how)
    compare(name, torch.float32, runs)
