# SPDX-License-Identifier: Apache-2.0
"""Compiled parts in state dicts, and DTensors put into a summoned model, on Gloo."""

import torch
from support.models import seeded
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fullshard.torch import FullyShardedDataParallel, fully_shard, summon_full_params


def net():
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))


def shard(group, model, door, align):
    if door == "wrapper":
        return FullyShardedDataParallel(model, group, align=align)
    return fully_shard(model, mesh=group, align=align)


def compiled_state(group, align, whole):
    """Names of what `get_state_dict` gives of a compiled model, and what comes back of it."""
    model = net()
    if whole:
        model = torch.compile(model, backend="eager")
    else:
        model[0] = torch.compile(model[0], backend="eager")
    model = shard(group, model, "function", align)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    moments = [state["state"][name]["exp_avg"].full_tensor() for name in sorted(state["state"])]
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    again = get_state_dict(model, optimizer)[1]["state"]
    alike = all(
        torch.equal(again[name]["exp_avg"].full_tensor(), moment)
        for name, moment in zip(sorted(again), moments, strict=True)
    )
    return sorted(weights), sorted(state["state"]), alike


def dtensors_put_into_summoned(group, door, align):
    """True if what was put in the place of summoned parameters is in the model afterwards."""
    inner = net()
    model = shard(group, inner, door, align)
    mesh = init_device_mesh("cpu", (group.size(),))
    with summon_full_params(model):
        weight = inner[0].weight.detach() * 2
        inner[0].weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
        inner[2].bias = nn.Parameter(inner[2].bias.detach() + 1)
    kept = torch.equal(inner[0].weight.full_tensor(), net()[0].weight * 2)
    kept &= torch.equal(inner[2].bias.full_tensor(), net()[2].bias + 1)
    model(torch.ones(2, 3)).sum().backward()
    return kept
