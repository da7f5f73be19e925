# SPDX-License-Identifier: Apache-2.0
"""Functions that tests run on the ranks of a `support.world.World`."""

import os
import warnings

import torch
import torch.distributed as dist
from support.stack import WIDTH, shard_stack
from torch.distributed.device_mesh import init_device_mesh

from fullshard.torch import (
    DataParallelMeshDims,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)
from fullshard.torch.comm.process_group import ProcessGroupComm
from fullshard.torch.comm.uneven_inputs import any_rank, pad_to_longest, stop_together
from fullshard.torch.step.managed import managed_unit_of


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
    model = shard_stack(group, align="element")
    cpu = [torch.profiler.ProfilerActivity.CPU]
    told = {"activities": cpu, "record_shapes": True, "acc_events": True}
    with torch.no_grad(), torch.profiler.profile(**told) as profile:
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


def ways_to_name_axes(group):
    """For each way: ranks that share slices, replicas, and a gradient averaged over all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "local"))
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    hybrid = ShardingStrategy.HYBRID_SHARD
    found = {}
    for name, shard in {
        "one axis": {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="local")},
        "two axes": {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims("local", "host")},
        "flattened": {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(("host", "local"))},
        "2-D mesh": {"mesh": mesh},
        "wrapper, 2-D mesh": {"device_mesh": mesh, "sharding_strategy": hybrid},
        "wrapper, hosts": {"sharding_strategy": hybrid},
        "wrapper, groups": {
            "process_group": (mesh.get_group(1), mesh.get_group(0)),
            "sharding_strategy": hybrid,
        },
    }.items():
        layer = torch.nn.Linear(5, 3)
        door = FullyShardedDataParallel if name.startswith("wrapper") else fully_shard
        model = door(layer, **shard)
        model(torch.full((1, 5), float(group.rank()))).sum().backward()
        ranks = managed_unit_of(model).unit.ranks
        grad = layer.weight.grad.full_tensor()[0, 0].item()
        found[name] = ranks.gather.size, ranks.replicas.size, grad
    del os.environ["LOCAL_WORLD_SIZE"]
    return found


def turns(group):
    """The last rank has two batches, the others one."""
    last = group.rank() == group.size() - 1
    mine = ["a", "b"] if last else ["a"]
    return (
        list(stop_together(mine, group)),
        list(pad_to_longest(mine, group)),
        any_rank(last, group),
    )


def run_example(_group, page, source):
    """Run an example on a rank; it finds the default process group of the world."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        # torch's own words about DeviceMesh and the like; fullshard's are errors
        warnings.filterwarnings("ignore", module=r"torch\.")
        exec(compile(source, page, "exec"), {"__name__": "__main__"})


def extremes(group):
    comm = ProcessGroupComm(group)
    found = []
    for numel, dtype in ((1, torch.float32), (5, torch.int64), (0, torch.float32)):
        values = torch.arange(numel).add(comm.rank).to(dtype)
        most, least = values.clone(), values.clone()
        comm.all_reduce([most], "max").wait()
        comm.all_reduce([least, values], "min").wait()
        found.append((most.tolist(), least.tolist(), values.tolist()))
    return found
