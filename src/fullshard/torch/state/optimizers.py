# SPDX-License-Identifier: Apache-2.0
"""Optimizer state as others see it: the conversion in ``state_dict`` and ``load_state_dict``.

[Note: State of optimizers at the border]
Inside, state is cut as its parameter is. Others (`torch.save`, `torch.distributed.checkpoint`) read
``optimizer.state_dict()``, and they know DTensors: so it holds DTensors, and taking it is
collective. ``load_state_dict`` accepts whole tensors, DTensors and `ShardedParameter`s. Hooks do
this from the first time that an optimizer is looked at, see [Note: Looking at optimizers]; state
that was loaded before is cut then.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from traceback import walk_stack
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fullshard.core.errors import ConfigurationError
from fullshard.torch.comm.agreement import verify_agreement
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.comm.watch.roll_call import call_roll
from fullshard.torch.state.dtensors import without_sharded_tensor
from fullshard.torch.state.forms import (
    AS_DTENSORS,
    StateForm,
    ask_before_loading,
    change_form,
    in_agreed_order,
)
from fullshard.torch.state.owned import NUMBERS, catch_up, comms_of_owned, complete_state, place_in
from fullshard.torch.state.tensor_classes import put_together, taken_apart
from fullshard.torch.tensor.ownership import Ownership
from fullshard.torch.tensor.parameter import ShardedParameter

_TRANSLATED = "_fullshard_translates"
_FRAMES = 8  # within which PyTorch's functions are found
_INSTEAD = (
    "call it on every rank; its state is DTensors, of which each rank has its rows. For one file: "
    "get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, "
    "cpu_offload=True)) of torch.distributed.checkpoint.state_dict on every rank, which rank 0 "
    "writes, or FullyShardedDataParallel.optim_state_dict(model, optimizer)"
)


def translate(optimizer: Optimizer) -> None:
    """Let ``optimizer`` hand out DTensors and cut the state that it loads, from now on."""
    if getattr(optimizer, _TRANSLATED, False):
        return
    setattr(optimizer, _TRANSLATED, True)
    if not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
        # One that wraps another (Lookahead) without Optimizer.__init__; that one has the state.
        inner = getattr(optimizer, "optimizer", None)
        if isinstance(inner, Optimizer):
            translate(inner)
        return
    optimizer.register_state_dict_pre_hook(_complete)
    optimizer.register_state_dict_post_hook(_hand_out)
    optimizer.register_load_state_dict_pre_hook(_cut_before_loading)


def shard_state(optimizer: Optimizer) -> None:
    """Shard optimizer state that is still whole. Collective if any is a DTensor."""
    of_params = {param: param for param in optimizer.state if isinstance(param, Tensor)}
    for param in in_agreed_order(of_params).values():
        place = place_in(optimizer, param)
        optimizer.state[param] = cut_state(optimizer.state[param], param, place)


# What a step of torch's own optimizers reads of a parameter's state that is not empty.
_READ = {
    "Adadelta": ("square_avg", "acc_delta"),
    "Adagrad": ("sum",),
    "Adam": ("exp_avg", "exp_avg_sq"),
    "Adamax": ("exp_avg", "exp_inf"),
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "ASGD": ("ax", "eta", "mu"),
    "NAdam": ("exp_avg", "exp_avg_sq", "mu_product"),
    "RAdam": ("exp_avg", "exp_avg_sq"),
    "RMSprop": ("square_avg",),
    "Rprop": ("prev", "step_size"),
}


def refuse_state_of_another(optimizer: Optimizer, state: Iterable[Any]) -> None:
    """Raise `ConfigurationError` if ``state``, by parameter, cannot be that of the optimizer."""
    kind = type(optimizer)
    read = _READ.get(kind.__name__, ()) if kind.__module__.startswith("torch.optim") else ()
    for each in state:
        missing = [name for name in read if isinstance(each, Mapping) and each and name not in each]
        if missing:
            raise ConfigurationError(
                f"the loaded state has no {' and no '.join(missing)}, without which "
                f"{kind.__name__} cannot step; it has {', '.join(each)}: load it into an optimizer "
                "of the class that it was saved from"
            )


def _complete(optimizer: Optimizer) -> None:
    call_roll(comms_of_owned(optimizer), "optimizer.state_dict()", _INSTEAD)
    complete_state(optimizer)


def _hand_out(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = state_dict["state"]
    held = {key: param for key, param in _params_by_key(optimizer, state_dict) if key in state}
    order = in_agreed_order(held)
    if _asked_by_names():  # who may gather in the order in which the state comes
        state = {
            key: state[key] for key in (*order, *(each for each in state if each not in order))
        }
    else:
        _verify_same_numbers(order)
    state = in_form(state, AS_DTENSORS, "optimizer.state_dict()", _INSTEAD)
    return {**state_dict, "state": state}


def _cut_before_loading(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    catch_up(optimizer)
    state = dict(state_dict["state"])
    refuse_state_of_another(optimizer, state.values())
    values = tree_leaves(list(state.values()))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    ask_before_loading(values, params, "optimizer.load_state_dict() of DTensors")
    held = {key: param for key, param in _params_by_key(optimizer, state_dict) if key in state}
    for key, param in in_agreed_order(held).items():
        state[key] = cut_state(state[key], param, place_in(optimizer, param))
    return {**state_dict, "state": state}


def _asked_by_names() -> bool:
    """True if PyTorch's functions ask that replace each rank's numbers by names.

    Not when they load whole tensors, which they scatter in each rank's own order.
    """
    asking = {
        frame.f_code.co_name
        for frame, _ in islice(walk_stack(sys._getframe(2)), _FRAMES)  # from its own state_dict on
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"
    }
    return bool(asking) and not {"_get_optim_state_dict", "_load_optim_state_dict"} <= asking


def _verify_same_numbers(numbered: Mapping[Any, ShardedParameter]) -> None:
    """Raise if ranks number parameters differently, which would mix them. Collective: 32 bytes."""
    by_comm: dict[Comm, dict[str, str]] = {}
    for key, param in numbered.items():
        by_comm.setdefault(param.ownership.comm, {})[f"parameter {key}"] = param.ownership.name
    call_roll(list(by_comm), "optimizer.state_dict()", _INSTEAD)
    for comm, lines in by_comm.items():
        verify_agreement(
            comm,
            lines,
            next(iter(numbered.values())).device,
            "the optimizer's numbers of parameters, so that its state_dict() would mix them (give "
            "it its parameters in one order, not as a set(); or take the state by name, from "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict or "
            "FullyShardedDataParallel.optim_state_dict)",
        )


def _params_by_key(
    optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Pair keys and parameters as `Optimizer.load_state_dict` does: by order in the groups."""
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        yield from zip(saved["params"], group["params"], strict=False)


