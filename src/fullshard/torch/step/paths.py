# SPDX-License-Identifier: Apache-2.0
"""Paths through the modules of a root: which lead to parameters of other units."""

import weakref
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.core.errors import UsageError
from fullshard.core.schedule.unit_step import UnitStep
from fullshard.torch.step.managed import (
    ManagedUnit,
    managed_unit_of,
    managed_units,
    paths_of_modules,
)
from fullshard.torch.step.structures import tensors_with_gradients
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.changes import tie
from fullshard.torch.unit.sites import clean_name, holders_in
from fullshard.torch.unit.unit import Unit, is_of_a_unit, owner_of

_STRUCTURE = "_fullshard_structure"
_LEFT_OUT = "_fullshard_left_out"


def note_left_out(module: nn.Module) -> None:
    """Note on the modules below ``module``, sharded now, the parameters that no unit has."""
    for each in module.modules():
        names = {key for key, param in each._parameters.items() if _is_plain(param)}
        if names:
            each.__dict__[_LEFT_OUT] = names


def _is_plain(param: Any) -> bool:
    return param is not None and not isinstance(param, ShardedParameter)


class Structure:
    """The modules and parameters below a root, to see if some have been added or replaced.

    The root keeps it: whoever else did would keep the modules. ``running`` has the units whose
    forward runs, innermost last.
    """

    def __init__(self, root: nn.Module, running: Sequence[UnitStep]):
        self._running = running
        self._root = weakref.ref(root)
        root.__dict__[_STRUCTURE] = self
        self._listening: set[int] = set()  # modules, by id, whose hooks may take tensors
        # Looked at in every step: as lists, which are compared without a Python call for each.
        self._counted: list[Mapping[Any, Any]] = []
        self._counts: list[int] | None = None
        self._absent: list[tuple[dict[str, Any], str]] = []  # parameters that are None
        self._parents: list[dict[str, nn.Module | None]] = []
        self._children: list[tuple[nn.Module | None, ...]] = []
        self._frozen: list[nn.Parameter] = []  # of no unit, and not left out when it was sharded
        # Units that are removed from the model stay in its steps, as unused ones. Else it would
        # depend on each rank's garbage collector when they go, and ranks would issue other calls.
        self._units = _units_below(root)

    @property
    def root(self) -> nn.Module | None:
        """The root, if it still exists."""
        return self._root()

    def _note(self, root: nn.Module, frozen: list[nn.Parameter]) -> None:
        modules = list(root.modules())
        self._units |= _units_below(root)
        for module in modules:
            own = 0 if managed_unit_of(module) is None else 1
            if len(module._forward_hooks) > own and id(module) not in self._listening:
                self._listen(module)
        kinds = (("_parameters", "_forward_hooks", "_modules"), ("_parameters", "_forward_hooks"))
        self._counted = [getattr(m, kind) for m in modules for kind in kinds[bool(m._modules)]]
        self._counts = list(map(len, self._counted))
        self._absent = [
            (m._parameters, key) for m in modules for key, p in m._parameters.items() if p is None
        ]
        self._parents = [m._modules for m in modules if m._modules]
        self._children = [tuple(each.values()) for each in self._parents]
        self._frozen = frozen

    def _listen(self, module: nn.Module) -> None:
        """Watch what hooks of ``module`` see: a loss may be made of it, inside a unit."""
        running = self._running

        def see(_module: nn.Module, inputs: Any, output: Any) -> None:
            if torch.compiler.is_compiling():  # one node makes it, and the unit's output
                return
            if running and running[-1].call is not None:
                running[-1].call.watch_inside(tensors_with_gradients((inputs, output)))

        module.register_forward_hook(see, prepend=True)
        self._listening.add(id(module))

    def check(self) -> None:
        """Raise `UsageError` for trained parameters that were added after sharding."""
        if self._as_it_was():
            return
        root = self._root()
        if root is None:
            return
        added = _added_to(root)
        trained = [name for name, param in added.items() if param.requires_grad]
        if trained:
            raise UsageError(
                f"{', '.join(trained[:5])}{f' and {len(trained) - 5} more' * (len(trained) > 5)}: "
                "added to the model after it was sharded, so every rank would train its own, "
                "unreduced. Add modules before sharding, shard the new ones too (fully_shard), or "
                "freeze them"
            )
        self._note(root, list(added.values()))

    def _as_it_was(self) -> bool:
        if list(map(len, self._counted)) != self._counts:
            return False
        if True in [table[key] is not None for table, key in self._absent]:
            return False
        if True in [param.requires_grad for param in self._frozen]:
            return False
        return list(map(tuple, map(dict.values, self._parents))) == self._children


def _units_below(root: nn.Module) -> set[nn.Module]:
    below = (module for module in root.modules() if module is not root)
    return {module for module in below if managed_unit_of(module) is not None}


