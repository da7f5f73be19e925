# SPDX-License-Identifier: Apache-2.0
"""The planner's ops, unit buffers and model state are the engine's: op by op, to the byte."""

from dataclasses import astuple

import pytest
import torch
import torch.distributed as dist
from support.models import GPT
from support.planned_engine import (
    DEVICE,
    LINK,
    Configuration,
    carried_out,
    planned,
    steps_of_random_model,
)
from support.planned_workers import prices_of_units
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard.core.strategy import Precision
from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.measured import MeasuredModel
from fullshard.plan.run import Run
from fullshard.plan.step.units import units_of
from fullshard.testing import LocalWorld
from fullshard.torch.comm.process_group import ProcessGroupComm
from fullshard.torch.measuring import record_step


def compare(configuration, found, expected, rank):
    traces, rest = found
    planned_traces, resting = expected
    assert traces == planned_traces, configuration
    mine = resting[rank % len(resting)]
    state = (mine.parameters_bytes, mine.gradients_bytes, mine.optimizer_bytes)
    assert (rest.parameters_bytes, rest.gradients_bytes, rest.optimizer_bytes) == state


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
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


# Reentrant checkpoints and calls whose output is thrown away, at which planner and engine differed.
ODD_MODELS = (3, 12, 60, 114, 125, 138, 150, 153, 154, 156, 196, 209, 228, 257, 266)


@pytest.mark.parametrize("seed", sorted({*range(0, 258, 30), *ODD_MODELS}))
def test_steps_of_random_models_are_the_engines(seed):
    """All of the first 900 seeds agree but those that torch itself refuses, as tried by hand."""
    steps = steps_of_random_model(seed, world=2)
    if steps is None:
        pytest.skip("torch itself refuses this model")
    trace_planned, traces = steps
    for trace in traces:
        assert trace == trace_planned


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


@pytest.mark.parametrize(
    ("compute", "reduce"), [(None, None), (torch.bfloat16, torch.float32)], ids=["fp32", "mixed"]
)
def test_prices_on_gloo_with_what_its_reduces_receive(gloo_world, compute, reduce):
    names = [
        None if each is None else str(each).removeprefix("torch.") for each in (compute, reduce)
    ]
    recording = record_step(GPT(), [torch.zeros(2, 6, dtype=torch.long)])
    model = MeasuredModel.of("gpt", recording, ["blocks.0", "blocks.1"])
    run = Run(precision=Precision(*names), align="row")
    units = units_of(model, run, Cluster(DEVICE, 2, 2, LINK, LINK))
    planned_prices = [(unit.path or "(root)", astuple(unit.cost)) for unit in units]
    assert all(unit.cost.scratch_bytes == unit.cost.grad_full_bytes // 2 > 0 for unit in units)
    for found in gloo_world.run(2, prices_of_units, compute, reduce):
        assert found == planned_prices
