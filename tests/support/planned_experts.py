# SPDX-License-Identifier: Apache-2.0
"""Stacked experts on an axis of a Gloo world: what their units cost, do and send."""

from dataclasses import astuple

import torch
from support.expert_workers import EXPERTS, WIDTH, SentRows, example
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard.torch import fully_shard, shard_experts, tracing
from fullshard.torch.inspection.forecast import cost_of, named_units


class Node(nn.Module):
    """Modules with the paths and parameters of a description; all are used, in order."""

    def forward(self, x):
        for param in self.parameters(recurse=False):
            x = x + (param.to_local() if isinstance(param, DTensor) else param).sum()
        for child in self.children():
            x = child(x)
        return x


def module_of(params):
    root = Node()
    for name, shape in params:
        *path, leaf = name.split(".")
        place = root
        for part in path:
            if part not in dict(place.named_children()):
                place.add_module(part, Node())
            place = place.get_submodule(part)
        place.register_parameter(leaf, nn.Parameter(torch.ones(shape)))
    return root


def units_and_ops(params, blocks, stacks, experts, shards):
    """The costs of all units, and the ops of a step with the bytes of each."""
    mesh = init_device_mesh("cpu", (shards, experts), mesh_dim_names=("shard", "experts"))
    model = module_of(params)
    for path in stacks:
        shard_experts(model.get_submodule(path), mesh=mesh, experts="experts")
    for path in blocks:
        fully_shard(model.get_submodule(path))
    fully_shard(model)
    costs = {each.name: astuple(cost_of(each.unit)) for each in named_units(model)}
    model(torch.zeros(())).backward()  # in which the order is learned
    with tracing(model) as trace:
        model(torch.zeros(())).backward()
    return costs, [(each.op, each.unit, each.bytes) for each in trace if each.op != "fill"]


def rows_sent(experts, shards):
    """Bytes of rows that this rank sends in a step in which all experts get equally many."""
    mesh = init_device_mesh("cpu", (shards, experts), mesh_dim_names=("shard", "experts"))
    group = mesh.get_group("experts")
    torch.manual_seed(0)
    stack = example()["Experts"](EXPERTS, WIDTH, WIDTH)
    block = example()["MixtureOfExperts"](stack, WIDTH, active=2, count=EXPERTS, group=group)
    block.router = nn.Linear(WIDTH, EXPERTS, bias=False)
    block.router.weight.data = torch.eye(WIDTH) + torch.eye(WIDTH).roll(1, 0) / 2
    shard_experts(stack, mesh=mesh, experts="experts")
    fully_shard(block)
    rows = torch.eye(WIDTH, requires_grad=True)
    with SentRows(group) as sent:
        block(rows).sum().backward()
    return sent.bytes
