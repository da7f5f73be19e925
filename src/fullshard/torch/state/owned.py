# SPDX-License-Identifier: Apache-2.0
"""The state of optimizers over whole matrices, which only the owner of a matrix has.

[Note: State of an owner]
What has the shape of its parameter is shown as sharded like it, and is empty on other ranks; the
rest (a step, statistics of rows and columns) is plain. Other ranks hold none of it. Whoever reads
the state of all ranks, as ``optimizer.state_dict()``, first lets the owners tell what there is:
ranks that own nothing then have the empty parts, and a copy of the plain ones until the next step,
tensors of other classes (torchao's in 8 bits) among them.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import (
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

from fullshard.core.errors import NotSupportedError
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.comm.texts import share_bytes
from fullshard.torch.state.apart import steps_apart
from fullshard.torch.state.forms import in_agreed_order
from fullshard.torch.state.tensor_classes import put_together, taken_apart
from fullshard.torch.tensor.ownership import Ownership
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.buffers import dtype_name, dtype_of

NUMBERS = {"step", "mu_product", "mu", "eta"}
"""State that is a number for a parameter, whatever shape that has: of Adam and its kin, NAdam,
ASGD."""

_SPAN, _PLAIN, _VALUE = "span", "plain", "value"
_EXCHANGED = "_fullshard_exchanged"


def exchanged(optimizer: Optimizer) -> dict[Tensor, Ownership]:
    """Return where the state of parameters is that are stepped by owners but cut."""
    places: dict[Tensor, Ownership] = optimizer.__dict__.setdefault(_EXCHANGED, {})
    return places


def place_in(optimizer: Optimizer, param: ShardedParameter) -> Ownership:
    """Return where ``optimizer`` has the state of ``param``: as that is, or with its owner."""
    return exchanged(optimizer).get(param, param.ownership)


def is_cut(value: Any, place: Ownership) -> bool:
    """Return True for state that is not where ``place`` says, as it was loaded."""
    return isinstance(value, ShardedParameter) and not value.ownership.agrees_with(place)


def plain_state(state: Mapping[str, Any], param: ShardedParameter) -> dict[str, Any]:
    """Return the state of a matrix of this rank as one process has it."""
    return {
        name: value.local.view(param.ownership.part_shape)
        if isinstance(value, ShardedParameter)
        else value
        for name, value in state.items()
    }


def shown_state(
    state: Mapping[str, Any], param: ShardedParameter, place: Ownership
) -> dict[str, Any]:
    """Return that state with what has the shape of its parameter sharded as ``place`` says.

    But tensors of other classes, as torchao's in 8 bits, which need not be cut: they stay whole.
    """
    shape = place.part_shape
    return {
        name: ShardedParameter.value(value.detach().reshape(-1), place)
        if type(value) is Tensor and value.shape == shape and name not in NUMBERS
        else value
        for name, value in state.items()
    }


def _owned(optimizer: Optimizer) -> list[ShardedParameter]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    held = [param for param in params if isinstance(param, ShardedParameter)]
    numbered = {
        i: param
        for i, param in enumerate(held)
        if (place := place_in(optimizer, param)).owner is not None
        and not any(is_cut(value, place) for value in optimizer.state.get(param, {}).values())
    }
    if not numbered or not steps_apart(optimizer):
        return []
    return list(in_agreed_order(numbered).values())


def comms_of_owned(optimizer: Optimizer) -> list[Comm]:
    """Return the communicators over which `complete_state` speaks."""
    return list(dict.fromkeys(param.ownership.comm for param in _owned(optimizer)))


def catch_up(optimizer: Optimizer) -> None:
    """Make the optimizer's steps that are put off: see `fullshard.torch.tensor.put_off`."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            _ = getattr(param, "local", None)


