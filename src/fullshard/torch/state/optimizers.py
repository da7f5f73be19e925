# SPDX-License-Identifier: Apache-2.0
"""What an ordinary optimizer over sharded parameters hands out as its state, and takes back.

[Note: State of optimizers at the border]
Inside, state is cut as its parameter is. What ``optimizer.state_dict()`` gives is read by others
(`torch.save`, `torch.distributed.checkpoint`), who know DTensors: so it has those, and taking it is
collective. ``load_state_dict`` takes whole tensors, DTensors and our own. The hooks for that are
put on an optimizer when it is first looked at, see [Note: Looking at optimizers]; what was loaded
before that is cut then.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.torch.state.dtensors import without_sharded_tensor
from fullshard.torch.state.forms import AS_DTENSORS, Form, ask_before_loading, change_form
from fullshard.torch.tensor.parameter import ShardedParameter

__all__ = ["adopt", "as_span", "cut_state", "in_form", "translate", "uncut_spans"]

_TRANSLATED = "_fullshard_translates"
_NUMBERS = {"step", "mu_product", "mu", "eta"}  # of Adam and its kin, NAdam, ASGD
_INSTEAD = (
    "call it on every rank; its state is DTensors, of which each rank has its rows. For one file: "
    "get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, "
    "cpu_offload=True)) of torch.distributed.checkpoint.state_dict on every rank, which rank 0 "
    "writes, or FullyShardedDataParallel.optim_state_dict(model, optimizer)"
)


def translate(optimizer: Optimizer) -> None:
    """Let ``optimizer`` hand out DTensors and cut what it loads, from now on."""
    if getattr(optimizer, _TRANSLATED, False):
        return
    setattr(optimizer, _TRANSLATED, True)
    optimizer.register_state_dict_post_hook(_hand_out)
    optimizer.register_load_state_dict_pre_hook(_cut_before_loading)


def adopt(optimizer: Optimizer) -> None:
    """Cut what the optimizer holds of sharded parameters and is not cut. Collective if there is."""
    for param, state in optimizer.state.items():
        if isinstance(param, ShardedParameter):
            optimizer.state[param] = cut_state(state, param)


def _hand_out(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = in_form(state_dict["state"], AS_DTENSORS, "optimizer.state_dict()", _INSTEAD)
    return {**state_dict, "state": state}


def _cut_before_loading(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = dict(state_dict["state"])
    values = [value for each in state.values() for value in each.values()]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    ask_before_loading(values, params, "optimizer.load_state_dict() of DTensors")
    for key, param in _params_by_key(optimizer, state_dict):
        if key in state and isinstance(param, ShardedParameter):
            state[key] = cut_state(state[key], param)
    return {**state_dict, "state": state}


def _params_by_key(
    optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """As `Optimizer.load_state_dict` matches them: by their order in the groups."""
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        yield from zip(saved["params"], group["params"], strict=False)


def cut_state(state: Mapping[str, Any], param: ShardedParameter) -> dict[str, Any]:
    """The state of one parameter, of which this rank keeps its span. Collective for DTensors.

    A tensor of the parameter's shape is state of its elements; another one is not cut. ``step``
    and other names of numbers are not, also beside a parameter without dims.
    """
    return {name: _cut(name, value, param) for name, value in state.items()}


def _cut(name: str, value: Any, param: ShardedParameter) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, ShardedParameter):
        return value
    value = without_sharded_tensor(value, param.device)
    if value.shape != param.shape or (name in _NUMBERS and not isinstance(value, DTensor)):
        return value
    local = param.ownership.cut(value.detach())
    # What is kept must not hold the memory of the whole, nor be the memory of what was loaded.
    return ShardedParameter.value(local.clone(), param.ownership)


def uncut_spans(
    state: Mapping[str, Mapping[str, Any]], params: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """State by name in the local form, flat spans as plain tensors, made sharded again."""
    return {
        name: {
            # Optimizers keep what they load: it must not be the memory of what was loaded.
            key: as_span(value.clone() if isinstance(value, Tensor) else value, params.get(name))
            for key, value in each.items()
        }
        for name, each in state.items()
    }


def as_span(value: Any, param: Any) -> Any:
    """A flat plain tensor of this rank's elements of ``param`` as one that is sharded alike."""
    if not isinstance(param, ShardedParameter) or isinstance(value, ShardedParameter | DTensor):
        return value  # a DTensor is of the global shape, which may be that of a span
    if not isinstance(value, Tensor) or value.shape != param.local.shape:
        return value
    return ShardedParameter.value(value, param.ownership)


def in_form(
    state: Mapping[Any, Mapping[str, Any]], form: Form, what: str, instead: str
) -> dict[Any, dict[str, Any]]:
    """The state of all parameters in another form; the dicts inside are new. See `change_form`."""
    flat = {(key, name): value for key, each in state.items() for name, value in each.items()}
    change_form(flat, form, what, instead)
    result: dict[Any, dict[str, Any]] = {key: {} for key in state} if form.kept else {}
    for (key, name), value in flat.items():
        result[key][name] = value
    return result
