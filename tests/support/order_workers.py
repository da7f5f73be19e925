# SPDX-License-Identifier: Apache-2.0
"""Ranks that loop over the user's things in orders of their own."""

import copy
import importlib
import warnings

import pytest
import torch
from support.world import without_warnings
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import fullshard.torch as ours
from fullshard.core.errors import ConfigurationError
from fullshard.torch import FullyShardedDataParallel as FSDP
from fullshard.torch import fully_shard
from fullshard.wrap import ModuleWrapPolicy


def _trained(group, door, seed=0, *, steps=1):
    """A model and an optimizer that has its parameters in an order of this rank's own."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6), nn.Linear(6, 4))
    if door == "wrapper":
        model = FSDP(model, group, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    else:
        for layer in model:
            fully_shard(layer, mesh=group)
        fully_shard(model, mesh=group)
    params = list(model.parameters())
    turned = params[group.rank() :] + params[: group.rank()]
    optimizer = torch.optim.Adam([{"params": [p], "lr": 0.1} for p in turned])
    for step in range(steps):
        model(torch.full((1, 6), 1.0 + step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _plain_state(seed=0):
    """The same in one process, by name."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6), nn.Linear(6, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    return {name: optimizer.state[param] for name, param in model.named_parameters()}


def _assert_right(state):
    for name, expected in _plain_state().items():
        for key in ("exp_avg", "exp_avg_sq"):
            found = state[name][key]
            found = found.full_tensor() if hasattr(found, "full_tensor") else found
            torch.testing.assert_close(found, expected[key])


def fsdp1_states(group):
    model, optimizer = _trained(group, "wrapper")
    _assert_right(FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"])
    _assert_right(FSDP.sharded_optim_state_dict(model, optimizer)["state"])
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        with FSDP.state_dict_type(model, ours.StateDictType[kind]):
            state = FSDP.optim_state_dict(model, optimizer)
            _assert_right(state["state"])
            if group.rank():  # the order in which a rank has the entries does not matter either
                state["state"] = dict(reversed(state["state"].items()))
            other, other_optimizer = _trained(group, "wrapper", seed=1)
            loaded = FSDP.optim_state_dict_to_load(other, other_optimizer, state)
            other_optimizer.load_state_dict(loaded)
            again = FSDP.optim_state_dict(other, other_optimizer)
            _assert_right(again["state"])


def fsdp2_states(group):
    model, optimizer = _trained(group, "function")
    for full in (False, True):
        options = StateDictOptions(full_state_dict=full)
        state = get_optimizer_state_dict(model, optimizer, options=options)
        _assert_right(state["state"])
        other, other_optimizer = _trained(group, "function", seed=1)
        if full:  # PyTorch's function scatters whole tensors in each rank's own order
            with pytest.raises(ConfigurationError, match="would mix them"):
                set_optimizer_state_dict(other, other_optimizer, state, options=options)
            continue
        set_optimizer_state_dict(other, other_optimizer, copy.deepcopy(state), options=options)
        _assert_right(get_optimizer_state_dict(other, other_optimizer)["state"])
    try:
        optimizer.state_dict()
    except ValueError as error:
        return str(error)
    return None


def orders_of_norms(group):
    """Clipping in one call, whatever the order; in calls of which ranks make different ones."""
    model, _ = _trained(group, "function", steps=0)
    model(torch.ones(1, 6)).sum().backward()
    params = list(model.parameters())
    turned = params[group.rank() :] + params[: group.rank()]
    norms = torch._foreach_norm([param.grad for param in turned])
    back = norms[len(norms) - group.rank() :] + norms[: len(norms) - group.rank()]
    total = nn.utils.clip_grad_norm_(turned, 1e9)
    found = {"norms": [float(norm) for norm in back], "total": float(total)}
    by_rank = [params[:2], params[2:]][:: 1 if group.rank() else -1]
    for name, act in {
        "clip": lambda: [nn.utils.clip_grad_norm_(each, 1.0) for each in by_rank],
        "norm": lambda: by_rank[0][0].grad.norm(),
        "sum": lambda: by_rank[0][0].grad.sum(),
        "max": lambda: by_rank[0][0].grad.max(),
        "any": lambda: by_rank[0][0].grad.isnan().any(),
        "state dict": lambda: _partial(by_rank),
    }.items():
        try:
            act()
            found[name] = None
        except (RuntimeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _partial(by_rank):
    optimizer = torch.optim.Adam(by_rank[0], lr=0.0)
    optimizer.step()
    return get_optimizer_state_dict(nn.ParameterList(by_rank[0]), optimizer)


def others_functions(group):
    """PyTorch's `_NamedOptimizer` over both kinds of models, and `replicate` around a unit."""
    optim = without_warnings(importlib.import_module, "torch.distributed.optim")
    for door in ("wrapper", "function"):
        model, _ = _trained(group, door, steps=0)
        named = optim._NamedOptimizer(
            model.named_parameters(), torch.optim.Adam, lr=0.1, module=model
        )
        model(torch.ones(1, 6)).sum().backward()
        named.step()
        state = named.state_dict()
        _assert_right(state["state"])
        other, _ = _trained(group, door, seed=1, steps=0)
        params = other.named_parameters()
        loaded = optim._NamedOptimizer(params, torch.optim.Adam, lr=0.1, module=other)
        loaded.init_state()
        loaded.load_state_dict(state)
        _assert_right(loaded.state_dict()["state"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))
    fully_shard(model[0], mesh=group)
    replicate(model, process_group=group)
    for _ in range(2):
        model(torch.full((1, 6), 1.0 + group.rank())).square().sum().backward()
    return model[0].weight.grad.full_tensor(), model[1].weight.grad


def mesh_of_two_dims(group, named):
    """Train over dim 0 of a 2-D mesh; ranks that differ in dim 1 get other data."""
    names = ("data", "other") if named else None
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    row, column = mesh.get_coordinate()
    torch.manual_seed(0)
    model, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = FSDP(model, device_mesh=mesh)
    model(torch.full((1, 3), 1.0 + row + 10 * column)).sum().backward()
    for other in range(2):
        (plain(torch.full((1, 3), 1.0 + other + 10 * column)).sum() / 2).backward()
    (sharded,) = {param.ownership.comm.size for param in model.parameters()}
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad)
    return sharded, [str(each.message) for each in caught if "2-D" in str(each.message)]