def complete_state(optimizer: Optimizer) -> None:
    """Let every rank know the state of the matrices that others own. Collective.

    See [Note: State of an owner]. Raises `NotSupportedError`, on all ranks, for state that is
    neither a tensor, plain or of a class in [Note: Classes that are made from descriptions], nor a
    number or text.
    """
    catch_up(optimizer)
    by_comm: dict[Comm, list[ShardedParameter]] = {}
    for param in _owned(optimizer):
        by_comm.setdefault(param.ownership.comm, []).append(param)
    for comm, params in by_comm.items():
        mine = {
            str(number): _described(optimizer.state[param], param)
            for number, param in enumerate(params)
            if place_in(optimizer, param).owner == comm.rank and optimizer.state.get(param)
        }
        told: dict[str, Any] = {}
        for text in share_bytes(comm, json.dumps(mine).encode(), params[0].device):
            told.update(json.loads(text))
        _check(told.values(), type(optimizer).__name__)
        for number, param in enumerate(params):
            place = place_in(optimizer, param)
            if place.owner != comm.rank:
                optimizer.state.pop(param, None)
                if str(number) in told:
                    optimizer.state[param] = _blank(told[str(number)], param, place)
        _broadcast(comm, optimizer, params, told)
    if by_comm:  # in one order on all ranks: whoever reads it may gather in that
        state = dict(optimizer.state)
        groups = (param for group in optimizer.param_groups for param in group["params"])
        ordered = {param: state.pop(param) for param in groups if param in state}
        optimizer.state.clear()
        optimizer.state.update({**ordered, **state})


def _described(state: Mapping[str, Any], param: ShardedParameter) -> dict[str, Any]:
    """Return what there is: of each value its kind, and what others need to make room for it."""
    leaves, tree = tree_flatten_with_path(dict(state))
    described = [(keystr(path), *_described_value(value, param)) for path, value in leaves]
    try:
        return {"tree": treespec_dumps(tree), "leaves": described}
    except (NotImplementedError, TypeError):  # a container that is not Python's own
        return {"tree": "", "leaves": [("", type(state).__name__)]}


def _described_value(value: Any, param: ShardedParameter) -> list[Any]:
    if isinstance(value, ShardedParameter):
        return [_SPAN, dtype_name(value.dtype)]
    apart = taken_apart(value)
    if apart is not None:
        described, parts = apart
        here = param.device.type
        rooms = [
            [dtype_name(part.dtype), list(part.shape), part.device.type == here]
            for part in parts.values()
        ]
        return [_PLAIN, described, rooms]
    if value is None or isinstance(value, bool | int | float | str):
        return [_VALUE, value]
    return [type(value).__name__]


def _check(described: Iterable[Mapping[str, Any]], kind: str) -> None:
    for state in described:
        for name, what, *_ in state["leaves"]:
            if what not in (_SPAN, _PLAIN, _VALUE):
                raise NotSupportedError(
                    f"the state {name} of {kind} is a {what}, which cannot be told to the ranks "
                    "that do not own its matrix; save it on each rank by yourself, or, for a class "
                    "of tensors with __tensor_flatten__, call torch.serialization.add_safe_globals"
                )


def _blank(
    described: Mapping[str, Any], param: ShardedParameter, place: Ownership
) -> dict[str, Any]:
    """Make room for the state of a matrix of another rank."""
    leaves: list[Any] = []
    for _, what, first, *rest in described["leaves"]:
        if what == _SPAN:
            local = param.local.new_empty(0, dtype=dtype_of(first))
            leaves.append(ShardedParameter.value(local, place))
        elif what == _PLAIN:
            parts = [
                torch.empty(shape, dtype=dtype_of(dtype), device=param.device if here else "cpu")
                for dtype, shape, here in rest[0]
            ]
            leaves.append(put_together(first, parts))
        else:
            leaves.append(first)
    state: dict[str, Any] = tree_unflatten(leaves, treespec_loads(described["tree"]))
    return state


def _broadcast(
    comm: Comm, optimizer: Optimizer, params: list[ShardedParameter], told: Mapping[str, Any]
) -> None:
    """Send plain tensors from their owners to all, those of an owner and a device by one call."""
    for rank in range(comm.size):
        by_device: dict[bool, list[Tensor]] = {}
        for number, param in enumerate(params):
            if place_in(optimizer, param).owner != rank or str(number) not in told:
                continue
            values = tree_leaves(optimizer.state[param])
            for (_, what, *rest), value in zip(told[str(number)]["leaves"], values, strict=True):
                if what == _PLAIN:
                    _, parts = taken_apart(value) or (None, {})
                    for part, (_, _, here) in zip(parts.values(), rest[1], strict=True):
                        by_device.setdefault(here, []).append(part)
        for tensors in by_device.values():
            comm.broadcast(tensors, rank).wait()
