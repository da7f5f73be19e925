# SPDX-License-Identifier: Apache-2.0
"""The search for the parameters below a module that a unit is to own."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.core.spec import ParamSpec
from fullshard.torch.step.managed import managed_units, paths_of_modules
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.tensor.tensor_parallel import held_here, tensor_parallel_of
from fullshard.torch.unit.buffers import dtype_name
from fullshard.torch.unit.extensions import check_trained, is_extended, resting_bytes
from fullshard.torch.unit.sites import ParamSites, clean_name, notes_on
from fullshard.torch.unit.unit import Unit, owner_of, set_owner


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
    units = {
        id(param): (managed.unit, number)
        for root in modules
        for managed in managed_units(root)
        for number, param in enumerate(managed.unit.sharded)
    }
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
        below = owned.pop(id(owner.sharded[number]), [])
        if len(_places(below)) == len(owner.params[number].sites):
            name = owner.params[number].spec.name
            tied.append(TiedSites(owner, name, _param_sites(param, [*below, *places])))
    for number_of_param, places in owned.items():
        if number_of_param in units and _is_shared(places, units[number_of_param][0]):
            owner, number = units[number_of_param]
            name = owner.params[number].spec.name
            original = _successor_of(owner, number)
            tied.append(TiedSites(owner, name, _param_sites(original, places)))
    return found, tied


def _is_shared(sites: Sequence["_Site"], owner: Unit) -> bool:
    """True if a module that holds the parameter is below the owner's module, and elsewhere too."""
    inside = [owner in site.around for site in sites]
    return any(inside) and not all(inside)


def _successor_of(owner: Unit, number: int) -> nn.Parameter:
    """A parameter that takes the values of the owner's when that gives it up."""
    sharded, each = owner.sharded[number], owner.params[number]
    if each.tensor_parallel is not None or each.spec.apart:
        raise NotSupportedError(
            f"the module that holds {sharded.ownership.name!r} is shared by several units, and the "
            "parameter is a DTensor or has fsdp_pre_all_gather; shard the module around all uses "
            "only"
        )
    device = owner.shards.device if sharded.is_meta else owner.device
    empty = torch.empty(sharded.ownership.shape, dtype=sharded.dtype, device=device)
    param = nn.Parameter(empty, requires_grad=sharded.requires_grad)
    param.__dict__.update(notes_on(each.param))
    set_owner(param, owner, each.spec.name)
    return param


class _Site(NamedTuple):
    """A name of a parameter: a module that is shared has several paths, but one place for it."""

    name: str
    module: nn.Module
    key: str
    shown: nn.Parameter
    around: frozenset[Unit]  # the units whose modules are on the path


def _sites(modules: Sequence[nn.Module]) -> Iterator[_Site]:
    for number, root in enumerate(modules):
        prefix = str(number) if len(modules) > 1 else ""
        for path, module, around in paths_of_modules(root, prefix):
            units = frozenset(managed.unit for managed in around)
            for key, param in module._parameters.items():
                if param is not None:
                    name = clean_name(f"{path}.{key}" if path else key)
                    yield _Site(name, module, key, param, units)


def _places(sites: Sequence[_Site]) -> tuple[tuple[dict[str, Any], str], ...]:
    distinct = {(id(site.module), site.key): site for site in sites}
    return tuple((site.module._parameters, site.key) for site in distinct.values())


def _param_sites(param: nn.Parameter, sites: Sequence[_Site]) -> ParamSites:
    names = list(dict.fromkeys(site.name for site in sites))
    check_trained(names[0], param)
    size = resting_bytes(param)
    spec = ParamSpec(
        name=names[0],
        shape=(size,) if size else tuple(held_here(param).shape),
        dtype=dtype_name(torch.uint8 if size else param.dtype),
        trainable=param.requires_grad,
        aliases=tuple(names[1:]),
        apart=is_extended(param),
    )
    parallel = tensor_parallel_of(names[0], param)
    asking = sites[0].module if spec.apart else None  # others need not keep their module alive
    return ParamSites(spec, param, _places(sites), parallel, asking)
