# SPDX-License-Identifier: Apache-2.0
"""From ``nn.Module`` to specs: which parameters there are, where each is used, how to swap them.

Outside of forward and backward a module shows its sharded parameters, inside its full ones.
Swapping writes to ``module._parameters`` directly: going through ``setattr`` costs more than
everything else that the engine does for a parameter.
"""

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from numbers import Number
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec
from fullshard.torch.buffers import dtype_name
from fullshard.torch.extensions import is_extended
from fullshard.torch.parameter import ShardedParameter
from fullshard.torch.tensor_parallel import TensorParallel, held_here, tensor_parallel_of

if TYPE_CHECKING:
    from fullshard.torch.unit import Unit

__all__ = [
    "WRAPPED",
    "ParamSites",
    "TiedSites",
    "buffer_dtypes",
    "cast_buffers",
    "clean_name",
    "device_of",
    "find_parameters",
    "holds_unknown",
    "ignored_parts",
    "map_tensors",
    "move_buffers",
    "notes_on",
    "owner_of",
    "set_owner",
    "tensors_in",
]

_OWNER = "_fullshard_unit"
WRAPPED = "_fsdp_wrapped_module"
"""The attribute under which FSDP1 wrappers keep the wrapped module; users see it in ``print``."""

_BUFFER_DTYPES = "_fullshard_buffer_dtypes"
_WRAPPING = {WRAPPED, "_checkpoint_wrapped_module", "_orig_mod"}


@dataclass(frozen=True)
class ParamSites:
    """One parameter and every place where a module holds it (several if it is tied)."""

    spec: ParamSpec
    param: nn.Parameter
    sites: tuple[tuple[dict[str, Any], str], ...]
    tensor_parallel: TensorParallel | None = None

    def put(self, param: Tensor) -> None:
        """Let all modules show ``param`` in this parameter's place."""
        for parameters, key in self.sites:
            parameters[key] = param

    @property
    def shown(self) -> Any:
        """What the first of those modules shows in its place now."""
        parameters, key = self.sites[0]
        return parameters[key]

    def relative_to(self, path: str) -> "ParamSites":
        """The same parameter, named as the module at ``path`` names it."""
        start = len(path) + 1 if path else 0
        aliases = tuple(alias[start:] for alias in self.spec.aliases)
        return replace(self, spec=replace(self.spec, name=self.spec.name[start:], aliases=aliases))


@dataclass(frozen=True)
class TiedSites:
    """A parameter that ``owner`` has as ``name_in_owner``, and all places where it is used."""

    owner: "Unit"
    name_in_owner: str
    everywhere: ParamSites


