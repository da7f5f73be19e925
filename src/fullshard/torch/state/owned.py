# SPDX-License-Identifier: Apache-2.0
"""The state of optimizers over whole matrices, which only the owner of a matrix has.

[Note: State of an owner]
What has the shape of its parameter is shown as sharded like it, and is empty on other ranks; the
rest (a step, statistics of rows and columns) is plain. Other ranks hold none of it. Whoever reads
the state of all ranks, as ``optimizer.state_dict()``, first lets the owners tell what there is:
ranks that own nothing then have the empty parts, and a copy of the plain ones until the next step.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fullshard.core.errors import NotSupportedError
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.comm.texts import share_bytes
from fullshard.torch.state.forms import in_agreed_order
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.buffers import dtype_name, dtype_of

__all__ = [
    "NUMBERS",
    "comms_of_owned",
    "complete_state",
    "plain_state",
    "shown_state",
    "steps_apart",
]

NUMBERS = {"step", "mu_product", "mu", "eta"}
"""State that is a number for a parameter, whatever shape that has: of Adam and its kin, NAdam,
ASGD."""

_APART = tuple(getattr(torch.optim, n) for n in ("Adafactor", "Muon") if hasattr(torch.optim, n))

_SPAN, _PLAIN, _VALUE = "span", "plain", "value"


def steps_apart(optimizer: Optimizer) -> bool:
    """Return True if ``optimizer`` treats each matrix apart from the others, as is known of it.

    Torch's own classes, not any of these names: other libraries' Muon gathers by itself, and their
    Lamb clips by one norm, of which each rank would have a part.
    """
    return isinstance(optimizer, _APART)


def plain_state(state: Mapping[str, Any], param: ShardedParameter) -> dict[str, Any]:
    """Return the state of a matrix of this rank as one process has it."""
    return {
        name: value.local.view(param.shape) if isinstance(value, ShardedParameter) else value
        for name, value in state.items()
    }


def shown_state(state: Mapping[str, Any], param: ShardedParameter) -> dict[str, Any]:
    """Return that state with what has the shape of its parameter sharded like it."""
    return {
        name: ShardedParameter.value(value.detach().reshape(-1), param.ownership)
        if isinstance(value, Tensor) and value.shape == param.shape and name not in NUMBERS
        else value
        for name, value in state.items()
    }


def _owned(optimizer: Optimizer) -> list[ShardedParameter]:
    if not steps_apart(optimizer):
        return []
    params = [param for group in optimizer.param_groups for param in group["params"]]
    held = [param for param in params if isinstance(param, ShardedParameter)]
    numbered = {i: param for i, param in enumerate(held) if param.ownership.owner is not None}
    return list(in_agreed_order(numbered).values())


def comms_of_owned(optimizer: Optimizer) -> list[Comm]:
    """Return the communicators over which `complete_state` speaks."""
    return list(dict.fromkeys(param.ownership.comm for param in _owned(optimizer)))


def complete_state(optimizer: Optimizer) -> None:
    """Let every rank know the state of the matrices that others own. Collective.

    See [Note: State of an owner]. Raises `NotSupportedError`, on all ranks, for state that is
    neither a tensor nor a number or text.
    """
    by_comm: dict[Comm, list[ShardedParameter]] = {}
    for param in _owned(optimizer):
        by_comm.setdefault(param.ownership.comm, []).append(param)
    for comm, params in by_comm.items():
        mine = {
            str(number): _described(optimizer.state[param], param)
            for number, param in enumerate(params)
            if param.ownership.owner == comm.rank and optimizer.state.get(param)
        }
        told: dict[str, Any] = {}
        for text in share_bytes(comm, json.dumps(mine).encode(), params[0].device):
            told.update(json.loads(text))
        _check(told.values(), type(optimizer).__name__)
        for number, param in enumerate(params):
            if param.ownership.owner != comm.rank:
                optimizer.state.pop(param, None)
                if str(number) in told:
                    optimizer.state[param] = _blank(told[str(number)], param)
        _broadcast(comm, optimizer, params, told)
    if by_comm:  # in one order on all ranks: whoever reads it may gather in that
        state = dict(optimizer.state)
        groups = (param for group in optimizer.param_groups for param in group["params"])
        ordered = {param: state.pop(param) for param in groups if param in state}
        optimizer.state.clear()
        optimizer.state.update({**ordered, **state})


def _described(state: Mapping[str, Any], param: ShardedParameter) -> dict[str, list[Any]]:
    """Return what there is: of each value its kind, and what others need to make room for it."""
    described: dict[str, list[Any]] = {}
    for name, value in state.items():
        if isinstance(value, ShardedParameter):
            described[name] = [_SPAN, dtype_name(value.dtype)]
        elif isinstance(value, Tensor):
            here = value.device.type == param.device.type
            described[name] = [_PLAIN, dtype_name(value.dtype), list(value.shape), here]
        elif value is None or isinstance(value, bool | int | float | str):
            described[name] = [_VALUE, value]
        else:
            described[name] = [type(value).__name__]
    return described


def _check(described: Iterable[Mapping[str, list[Any]]], kind: str) -> None:
    for state in described:
        for name, (what, *_) in state.items():
            if what not in (_SPAN, _PLAIN, _VALUE):
                raise NotSupportedError(
                    f"the state {name!r} of {kind} is a {what}, which cannot be told to the ranks "
                    "that do not own its matrix; save it on each rank by yourself"
                )


def _blank(described: Mapping[str, list[Any]], param: ShardedParameter) -> dict[str, Any]:
    """Make room for the state of a matrix of another rank."""
    state: dict[str, Any] = {}
    for name, (what, first, *rest) in described.items():
        if what == _SPAN:
            local = param.local.new_empty(0, dtype=dtype_of(first))
            state[name] = ShardedParameter.value(local, param.ownership)
        elif what == _PLAIN:
            device = param.device if rest[1] else torch.device("cpu")
            state[name] = torch.empty(rest[0], dtype=dtype_of(first), device=device)
        else:
            state[name] = first
    return state


def _broadcast(
    comm: Comm, optimizer: Optimizer, params: list[ShardedParameter], told: Mapping[str, Any]
) -> None:
    """Send plain tensors from their owners to all, those of an owner and a device by one call."""
    for rank in range(comm.size):
        by_device: dict[bool, list[Tensor]] = {}
        for number, param in enumerate(params):
            if param.ownership.owner != rank:
                continue
            for name, (what, *rest) in told.get(str(number), {}).items():
                if what == _PLAIN:
                    by_device.setdefault(rest[2], []).append(optimizer.state[param][name])
        for tensors in by_device.values():
            comm.broadcast(tensors, rank).wait()
