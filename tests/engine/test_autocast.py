# SPDX-License-Identifier: Apache-2.0
"""`torch.autocast` around sharded models gives bit by bit what it gives in one process.

The reference is one process that takes the ranks' parts of the batch in turn, each in an autocast
context of its own, as ranks do, and sums gradients in rank order.
"""

import pytest
import torch
from support.autocast_training import STEPS, train_sharded, train_split

from fullshard.testing import LocalWorld

WAYS = [
    *(("wrapper", strategy) for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")),
    *(("function", strategy) for strategy in ("FULL_SHARD", "SHARD_GRAD_OP")),
]


def compare(name, runs, **how):
    losses, params = train_split(name, len(runs), **how)
    for step in range(STEPS):
        assert [run[0][step] for run in runs] == losses[step * len(runs) : (step + 1) * len(runs)]
    for _, found in runs:
        for key, expected in params.items():
            assert torch.equal(found[key], expected), key


@pytest.mark.parametrize("name", ["gpt", "nested"])
@pytest.mark.parametrize(("door", "strategy"), WAYS)
def test_around_forward(name, door, strategy):
    for world in (2, 3):
        runs = LocalWorld(world).run(lambda comm: train_sharded(comm, name, door, strategy))
        compare(name, runs)


@pytest.mark.parametrize(("door", "strategy"), WAYS)
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