def clean_name(name: str) -> str:
    """A name as the plain model has it, without what wrappers of several kinds add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPING)


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
) -> tuple[list[ParamSites], list[TiedSites]]:
    """The distinct parameters below ``modules`` that a unit shall own, in registration order.

    Those in ``ignored`` are left as they are. With several modules, names begin with the module's
    number in the list. The second list has those which a unit below owns, but which are used
    outside that unit too, as tied weights are. One whose other user is not below ``modules`` is
    left alone: whoever shards a module around both finds it.
    """
    sites: dict[nn.Parameter, list[_Site]] = {}
    owned: dict[int, list[_Site]] = {}
    for site in _sites(modules):
        if isinstance(site.shown, ShardedParameter):
            owned.setdefault(id(site.shown), []).append(site)
        elif site.shown not in ignored:
            sites.setdefault(site.shown, []).append(site)
    found, tied = [], []
    for param, places in sites.items():
        owned_by = owner_of(param)
        if owned_by is None:
            found.append(_param_sites(param, places))
            continue
        owner, number = owned_by
        below = owned.get(id(owner.sharded[number]), [])
        if len(below) == len(owner.params[number].sites):
            name = owner.params[number].spec.name
            tied.append(TiedSites(owner, name, _param_sites(param, [*below, *places])))
    return found, tied


class _Site(NamedTuple):
    name: str
    parameters: dict[str, Any]
    key: str
    shown: nn.Parameter


def _sites(modules: Sequence[nn.Module]) -> Iterator[_Site]:
    visited: set[nn.Module] = set()
    for number, root in enumerate(modules):
        for path, module in root.named_modules(prefix=str(number) if len(modules) > 1 else ""):
            if module in visited:
                continue
            visited.add(module)
            for key, param in module._parameters.items():
                if param is not None:
                    name = clean_name(f"{path}.{key}" if path else key)
                    yield _Site(name, module._parameters, key, param)


def _param_sites(param: nn.Parameter, sites: Sequence[_Site]) -> ParamSites:
    names = [site.name for site in sites]
    spec = ParamSpec(
        name=names[0],
        shape=tuple(held_here(param).shape),
        dtype=dtype_name(param.dtype),
        trainable=param.requires_grad,
        aliases=tuple(names[1:]),
        apart=is_extended(param),
    )
    places = tuple((site.parameters, site.key) for site in sites)
    return ParamSites(spec, param, places, tensor_parallel_of(names[0], param))


def notes_on(param: Tensor) -> dict[str, Any]:
    """The attributes that users have put on a parameter."""
    return {key: value for key, value in param.__dict__.items() if "_fullshard" not in key}


def owner_of(param: Tensor) -> "tuple[Unit, int] | None":
    """The unit that a parameter was given to, if it still exists, and its number there."""
    reference, name = getattr(param, _OWNER, (None, ""))
    unit = None if reference is None else reference()
    if unit is None:
        return None
    return unit, next(i for i, each in enumerate(unit.params) if each.spec.name == name)


def set_owner(param: Tensor, unit: "Unit", name: str) -> None:
    """Note on an original parameter which unit has it now, and its name there."""
    setattr(param, _OWNER, (weakref.ref(unit), name))


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
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                each._buffers[key] = buffer.to(device)


def cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point buffers below ``module``. `buffer_dtypes` tells what they were."""
    for each in module.modules():
        for key, buffer in each._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                each.__dict__.setdefault(_BUFFER_DTYPES, {}).setdefault(key, buffer.dtype)
                each._buffers[key] = buffer.to(dtype)


def buffer_dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    """Of the buffers that `cast_buffers` has cast below ``module``, what they were, by name."""
    return {
        clean_name(f"{path}.{key}" if path else key): dtype
        for path, each in module.named_modules()
        for key, dtype in each.__dict__.get(_BUFFER_DTYPES, {}).items()
    }


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


def map_tensors(structure: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``structure`` with every tensor replaced that ``change`` changes; itself if none was."""
    if isinstance(structure, Tensor):
        return change(structure)
    if isinstance(structure, (tuple, list)):
        items = [map_tensors(item, change) for item in structure]
        if all(new is old for new, old in zip(items, structure, strict=True)):
            return structure
        if hasattr(structure, "_fields"):  # a named tuple
            return type(structure)(*items)
        return type(structure)(items)
    if isinstance(structure, dict):
        values = {key: map_tensors(value, change) for key, value in structure.items()}
        if all(values[key] is structure[key] for key in structure):
            return structure
        changed = copy.copy(structure)
        for key, value in values.items():
            changed[key] = value
        return changed
    if dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        fields = {f.name: getattr(structure, f.name) for f in dataclasses.fields(structure)}
        new = {name: map_tensors(value, change) for name, value in fields.items()}
        if all(new[name] is fields[name] for name in fields):
            return structure
        twin: Any = copy.copy(structure)
        for name, value in new.items():
            object.__setattr__(twin, name, value)
        return twin
    return structure


def holds_unknown(structure: Any) -> bool:
    """True if something in ``structure`` may hide tensors that `tensors_in` does not find."""
    if structure is None or isinstance(structure, (Tensor, str, bytes, bool, Number)):
        return False
    if isinstance(structure, (tuple, list)):
        return any(map(holds_unknown, structure))
    if isinstance(structure, dict):
        return any(map(holds_unknown, structure.values()))
    return not dataclasses.is_dataclass(structure)