def cut_state(
    state: Mapping[str, Any], param: ShardedParameter, place: Ownership | None = None
) -> dict[str, Any]:
    """Cut the state of one parameter to this rank's span. Collective for DTensors.

    ``place`` says where it is to be, if that is not where the parameter is. A tensor of the
    parameter's shape belongs to its elements and is cut; others are not. ``step`` and other numbers
    are never cut, even beside a parameter without dims.
    """
    place = place or param.ownership
    return {name: _cut(name, value, param, place) for name, value in state.items()}


def _cut(name: str, value: Any, param: ShardedParameter, place: Ownership) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, ShardedParameter):
        return value
    value = without_sharded_tensor(value, param.device)
    if value.shape != param.shape or (name in NUMBERS and not isinstance(value, DTensor)):
        return value
    described, parts = taken_apart(value) or (None, {})
    if place.owner is not None and described is not None:
        # Whole with its owner, see `shown_state`; not the memory of what was loaded.
        return put_together(
            described, [part.to(param.device, copy=True) for part in parts.values()]
        )
    if isinstance(value, DTensor) and _is_cut_alike(value, param):
        return value  # of blocks that torchao's optimizers made: nobody else takes them apart
    local = place.cut(value.detach())
    # What is kept must not hold the memory of the whole, nor be the memory of what was loaded.
    return ShardedParameter.value(local.clone(), place)


def _is_cut_alike(value: DTensor, param: ShardedParameter) -> bool:
    """True for a DTensor of a tensor class that has this rank's rows of the parameter."""
    return (
        isinstance(param, DTensor)
        and type(value.to_local()) is not Tensor
        and value.device_mesh == param.device_mesh
        and tuple(value.placements) == tuple(param.placements)
    )


def uncut_spans(
    state: Mapping[str, Mapping[str, Any]], params: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Turn state in the local form, whose flat spans are plain tensors, into sharded state."""
    return {
        name: {
            # Optimizers keep what they load: it must not be the memory of what was loaded.
            key: as_span(value.clone() if isinstance(value, Tensor) else value, params.get(name))
            for key, value in each.items()
        }
        for name, each in state.items()
    }


def as_span(value: Any, param: Any) -> Any:
    """Wrap a flat plain tensor of this rank's elements of ``param`` as sharded like it."""
    if not isinstance(param, ShardedParameter) or isinstance(value, ShardedParameter | DTensor):
        return value  # a DTensor is of the global shape, which may be that of a span
    if not isinstance(value, Tensor) or value.shape != param.local.shape:
        return value
    return ShardedParameter.value(value.as_subclass(Tensor), param.ownership)


def in_form(
    state: Mapping[Any, Mapping[str, Any]], form: StateForm, what: str, instead: str
) -> dict[Any, Any]:
    """Return the state of parameters in another form, and all else, in new dicts: `change_form`."""
    of_all = {key: each for key, each in state.items() if not isinstance(each, Mapping)}
    of_params = {key: each for key, each in state.items() if key not in of_all}
    flat = {(key, name): value for key, each in of_params.items() for name, value in each.items()}
    change_form(flat, form, what, instead)
    result: dict[Any, Any] = {key: of_all.get(key, {}) for key in state} if form.kept else {}
    for (key, name), value in flat.items():
        result[key][name] = value
    return result
