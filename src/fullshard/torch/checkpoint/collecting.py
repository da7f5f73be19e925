# SPDX-License-Identifier: Apache-2.0
"""From models and optimizers to named tensors and a description of the rest.

[Note: Names in a checkpoint]
A model's tensors are ``model/<name>``, with the name that the plain model's ``state_dict()`` has.
Of several models, given as a mapping, ``model`` is each one's key. An optimizer's are
``optimizer/<kind>/<full name of the parameter>``, such as
``optimizer/exp_avg/model/layers.0.weight``; parts of a tensor class as torchao's have the kinds
``exp_avg.codes`` and the like. Groups, and state that is no tensor, are JSON beside
them, with full names of parameters in place of numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fullshard.core.errors import ConfigurationError
from fullshard.torch.checkpoint.tensors import KnownBoxes, LocalPart, local_part
from fullshard.torch.state.apart import state_of_all
from fullshard.torch.state.owned import complete_state
from fullshard.torch.state.tensor_classes import taken_apart
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.sites import clean_name

Models = nn.Module | Mapping[str, nn.Module]
Optimizers = Optimizer | Mapping[str, Optimizer] | None


@dataclass
class Collected:
    """All that one rank has to say: tensors by full name, other names of them, and the rest."""

    parts: dict[str, LocalPart] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


def by_key(given: Any, key: str) -> dict[str, Any]:
    """One thing under its usual key, or a mapping as it is. Raises `ConfigurationError`."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return {key: given}
    for name in given:
        if not isinstance(name, str) or not name or "/" in name or "\0" in name:
            raise ConfigurationError(
                f"{key}s are named by texts without '/', got {name!r} as a key"
            )
    return dict(given)


def collect(
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    trainable_only: bool,
    boxes: KnownBoxes,
) -> Collected:
    """Name everything that this rank holds. Not collective. ``boxes`` are known, and added to.

    Raises `ConfigurationError` for an optimizer over parameters of none of the models.
    """
    collected = Collected()
    parts: dict[str, str] = {}
    names: dict[int, str] = {}
    kept: dict[int, str] = {}
    extras: dict[str, Any] = {}
    for key, model in models.items():
        parts[key] = "trainable weights" if trainable_only else "weights"
        for name, value in entries_of_model(model).items():
            full = f"{key}/{name}"
            if not isinstance(value, Tensor):
                extras[full] = value
                continue
            names.setdefault(id(value), full)
            if trainable_only and isinstance(value, nn.Parameter) and not value.requires_grad:
                continue
            first = kept.setdefault(identity(value), full)
            if first != full:
                collected.aliases[full] = first
            else:
                collected.parts[full] = local_part(full, value, boxes)
        names.update(names_of_parameters(key, model))
    described = {}
    for key, optimizer in optimizers.items():
        parts[key] = "optimizer"
        described[key] = _collect_optimizer(key, optimizer, names, collected, boxes)
    collected.state = {"parts": parts, "optimizers": described, "values": extras}
    return collected


def entries_of_model(model: nn.Module) -> dict[str, Any]:
    """The model's own parameters, buffers and extra state, by the names of the plain model."""
    held = _plain(model).state_dict(keep_vars=True)
    return {clean_name(name): value for name, value in held.items()}


def _plain(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def identity(value: Tensor) -> int:
    """Equal for tied values."""
    return id(value.local if isinstance(value, ShardedParameter) else value)


def names_of_parameters(key: str, model: nn.Module) -> dict[int, str]:
    """Full names by the identity of parameters."""
    return {
        id(param): f"{key}/{clean_name(name)}" for name, param in _plain(model).named_parameters()
    }


def _collect_optimizer(
    key: str,
    optimizer: Optimizer,
    names: Mapping[int, str],
    collected: Collected,
    boxes: KnownBoxes,
) -> dict[str, Any]:
    """Tensors go into ``collected``, the rest is returned."""
    groups, values = [], {}
    complete_state(optimizer)
    for group in optimizer.param_groups:
        params = [name_of(param, names, key) for param in group["params"]]
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": params})
        for param, name in zip(group["params"], params, strict=True):
            others = {}
            for kind, value in optimizer.state.get(param, {}).items():
                described, parts = taken_apart(value) or (None, {})
                if described is not None:
                    others[kind] = described
                    for part, plain in parts.items():
                        full = f"{key}/{kind}.{part}/{name}"
                        collected.parts[full] = local_part(full, plain, boxes)
                elif isinstance(value, Tensor):
                    full = f"{key}/{kind}/{name}"
                    collected.parts[full] = local_part(full, value, boxes)
                else:
                    others[kind] = value
            if others:
                values[name] = others
    of_all = state_of_all(optimizer)
    if of_all:
        values[""] = of_all
    return {"class": type(optimizer).__name__, "groups": groups, "values": values}


def name_of(param: Tensor, names: Mapping[int, str], key: str) -> str:
    """The full name of an optimizer's parameter. Raises `ConfigurationError` if it has none."""
    name = names.get(id(param))
    if name is None:
        raise ConfigurationError(
            f"{key!r} holds a parameter of shape {tuple(param.shape)} that is in none of the "
            "models; make the optimizer from the parameters of the models that are given"
        )
    return name
