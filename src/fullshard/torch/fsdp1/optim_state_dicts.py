# SPDX-License-Identifier: Apache-2.0
"""FSDP1's optimizer state dicts: keyed by name, whole or sharded, for any number of ranks.

Such a dict has ``state``, from a parameter's name in the plain model to the optimizer's state of
it, and ``param_groups``, whose ``params`` are names. What is to be loaded has numbers in place of
names, as `torch.optim.Optimizer.load_state_dict` wants it.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import OptimStateKeyType, StateDictType
from torch.optim import Optimizer

from fullshard.checkpoint.format.values import from_json, to_json
from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.torch.comm.ranks import Ranks
from fullshard.torch.comm.texts import broadcast_bytes
from fullshard.torch.comm.watch.roll_call import call_roll
from fullshard.torch.fsdp1.state_dicts import StateDictForms
from fullshard.torch.state.apart import state_of_all
from fullshard.torch.state.forms import StateForm
from fullshard.torch.state.optimizers import cut_state, in_form, uncut_spans
from fullshard.torch.state.owned import complete_state
from fullshard.torch.step.managed import managed_units, speaks_for_all
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.sites import clean_name

_INSTEAD = (
    "call it on every rank (with rank0_only=True in the settings others get an empty dict), "
    "and write on one"
)
_INSTEAD_OF_LOADING = "call it on every rank; only the first one needs to have the state dict"
_Groups = list[dict[str, Any]]


class OptimizerStateDicts(StateDictForms):
    """The part of FSDP1's wrapper that is about state dicts of optimizers."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """Return the state of ``optim`` by name, in the form that `set_state_dict_type` chose.

        Collective. ``optim_state_dict`` may hold what ``optim.state_dict()`` gave. ``group`` is
        without effect: the model knows its ranks.
        """
        settings = StateDictForms.get_state_dict_type(model)
        config = settings.optim_state_dict_config
        kept = not getattr(config, "rank0_only", False) or speaks_for_all(model)
        form = StateForm(settings.state_dict_type, config.offload_to_cpu, kept)
        return _saved(model, optim, optim_state_dict, form)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """Turn a dict by name into one for ``optim.load_state_dict``. Collective.

        With ``rank0_only`` in the settings only the first rank needs to have ``optim_state_dict``.
        ``load_directly``: load it, too. ``is_named_optimizer``: parameters keep their names, by
        which such an optimizer loads. Without groups in the dict there are none in the result.
        ``group`` has no effect.

        Raises:
            ConfigurationError: if a parameter is in no group, or state is of an unknown one.
        """
        settings = StateDictForms.get_state_dict_type(model)
        if getattr(settings.optim_state_dict_config, "rank0_only", False):
            optim_state_dict = _from_first_rank(
                model, optim_state_dict, "optim_state_dict_to_load()"
            )
        if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            state = uncut_spans(optim_state_dict["state"], _params_by_name(model))
            optim_state_dict = {**optim_state_dict, "state": state}
        result = _to_load(model, optim.param_groups, optim_state_dict, named=is_named_optimizer)
        if load_directly:
            optim.load_state_dict(result)
        return result

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """Return the whole state by name in host memory, whatever is chosen. Collective.

        ``rank0_only``: other ranks get an empty dict. ``optim_input``, ``group``: no effect.
        """
        kept = not rank0_only or speaks_for_all(model)
        return _saved(model, optim, None, StateForm(StateDictType.FULL_STATE_DICT, True, kept))

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: Optimizer, group: Any = None
    ) -> dict[str, Any]:
        """Return the state by name as DTensors, whatever is chosen. Collective."""
        return _saved(model, optim, None, StateForm(StateDictType.SHARDED_STATE_DICT))

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """Cut a whole state that every rank has to this rank's, for ``optim.load_state_dict``.

        Without ``optim`` the parameters are in the order of ``optim_input`` (as the optimizer got
        them), else in the model's.
        """
        return _to_load(model, _groups_of(model, optim, optim_input), full_optim_state_dict)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
    ) -> dict[str, Any]:
        """Do the same for a state of DTensors, from any number of ranks. Collective."""
        return _to_load(model, optim.param_groups, sharded_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """Do the same for a whole state that only the first rank has. Collective.

        It is sent tensor by tensor, of which each rank keeps its span.
        """
        state = _from_first_rank(model, full_optim_state_dict, "scatter_full_optim_state_dict()")
        return _to_load(model, _groups_of(model, optim, optim_input), state)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """Turn a state by name into one by number, or back; works for a plain ``model`` too."""
        if not isinstance(optim_state_key_type, OptimStateKeyType):
            raise ConfigurationError(f"expected an OptimStateKeyType, got {optim_state_key_type!r}")
        names = dict(enumerate(_names(model, _groups_of(model, optim, optim_input))))
        if optim_state_key_type is OptimStateKeyType.PARAM_NAME:
            return _rekeyed(optim_state_dict, names)
        return _rekeyed(optim_state_dict, {name: number for number, name in names.items()})


def _params_by_name(model: nn.Module) -> dict[str, Any]:
    return {clean_name(name): param for name, param in model.named_parameters()}


def _names(model: nn.Module, groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """List the names of the parameters in ``groups``, in the order of optimizers' numbers."""
    known = {id(param): name for name, param in _params_by_name(model).items()}
    params = [param for group in groups for param in group["params"]]
    if any(id(param) not in known for param in params):
        raise ConfigurationError(
            "the optimizer has parameters that are not the model's; create it from the sharded "
            "model's parameters()"
        )
    return [known[id(param)] for param in params]


