# SPDX-License-Identifier: Apache-2.0
"""Ranks with values of their own, children that they fork, users' default devices and dtypes."""

import copy
import os
import select

import torch
import torch.distributed as dist
from support.limits import PEERS_S
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from fullshard.torch import FullyShardedDataParallel, any_rank, fully_shard, mark_optional
from fullshard.torch.comm.process_group import ProcessGroupComm


def _in_child(function, timeout_s=PEERS_S):
    """What ``function`` raises in a forked child, as text; None if it does not end in time."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = repr(function())
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], timeout_s)
    answer = os.read(reading, 10_000).decode() if ready else None
    if not ready:
        os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(reading)
    return answer


def forked_children(group):
    """How each way in which a child may communicate ends; the parent can go on after that."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 8), mesh=group)
    weight = model.weight
    ends = {
        "full_tensor": _in_child(weight.full_tensor),
        "norm": _in_child(weight.norm),
        "forward": _in_child(lambda: model(torch.ones(1, 8))),
        "state_dict": _in_child(model.state_dict),
        "new unit": _in_child(lambda: fully_shard(nn.Linear(2, 2), mesh=group)),
        "new communicator": _in_child(lambda: ProcessGroupComm(group)),
        "elementwise": _in_child(lambda: float(weight.detach().mul(0).local.sum())),
    }
    model(torch.ones(1, 8)).sum().backward()
    return ends


def different_values(group, door):
    """The error of ranks of which only the first has loaded something; then with the ways out."""
    torch.manual_seed(0)

    def build():
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        with torch.no_grad():
            model[1].weight.fill_(float(group.rank() == 0))
            model[0].weight.fill_(1.0)
            model[0].bias.fill_(1.0)
            model[1].bias.fill_(1.0)
        return model

    def shard(model, **options):
        if door == "wrapper":
            return FullyShardedDataParallel(model, group, **options)
        return fully_shard(model, mesh=group, **options)

    before = os.environ.get("FULLSHARD_CHECK_VALUES", "1")
    os.environ["FULLSHARD_CHECK_VALUES"] = "1"
    untouched = build()
    try:
        shard(untouched)
        text = None
    except ValueError as error:
        text = str(error)
    assert type(untouched[1].weight) is nn.Parameter
    off = shard(build(), check_values=False)
    os.environ["FULLSHARD_CHECK_VALUES"] = "0"
    try:
        shard(build())
    finally:
        os.environ["FULLSHARD_CHECK_VALUES"] = before
    if door == "wrapper":
        synced = shard(build(), sync_module_states=True)
        assert bool((synced.module[1].weight.full_tensor() == 1).all())
    return text, off.get_parameter("1.weight").detach().full_tensor().tolist()


def converted(group):
    """What a model of DTensors is after it is converted, and its loss beside a plain model's."""
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    for number, param in enumerate(plain.parameters()):
        nn.init.constant_(param, 0.1 * number)
    model = copy.deepcopy(plain)
    mesh = DeviceMesh.from_group(group, "cpu")
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    losses = []
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each.double()
        for _ in range(2):
            loss = each(torch.ones(2, 4, dtype=torch.float64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    told = {
        (isinstance(p, DTensor), p.dtype, p.to_local().dtype, p._spec.tensor_meta.dtype)
        for p in model.parameters()
    }
    return told, *losses


def train_with_another_default_device(group, default):
    """Losses of a model whose calls find a default device on which nothing could be computed."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for number, param in enumerate(model.parameters()):
        nn.init.constant_(param, 0.1 * number)
    x, losses = torch.ones(2, 4), []
    with torch.device(default):
        for module in (*model, model):
            fully_shard(module, mesh=group)
        mark_optional(model[1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            loss = model(x).square().mean()
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            assert any_rank(step == dist.get_rank(group), group) == (step < group.size())
        whole = model[0].weight.full_tensor().tolist()
    return losses, whole