def _added_to(root: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters below ``root`` that were neither sharded nor left out of it, by quoted names."""
    sites = {
        (id(table), key)
        for managed in managed_units(root)
        for param in managed.unit.params
        for table, key in param.sites
    }
    return {
        repr(clean_name(f"{path}.{key}" if path else key)): param
        for path, module in root.named_modules()
        for key, param in module._parameters.items()
        if param is not None
        and _is_plain(param)
        and key not in module.__dict__.get(_LEFT_OUT, ())
        and (id(module._parameters), key) not in sites
        and owner_of(param) is None
    }


def make_ties(root: nn.Module) -> bool:
    """Make one parameter of those that modules below ``root`` show as one object.

    So weights are tied after sharding (``head.weight = embed.weight``): the unit whose module
    contains all uses gets it. Parameters without such a unit below ``root`` stay as they are.
    Collective, if there are any and they have values. Returns True if something was changed.
    """
    changed, passed_over = False, 0
    while passed_over < len(tied := _tied_slots(root)):
        slots = tied[passed_over]
        around = _units_around(root)
        sites = [
            place
            for unit, index in slots
            for table, key in unit.params[index].sites
            for place in around.get((id(table), key), [])
        ]
        inner = [unit for unit in reversed(sites[0][1]) if all(unit in units for _, units in sites)]
        if inner:
            path = next(m for m, units in around[_ROOTS] if units and units[-1] is inner[0])
            names = [name.removeprefix(f"{path}.") for name, _ in sites]
            if tie(inner[0], slots, names):
                changed = True
                continue
        passed_over += 1
    return changed


_Slot = tuple[Unit, int]


def _tied_slots(root: nn.Module) -> list[list[_Slot]]:
    """Slots of units below ``root`` whose modules show one object, its owner's first."""
    groups: dict[int, list[tuple[bool, _Slot]]] = {}
    all_slots = [
        (managed.unit, index)
        for managed in managed_units(root)
        for index in range(len(managed.unit.params))
    ]
    shown = {slot: slot[0].params[slot[1]].shown_everywhere for slot in all_slots}
    for (unit, index), value in shown.items():
        if not isinstance(value, Tensor):
            continue
        slot, owned = (unit, index), owner_of(value)
        if value is unit.sharded[index]:
            owned = slot
        elif not (unit.on_meta or is_of_a_unit(value)):
            continue
        # What the owner's module shows instead, until the unit takes it over, is the same one.
        one = value if owned is None else shown.get(owned, value)
        groups.setdefault(id(one), []).append((owned not in (None, slot), slot))
    owners_first = [sorted(each, key=itemgetter(0)) for each in groups.values() if len(each) > 1]
    return [[slot for _, slot in each] for each in owners_first]


_ROOTS = (0, "")  # no place of a parameter: the modules themselves


def _units_around(root: nn.Module) -> dict[tuple[int, str], list[tuple[str, tuple[Unit, ...]]]]:
    """Paths to each place of a parameter, with the units around it, outermost first."""
    places: dict[tuple[int, str], list[tuple[str, tuple[Unit, ...]]]] = {_ROOTS: []}
    for path, module, around in paths_of_modules(root):
        units = tuple(managed.unit for managed in around)
        if managed_unit_of(module) is not None:
            places[_ROOTS].append((clean_name(path), units))
        for key in module._parameters:
            name = clean_name(f"{path}.{key}" if path else key)
            places.setdefault((id(module._parameters), key), []).append((name, units))
    return places


def used_outside_their_unit(root: nn.Module, owners: Mapping[int, ManagedUnit]) -> list[str]:
    """Names of uses below ``root`` of parameters whose unit's module is not around that use.

    ``owners`` has the units below ``root`` by the ids of their parameters.
    """
    found: dict[str, None] = {}
    for path, module, around in paths_of_modules(root):
        for key, param in module._parameters.items():
            if not isinstance(param, nn.Parameter):
                continue  # None, or what functional_call shows for a while
            if isinstance(param, ShardedParameter):
                outside = owners.get(id(param)) not in around
            else:
                outside = owner_of(param) is not None
            if outside:
                found[repr(clean_name(f"{path}.{key}" if path else key))] = None
    return list(found)


def follow_holders(root: nn.Module, owners: Mapping[int, ManagedUnit]) -> None:
    """Let lists and dicts of modules below ``root`` follow the parameters that they hold.

    A list of weights that was made in ``__init__`` shows what the modules show, full in forward.
    ``owners`` has the units below ``root`` by the ids of their parameters.
    """
    for module in root.modules():
        if isinstance(module, nn.RNNBase):
            # On CUDA this would move full parameters out of the memory that is gathered into.
            module.__dict__["flatten_parameters"] = _leave_as_they_are
        for holder, param in list(holders_in(module)):
            managed = owners.get(id(param))
            if managed is not None:
                numbers = {id(each): index for index, each in enumerate(managed.unit.sharded)}
                managed.unit.follow(holder, numbers[id(param)])
                continue
            owned = None if isinstance(param, ShardedParameter) else owner_of(param)
            if owned is not None:
                owned[0].follow(holder, owned[1])


def _leave_as_they_are() -> None:
    pass


def leads_to_others(module: nn.Module, owners: Mapping[int, ManagedUnit]) -> bool:
    """True if a path through ``module`` may lead to parameters that no unit below it has.

    These are trainable parameters of no unit, and tied ones that belong to a unit around it.
    """
    below = {managed_unit_of(each) for each in module.modules()}
    return any(
        owners.get(id(param)) not in below
        if isinstance(param, ShardedParameter)
        else param.requires_grad
        for param in module.parameters()
    )
