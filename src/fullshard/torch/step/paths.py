# SPDX-License-Identifier: Apache-2.0
"""Paths through the modules of a root: which lead to parameters of other units."""

import weakref
from collections.abc import Mapping

from torch import nn

from fullshard.core.errors import UsageError
from fullshard.torch.step.managed import ManagedUnit, managed_unit_of
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.sites import clean_name
from fullshard.torch.unit.unit import owner_of

__all__ = ["Structure", "leads_to_others", "used_outside_their_unit"]

_STRUCTURE = "_fullshard_structure"


class Structure:
    """The modules and parameters below a root, to see if some have been added or replaced.

    The root keeps it: whoever else did would keep the modules.
    """

    def __init__(self, root: nn.Module):
        self._root = weakref.ref(root)
        root.__dict__[_STRUCTURE] = self
        self._plain = {id(param) for param in root.parameters()}
        self._note(root)

    def _note(self, root: nn.Module) -> None:
        modules = list(root.modules())
        self._children = [(m._modules, tuple(m._modules.values())) for m in modules if m._modules]
        self._parameters = [(m._parameters, len(m._parameters)) for m in modules]

    def check(self) -> None:
        """Raise `UsageError` for trained parameters that were added after sharding."""
        for held, count in self._parameters:
            if len(held) != count:
                break
        else:
            for children, known in self._children:
                if tuple(children.values()) != known:
                    break
            else:
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
