# SPDX-License-Identifier: Apache-2.0
"""The planner's ops, unit buffers and model state are the engine's: op by op, to the byte."""

import pytest
import torch.distributed as dist
from support.planned_engine import Configuration, carried_out, planned
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard.testing import LocalWorld
from fullshard.torch.comm.process_group import ProcessGroupComm


def compare(configuration, found, expected, rank):
    traces, rest = found
    planned_traces, resting = expected
    assert traces == planned_traces, configuration
    mine = resting[rank % len(resting)]
    state = (mine.parameters_bytes, mine.gradients_bytes, mine.optimizer_bytes)
    assert (rest.parameters_bytes, rest.gradients_bytes, rest.optimizer_bytes) == state


@pytest.mark.parametrize("seed", range(44))
def test_random_configurations_on_ranks_as_threads(seed):
    configuration = Configuration.random(seed, list(range(1, 9)))
    expected = planned(configuration)
    run, world = configuration.run, configuration.world

    def where(comm):
        if not (run.strategy.sharding.sharded and run.strategy.sharding.replicated):
            return comm
        shards = world // run.replicas
        first = comm.rank // shards * shards
        within = comm.subgroup(range(first, first + shards))
        return within, comm.subgroup(range(comm.rank % shards, world, shards))

    found = LocalWorld(world).run(lambda comm: carried_out(configuration, where(comm)))
    shards = len(expected[1])
    for rank, each in enumerate(found):
        compare(configuration, each, expected, rank % shards)


@pytest.mark.parametrize("seed", range(100, 106))
def test_random_configurations_among_64_and_1024_ranks(seed):
    configuration = Configuration.random(seed, [64, 1024])
    expected = planned(configuration)
    run, world = configuration.run, configuration.world
    rank = seed * 7 % world
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        where = dist.group.WORLD
        if run.strategy.sharding.sharded and run.strategy.sharding.replicated:
            shards = world // run.replicas
            first = rank // shards * shards
            within = dist.new_group(list(range(first, first + shards)))
            across = dist.new_group(list(range(rank % shards, world, shards)))
            where = ProcessGroupComm(within), ProcessGroupComm(across)
        found = carried_out(configuration, where)
    finally:
        dist.destroy_process_group()
    compare(configuration, found, expected, rank % len(expected[1]))
