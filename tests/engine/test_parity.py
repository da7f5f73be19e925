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
from support.sampling import pairwise
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


@pytest.mark.parametrize(
    ("dtype", "name", "strategy", "prefetch", "world"),
    pairwise(
        {"fp64": torch.float64, "fp32": torch.float32}, [*CASES], STRATEGIES, (0, 1, 2), WORLDS
    ),
)
def test_wrapper_door(dtype, name, strategy, prefetch, world):
    runs = LocalWorld(world).run(
        lambda comm: train_sharded(comm, name, dtype, strategy=strategy, prefetch=prefetch)
    )
    compare(name, dtype, runs)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["gpt", "nested"])
def test_bf16_parameters(name, strategy):
    """Bit by bit too: reduces add in fp32 and round once, as the reference does."""
    for world in (2, 3):
        runs = LocalWorld(world).run(
            lambda comm: train_sharded(comm, name, torch.bfloat16, strategy=strategy)
        )
        compare(name, torch.bfloat16, runs)


@pytest.mark.parametrize(
    ("name", "strategy", "eager", "world"),
    pairwise([*CASES], ("FULL_SHARD", "SHARD_GRAD_OP"), {"late": False, "eager": True}, (2, 3)),
)
def test_function_door(name, strategy, eager, world):
    runs = LocalWorld(world, eager=eager).run(
        lambda comm: train_sharded(comm, name, torch.float32, strategy=strategy, door="function")
    )
    compare(name, torch.float32, runs)


@pytest.mark.parametrize(
    ("world", "name", "door"),
    pairwise((2, 3, 4), ("gpt", "nested", "odd"), ("wrapper", "function")),
)
def test_gloo_processes(gloo_world, world, name, door):
    runs = gloo_world.run(world, train_sharded, name, torch.float32, door=door)
    compare(name, torch.float32, runs)


@pytest.mark.parametrize(("world", "strategy"), [(2, "NO_SHARD"), (3, "SHARD_GRAD_OP")])
def test_gloo_processes_with_other_strategies(gloo_world, world, strategy):
    runs = gloo_world.run(world, train_sharded, "gpt", torch.float64, strategy=strategy)
    compare("gpt", torch.float64, runs)
