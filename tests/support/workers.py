# SPDX-License-Identifier: Apache-2.0
"""Functions that tests run on the ranks of a `support.gloo_world.GlooWorld`."""

import torch
import torch.distributed as dist
from support.stack import WIDTH, shard_stack
from torch.distributed.device_mesh import init_device_mesh

from fullshard.torch import fully_shard
from fullshard.torch.comm import ProcessGroupComm


def collectives_on_group(group):
    return collectives(ProcessGroupComm(group))


def collectives(comm):
    """One of each, with values that tell the ranks apart."""
    full, shard = torch.empty(2 * comm.size), torch.tensor([1.0, 2.0]) + 10 * comm.rank
    comm.all_gather([(full, shard)]).wait()
    part = torch.empty(2)
    comm.duplicate().reduce_scatter([(part, full)]).wait()
    extremes = [torch.tensor(float(comm.rank)), torch.tensor(-float(comm.rank))]
    comm.all_reduce(extremes, "max").wait()
    sent = torch.tensor([comm.rank])
    comm.broadcast([sent], source=comm.size - 1).wait()
    return full.tolist(), part.tolist(), [e.item() for e in extremes], sent.item()


def copies_in_forward(group):
    """How many elements were copied in a forward under the profiler, op by op."""
    model = shard_stack(group)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.no_grad(), torch.profiler.profile(activities=cpu, record_shapes=True) as profile:
        model(torch.ones(2, WIDTH))
    return [
        torch.Size(event.input_shapes[0]).numel()
        for event in profile.events()
        if event.name in ("aten::copy_", "aten::clone", "aten::cat", "aten::_to_copy")
    ]


def meshes(group):
    """What `ShardedParameter.device_mesh` is for each way to name the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if group.size() == 4 else None
    found = []
    for where in (group, mesh):
        model = fully_shard(torch.nn.Linear(3, 5), mesh=where)
        model(torch.ones(1, 3)).sum().backward()
        shown = model.weight.device_mesh
        found.append((shown is mesh, tuple(shown.mesh.tolist())))
    return found
