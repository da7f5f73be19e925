# SPDX-License-Identifier: Apache-2.0
"""Paths through the modules of a root: which lead to parameters of other units."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fullshard.core.errors import UsageError
from fullshard.torch.step.managed import ManagedUnit, managed_unit_of
from fullshard.torch.step.structures import tensors_with_gradients
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.sites import clean_name, holders_in
from fullshard.torch.unit.unit import owner_of

__all__ = ["Structure", "follow_holders", "leads_to_others", "used_outside_their_unit"]

_STRUCTURE = "_fullshard_structure"


class Structure:
    """The modules and parameters below a root, to see if some have been added or replaced.

    The root keeps it: whoever else did would keep the modules. ``running`` has the units whose
    forward runs, innermost last.
    """

    def __init__(self, root: nn.Module, running: Sequence[ManagedUnit]):
        self._running = running
        self._root = weakref.ref(root)
        root.__dict__[_STRUCTURE] = self
        self._plain = {id(param) for param in root.parameters()}
        self._listening: set[int] = set()  # modules, by id, whose hooks may take tensors
        self._note(root)

    def _note(self, root: nn.Module) -> None:
        modules = list(root.modules())
        for module in modules:
            own = 0 if managed_unit_of(module) is None else 1
            if len(module._forward_hooks) > own and id(module) not in self._listening:
                self._listen(module)
        # Looked at in every step: as lists, which are compared without a Python call for each.
        self._counted = [held for m in modules for held in (m._parameters, m._forward_hooks)]
        self._counts = list(map(len, self._counted))
        self._parents = [m._modules for m in modules if m._modules]
        self._children = [tuple(each.values()) for each in self._parents]

    def _listen(self, module: nn.Module) -> None:
        """Watch what hooks of ``module`` see: a loss may be made of it, inside a unit."""
        running = self._running

        def see(_module: nn.Module, inputs: Any, output: Any) -> None:
            if running:
                running[-1].watch_inside(tensors_with_gradients((inputs, output)))

        seen = torch.compiler.disable(see)  # type: ignore[no-untyped-call]
        module.register_forward_hook(seen, prepend=True)
        self._listening.add(id(module))

    def check(self) -> None:
        """Raise `UsageError` for trained parameters that were added after sharding."""
        if self._as_it_was():
            return
        root = self._root()
        if root is None:
            return
        added = [
            repr(clean_name(name))
            for name, param in root.named_parameters()
            if param.requires_grad
            and not isinstance(param, ShardedParameter)
            and id(param) not in self._plain
        ]
        if added:
            raise UsageError(
                f"{', '.join(added[:5])}{f' and {len(added) - 5} more' * (len(added) > 5)}: added "
                "to the model after it was sharded, so every rank would train its own, unreduced. "
                "Add modules before sharding, shard the new ones too (fully_shard), or freeze them"
            )
        self._note(root)

    def _as_it_was(self) -> bool:
        if list(map(len, self._counted)) != self._counts:
            return False
        return list(map(tuple, map(dict.values, self._parents))) == self._children


def used_outside_their_unit(root: nn.Module, owners: Mapping[int, ManagedUnit]) -> list[str]:
    """Names of uses below ``root`` of parameters whose unit's module is not around that use.

    ``owners`` has the units below ``root`` by the ids of their parameters.
    """
    found: dict[str, None] = {}
    around: dict[str, frozenset[ManagedUnit]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        managed = managed_unit_of(module)
        own = frozenset() if managed is None else frozenset([managed])
        around[path] = around.get(path.rpartition(".")[0], frozenset()) | own
        for key, param in module._parameters.items():
            if not isinstance(param, nn.Parameter):
                continue  # None, or what functional_call shows for a while
            if isinstance(param, ShardedParameter):
                outside = owners.get(id(param)) not in around[path]
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
