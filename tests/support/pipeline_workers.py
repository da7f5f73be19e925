# SPDX-License-Identifier: Apache-2.0
"""Pipelines whose stages are sharded, run on the four ranks of a `support.world.World`."""

from contextlib import ExitStack

import torch
import torch.distributed as dist
from support.models import seeded
from support.stack import WIDTH, Stack
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from fullshard.torch import FullyShardedDataParallel, fully_shard, reduce_once, tracing

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


def shard(model, group, door):
    units = [block for block in model.blocks if not isinstance(block, nn.Identity)]
    if door == "wrapper":
        return FullyShardedDataParallel(
            model, group, auto_wrap_policy=lambda module, recurse, **_: recurse or module in units
        )
    for block in units:
        fully_shard(block, mesh=group)
    return fully_shard(model, mesh=group)


def train(_group, schedule_class, door, *, once=False):
    """This stage's parameters after some steps, the last stage's mean losses, the last trace."""
    mesh = init_device_mesh("cpu", (STAGES, 2), mesh_dim_names=("pipeline", "data"))
    number, data = mesh.get_local_rank("pipeline"), mesh.get_group("data")
    several = issubclass(schedule_class, PipelineScheduleMulti)  # two stages on each rank
    stages = 2 * STAGES if several else STAGES
    device, group = torch.device("cpu"), mesh.get_group("pipeline")
    here = [
        PipelineStage(
            shard(part_of(whole(), own, stages), data, door), own, stages, device, group=group
        )
        for own in range(number, stages, STAGES)
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
    params = {
        name: param.detach().full_tensor()
        for stage in here
        for name, param in stage.submod.named_parameters()
    }
    records = [record for trace in traces for record in trace]
    return params, step_losses, [(record.op, record.unit, record.live_bytes) for record in records]
