# SPDX-License-Identifier: Apache-2.0
"""The search for the parameters below a module that a unit is to own."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.tensor.tensor_parallel import held_here, tensor_parallel_of
from fullshard.torch.unit.buffers import dtype_name
from fullshard.torch.unit.extensions import is_extended
from fullshard.torch.unit.sites import ParamSites, clean_name
from fullshard.torch.unit.unit import Unit, owner_of

__all__ = ["TiedSites", "find_parameters", "ignored_parts"]


@dataclass(frozen=True)
class TiedSites:
    """A parameter that ``owner`` has as ``name_in_owner``, and all places where it is used."""

    owner: "Unit"
    name_in_owner: str
    everywhere: ParamSites


def ignored_parts(
    ignored: Mapping[str, Iterable[nn.Module | nn.Parameter] | None],
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Return the modules and parameters that arguments name, with those below the modules.

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
    """Find the distinct parameters below ``modules`` that a unit shall own, in their order.

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
