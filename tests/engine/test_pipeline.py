# SPDX-License-Identifier: Apache-2.0
"""Stages of `torch.distributed.pipelining`, each sharded over its own ranks, as one process."""

from contextlib import ExitStack
from functools import cache

import pytest
import torch
import torch.distributed as dist
from support.beside import grads_of, params_of, shard
from support.models import seeded
from support.stack import LAYERS, WIDTH, Stack, shard_stack
from support.threads import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.pipelining._backward import stage_backward_input
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from fullshard.core.errors import ConfigurationError, NotSupportedError, UsageError
from fullshard.torch import fully_shard, reduce_once, tracing
from fullshard.torch.comm.protocol import SoloComm

STAGES = 2
MICRO_BATCHES = 4
BATCH = 16  # of all data-parallel ranks together
STEPS = 3
LEARNING_RATE = 0.5


def whole():
    return seeded(Stack).double()


def batches():
    generator = torch.Generator().manual_seed(7)
    return [
        [torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]
        for _ in range(STEPS)
    ]


def part_of(model, stage, stages):
    """The blocks of one stage, under the names that they have in the model."""
    each = len(model.blocks) // stages
    for number in range(len(model.blocks)):
        if number // each != stage:
            model.blocks[number] = nn.Identity()
    return model


def train(_group, schedule_class, door, *, once=False):
    """This stage's parameters after some steps, the last stage's mean losses, the last trace."""
    mesh = init_device_mesh("cpu", (STAGES, 2), mesh_dim_names=("pipeline", "data"))
    number, data = mesh.get_local_rank("pipeline"), mesh.get_group("data")
    several = issubclass(schedule_class, PipelineScheduleMulti)  # two stages on each rank
    stages = 2 * STAGES if several else STAGES
    device, group = torch.device("cpu"), mesh.get_group("pipeline")
    parts = {own: part_of(whole(), own, stages) for own in range(number, stages, STAGES)}
    here = [
        PipelineStage(shard(part, data, door, [nn.Sequential]), own, stages, device, group=group)
        for own, part in parts.items()
    ]
    if once:
        for stage in here:
            reduce_once(stage)
    schedule = schedule_class(
        here if several else here[0], MICRO_BATCHES, loss_fn=nn.functional.mse_loss
    )
    model = nn.ModuleList(stage.submod for stage in here)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    step_losses = []
    for inputs, targets in batches():
        half = slice(data.rank() * BATCH // 2, (data.rank() + 1) * BATCH // 2)
        losses = []
        with ExitStack() as traced:
            traces = [traced.enter_context(tracing(stage.submod)) for stage in here]
            if number == 0:
                schedule.step(inputs[half])
            else:
                schedule.step(target=targets[half], losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            mean = torch.stack(losses).detach().mean()
            dist.all_reduce(mean, group=data)
            step_losses.append(mean.item() / 2)
    params = {}
    for stage in here:
        params |= params_of(stage.submod)
    records = [record for trace in traces for record in trace]
    return params, step_losses, [(record.op, record.unit, record.live_bytes) for record in records]


@cache
def in_one_process():
    model, losses = whole(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for inputs, targets in batches():
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, params_of(model)


SCHEDULES = {each.__name__: each for each in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B)}


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("door", ["wrapper", "function"])
def test_two_stages_of_two_ranks(gloo_world, once, schedule, door):
    """Several forwards before a backward; each backward reduces, or the last for all."""
    expected_losses, expected = in_one_process()
    found = {}
    for rank, (params, losses, ops) in enumerate(
        gloo_world.run(4, train, schedule, door, once=once)
    ):
        stage = rank // 2
        assert (not losses) == (stage < STAGES - 1)
        assert losses in ([], pytest.approx(expected_losses, abs=1e-12))
        found.update(params)
        for op, passes in (("gather", 2 * MICRO_BATCHES), ("reduce", 1 if once else MICRO_BATCHES)):
            done = [unit for kind, unit, _ in ops if kind == op]
            assert len(done) <= passes * LAYERS // STAGES
            assert op == "gather" or len(done) == passes * len(set(done))
        assert ops[-1][2] == 0, "nothing stays full when a step is over"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def rows(comm, micro_batch):
    generator = torch.Generator().manual_seed(10 * comm.rank + micro_batch)
    return torch.randn(3, WIDTH, generator=generator)


@on_ranks(3)
def test_what_waits_is_reduced_when_asked_for(comm):
    """With a forward whose backward comes later, and once only."""
    expected, model = (shard_stack(comm) for _ in range(2))
    for other, one in zip(model.parameters(), expected.parameters(), strict=True):
        other.data.copy_(one.data)
    model.set_requires_gradient_sync(False)
    for micro_batch in range(3):
        expected(rows(comm, micro_batch)).square().mean().backward()
        loss = model(rows(comm, micro_batch)).square().mean()
        if micro_batch == 2:
            with tracing(model) as trace:
                model.synchronize_gradients()
            reduced = [record.unit for record in trace if record.op == "reduce"]
            assert sorted(reduced) == [f"blocks.{number}" for number in range(LAYERS)]
        loss.backward()
    assert model.blocks[0][0].weight.grad is not None
    model.synchronize_gradients()
    with tracing(model) as trace:
        model.synchronize_gradients()
    assert not [record.op for record in trace]
    torch.testing.assert_close(grads_of(model), grads_of(expected))


@on_ranks(2)
def test_within_a_forward_nothing_is_reduced(comm):
    model = shard_stack(comm)
    model.blocks[1].register_forward_pre_hook(lambda *_: model.synchronize_gradients())
    with pytest.raises(UsageError, match="between backwards, not in the middle of one"):
        model(rows(comm, 0))


def test_what_is_no_sharded_stage_is_named():
    class Stage:
        def __init__(self, submod):
            self.submod = submod

        def perform_reduce_grad(self, grad_scale_factor): ...

        def scale_grads(self, grad_scale_factor): ...

    with pytest.raises(ConfigurationError, match="needs a PipelineStage of torch"):
        reduce_once(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="Linear holds no unit; shard it first"):
        reduce_once(Stage(nn.Linear(2, 2)))
    stage = Stage(fully_shard(nn.Linear(2, 2), mesh=SoloComm()))
    reduce_once(stage)
    with pytest.raises(UsageError, match="once already"):
        reduce_once(stage)


@pytest.mark.parametrize("parts", [False, True])
def test_a_backward_that_a_schedule_splits_is_refused_by_name(parts):
    """As a root, and where a stage's module only holds units."""
    model = nn.Sequential(fully_shard(nn.Linear(3, 3), mesh=SoloComm()))
    if not parts:
        fully_shard(model, mesh=SoloComm())
    x = torch.ones(2, 3, requires_grad=True)
    out = model(x)
    with pytest.raises(RuntimeError) as caught:
        stage_backward_input([out], [torch.ones_like(out)], [x], model.parameters())
    refused = caught.value.__cause__ or caught.value  # torch 2.11 puts nothing around it
    assert isinstance(refused, NotSupportedError)
    assert "take ScheduleGPipe, Schedule1F1B" in str(refused)
