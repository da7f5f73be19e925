# SPDX-License-Identifier: Apache-2.0
"""From ``nn.Module`` to specs: which parameters there are, where each is used, how to swap them.

Outside of forward and backward a module shows its sharded parameters, inside its full ones.
Swapping writes to ``module._parameters`` directly: going through ``setattr`` costs more than
everything else that the engine does for a parameter.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.core.spec import ParamSpec
from fullshard.torch.buffers import dtype_name
from fullshard.torch.optim import name_of_replacement
from fullshard.torch.parameter import ShardedParameter

__all__ = [
    "WRAPPED",
    "ParamSites",
    "clean_name",
    "device_of",
    "find_parameters",
    "holds_unknown",
    "ignored_parts",
    "move_buffers",
    "tensors_in",
]

WRAPPED = "_fsdp_wrapped_module"
"""The attribute under which FSDP1 wrappers keep the wrapped module; users see it in ``print``."""


@dataclass(frozen=True)
class ParamSites:
    """One parameter and every place where a module holds it (several if it is tied)."""

    spec: ParamSpec
    param: nn.Parameter
    sites: tuple[tuple[dict[str, Any], str], ...]

    def put(self, param: Tensor) -> None:
        """Let all modules show ``param`` in this parameter's place."""
        for parameters, key in self.sites:
            parameters[key] = param

    def relative_to(self, path: str) -> "ParamSites":
        """The same parameter, named as the module at ``path`` names it."""
        start = len(path) + 1 if path else 0
        aliases = tuple(alias[start:] for alias in self.spec.aliases)
        return replace(self, spec=replace(self.spec, name=self.spec.name[start:], aliases=aliases))


def clean_name(name: str) -> str:
    """A name as the plain model has it, without what wrappers add."""
    if name == WRAPPED:
        return ""
    return name.replace(f"{WRAPPED}.", "").removesuffix(f".{WRAPPED}")


def ignored_parts(
    ignored: Mapping[str, Iterable[nn.Module | nn.Parameter] | None],
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """The modules and the parameters (those below the modules too) that arguments name.

    ``ignored`` maps the name of an argument to what it got. Raises `ConfigurationError` naming the
    argument if something in it is neither.
    """
    modules: set[nn.Module] = set()
    params: set[nn.Parameter] = set()
    for argument, parts in ignored.items():
        for part in parts or ():
            if isinstance(part, nn.Module):
                modules.add(part)
                params.update(part.parameters())
            elif isinstance(part, nn.Parameter):
                params.add(part)
            else:
                raise ConfigurationError(
                    f"{argument} may hold modules and parameters, got {type(part).__name__}"
                )
    return modules, params


def find_parameters(
    modules: Sequence[nn.Module], ignored: AbstractSet[nn.Parameter] = frozenset()
) -> list[ParamSites]:
    """The distinct parameters below ``modules`` that no unit owns yet, in registration order.

    Those in ``ignored`` are left as they are. With several modules, names begin with the module's
    number in the list. A parameter that a unit owns and that is used here too, outside that unit,
    raises `NotSupportedError`.
    """
    found: dict[nn.Parameter, tuple[list[str], list[tuple[dict[str, Any], str]]]] = {}
    visited: set[nn.Module] = set()
    for number, root in enumerate(modules):
        for path, module in root.named_modules(prefix=str(number) if len(modules) > 1 else ""):
            if module in visited:
                continue
            visited.add(module)
            for key, param in module._parameters.items():
                name = clean_name(f"{path}.{key}" if path else key)
                if replaced_by := name_of_replacement(param):
                    raise NotSupportedError(
                        f"parameter {name!r} is tied to {replaced_by!r}, which a unit has already; "
                        "shard the nearest module that contains both as one unit, or let "
                        "FullyShardedDataParallel's auto_wrap_policy choose the units"
                    )
                if param is None or param in ignored or isinstance(param, ShardedParameter):
                    continue
                names, sites = found.setdefault(param, ([], []))
                names.append(name)
                sites.append((module._parameters, key))
    return [
        ParamSites(
            ParamSpec(
                name=names[0],
                shape=tuple(param.shape),
                dtype=dtype_name(param.dtype),
                trainable=param.requires_grad,
                aliases=tuple(names[1:]),
            ),
            param,
            tuple(sites),
        )
        for param, (names, sites) in found.items()
    ]


def device_of(sites: Sequence[ParamSites]) -> torch.device | None:
    """The one device of all the parameters, None if there are none.

    Raises `ConfigurationError` naming two parameters if they are on several devices.
    """
    first: ParamSites | None = None
    for each in sites:
        first = first or each
        if each.param.device != first.param.device:
            raise ConfigurationError(
                f"all parameters of a unit must be on one device, but {first.spec.name!r} is on "
                f"{first.param.device} and {each.spec.name!r} on {each.param.device}; move the "
                "module to one device before sharding it"
            )
    return first.param.device if first else None


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers below ``module`` to where its parameters will be."""
    for each in module.modules():
        for key, buffer in each._buffers.items():
            if buffer is not None and buffer.device != device:
                each._buffers[key] = buffer.to(device)


def tensors_in(structure: Any, keep: Callable[[Tensor], bool]) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses for which ``keep`` holds."""
    if isinstance(structure, Tensor):
        if keep(structure):
            yield structure
    elif isinstance(structure, (tuple, list)):
        for item in structure:
            yield from tensors_in(item, keep)
    elif isinstance(structure, dict):
        for item in structure.values():
            yield from tensors_in(item, keep)
    elif dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        for spec in dataclasses.fields(structure):
            yield from tensors_in(getattr(structure, spec.name), keep)


def holds_unknown(structure: Any) -> bool:
    """True if something in ``structure`` may hide tensors that `tensors_in` does not find."""
    if structure is None or isinstance(structure, (Tensor, str, bytes, bool, Number)):
        return False
    if isinstance(structure, (tuple, list)):
        return any(map(holds_unknown, structure))
    if isinstance(structure, dict):
        return any(map(holds_unknown, structure.values()))
    return not dataclasses.is_dataclass(structure)
