# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on ranks that are processes of a Gloo world."""

import torch
from support.models import GPT
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fullshard.torch import (
    FullyShardedDataParallel,
    fully_shard,
    load_checkpoint,
    save_checkpoint,
)


def _model(group, seed, kind):
    torch.manual_seed(seed)
    model = GPT()
    if kind == "wrapper":
        return FullyShardedDataParallel(model, group)
    mesh = init_device_mesh("cpu", (group.size(),)) if group.size() == 4 else None
    for block in model.blocks:
        fully_shard(block, mesh=mesh or group)
    return fully_shard(model, mesh=mesh or group)


def _values(model):
    return {name: p.detach().full_tensor().clone() for name, p in model.named_parameters()}


def save_on(group, path, kind, asynchronous):
    """Save after a step; the values at that time, and how long the call took."""
    model = _model(group, 0, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(6).view(1, 6)).sum().backward()
    optimizer.step()
    saving = save_checkpoint(path, model, optimizer, step=1, asynchronous=asynchronous)
    held = _values(model)
    for _ in range(3):  # collectives of training beside those of the save
        optimizer.step()
    saving.wait()
    return held


def load_on(group, path, kind):
    model = _model(group, 1, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.7)
    loaded = load_checkpoint(path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert loaded.restore_random_state() or loaded.world < group.size()
    return _values(model)


def alone(group, path):
    """Rank 1 calls alone while rank 0 runs forward: it is told, and both can go on."""
    model = _model(group, 0, "wrapper")
    text = ""
    if group.rank() == 1:
        try:
            save_checkpoint(path, model, step=1)
        except RuntimeError as error:
            text = str(error)
    model(torch.arange(6).view(1, 6))
    save_checkpoint(path, model, step=2)
    return text


def columns(group, path, saved):
    """A plain module of DTensors cut by columns, saved; or loaded into rows."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    torch.manual_seed(0 if saved else 1)
    full = torch.randn(7, 9)
    model = nn.Linear(9, 7, bias=False)
    placement = Shard(1 if saved else 0)
    model.weight = nn.Parameter(distribute_tensor(full, mesh, [placement]))
    assert isinstance(model.weight, DTensor)
    if saved:
        save_checkpoint(path, model, step=1)
    else:
        load_checkpoint(path, model)
    return model.weight.full_tensor().detach()


def cut_twice(group, path, align):
    """Save a model cut along a tensor axis, then sharded; its values after a step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 6))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"], align=align)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    save_checkpoint(path, model, optimizer, step=1)
    return _values(model)