def _groups_of(model: nn.Module, optim: Optimizer | None, optim_input: Any) -> _Groups:
    if optim is not None:
        return optim.param_groups
    given = list(model.parameters() if optim_input is None else optim_input)
    if given and isinstance(given[0], dict):
        return [{**group, "params": list(group["params"])} for group in given]
    return [{"params": given}]


def _packed(optim: Optimizer) -> dict[str, Any]:
    """Return ``optim.state_dict()`` with values as they are inside."""
    params = [param for group in optim.param_groups for param in group["params"]]
    of_none = next(iter(state_of_all(optim)), None)
    if of_none is not None:
        raise NotSupportedError(
            f"the state {of_none!r} of {type(optim).__name__} belongs to no parameter, and FSDP1's "
            "optimizer state dicts know those of parameters; use save_checkpoint and "
            "load_checkpoint, or optimizer.state_dict() and load_state_dict()"
        )
    numbers = {id(param): number for number, param in enumerate(params)}
    groups = [
        {**group, "params": [numbers[id(param)] for param in group["params"]]}
        for group in optim.param_groups
    ]
    state = {numbers[id(param)]: each for param, each in optim.state.items()}
    return {"state": state, "param_groups": groups}


def _rekeyed(state: Mapping[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    """Replace the keys of parameters; keys that have their new form already stay."""
    known = {**{new: new for new in keys.values()}, **keys}
    result = {**state, "state": {known[key]: each for key, each in state["state"].items()}}
    if "param_groups" in state:  # users take them out
        result["param_groups"] = [
            {**group, "params": [known[key] for key in group["params"]]}
            for group in state["param_groups"]
        ]
    return result


def _saved(
    model: nn.Module, optim: Optimizer, given: dict[str, Any] | None, form: StateForm
) -> dict[str, Any]:
    names = dict(enumerate(_names(model, optim.param_groups)))
    if given is None:
        complete_state(optim)
    named = _rekeyed(_packed(optim) if given is None else given, names)
    state = in_form(named["state"], form, "FullyShardedDataParallel.optim_state_dict()", _INSTEAD)
    return {**named, "state": state} if form.kept else {}


def _from_first_rank(model: nn.Module, state: dict[str, Any] | None, what: str) -> dict[str, Any]:
    unit = next(managed_units(model)).unit
    call_roll([unit.ranks.gather, unit.ranks.replicas], what, _INSTEAD_OF_LOADING)
    return broadcast_state(unit.ranks, state or {}, _params_by_name(model), unit.device)


@torch.no_grad()
def _to_load(
    model: nn.Module, groups: _Groups, given: Mapping[str, Any], *, named: bool = False
) -> dict[str, Any]:
    params = _params_by_name(model)
    names = _names(model, groups)
    in_groups = given.get("param_groups")
    saved = {name: group for group in in_groups or () for name in group["params"]}
    missing = [] if in_groups is None else sorted(set(names) - set(saved))
    unknown = sorted(set(given["state"]) - set(names))
    if missing or unknown:
        raise ConfigurationError(
            "the state dict is not one of this optimizer: "
            f"in no group of it are {missing or 'none'}; "
            f"it has state of unknown {unknown or 'none'}"
        )
    numbers = {name: number for number, name in enumerate(names)}
    # Cutting DTensors is collective: in an order that is the same on all ranks.
    state = {}
    for name in sorted(given["state"]):
        values, param = given["state"][name], params[name]
        if isinstance(param, ShardedParameter):
            values = cut_state(values, param)
        # What is not cut (steps, too) would go on in the memory of what was given.
        state[numbers[name]] = {
            key: value.clone() if type(value) is Tensor else value for key, value in values.items()
        }
    keys: list[Any] = names if named else list(range(len(names)))
    result: dict[str, Any] = {"state": {keys[n]: state[n] for n in sorted(state)}}
    if in_groups is None:
        return result
    loaded = []
    for group in groups:
        own = _names(model, [group])
        settings = saved[own[0]] if own else group
        loaded.append({**settings, "params": [keys[numbers[name]] for name in own]})
    return {**result, "param_groups": loaded}


_TENSOR = "tensor"


def broadcast_state(
    ranks: Ranks, saved: Mapping[str, Any], params: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    """Send the first rank's ``saved`` to all ranks, which keep their spans of it. Collective.

    ``saved`` has ``state`` (by the names of ``params``) and ``param_groups``, made of tensors,
    numbers, texts, dicts, lists and tuples. One tensor at a time is whole, on ``device``; nothing
    is pickled. Raises `ConfigurationError` on all ranks for values of another kind.
    """
    tensors: list[Tensor] = []

    def note(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value)
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape)]}

    text, failure = "", None
    if ranks.first:
        try:
            text = json.dumps(to_json(saved, note, "state"))
        except ConfigurationError as error:
            failure = error
    if ranks.any(failure is not None, device):
        raise ConfigurationError(
            f"the optimizer's state cannot be sent: {failure or 'the error is on the first rank'}"
        )
    data = text.encode()
    for comm in (ranks.replicas, ranks.gather):
        data = broadcast_bytes(comm, data, device)
    described = from_json(json.loads(data))
    sent = iter(tensors)

    def receive(dtype: str, shape: list[int]) -> Tensor:
        if ranks.first:
            tensor = next(sent).detach().to(device, copy=True).contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        ranks.broadcast(tensor)
        return tensor

    state: dict[str, Any] = {}
    for name, values in described["state"].items():
        state[name] = {}
        for key, value in values.items():
            one = {key: _restored(value, receive)}
            param = params.get(name)
            state[name] |= cut_state(one, param) if isinstance(param, ShardedParameter) else one
    return {"state": state, "param_groups": _restored(described["param_groups"], receive)}


def _restored(value: Any, receive: Callable[[str, list[int]], Tensor]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_restored(item, receive) for item in value)
    if not isinstance(value, dict):
        return value
    if set(value) == {_TENSOR}:
        tensor = receive(*value[_TENSOR])
        return tensor.cpu() if tensor.dim() == 0 else tensor
    return {key: _restored(item, receive) for key, item in value.items()}
