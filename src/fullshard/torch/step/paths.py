# SPDX-License-Identifier: Apache-2.0
"""Paths through the modules of a root: which lead to parameters of other units."""

from collections.abc import Mapping

from torch import nn

from fullshard.torch.step.managed import ManagedUnit, managed_unit_of
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.sites import clean_name
from fullshard.torch.unit.unit import owner_of

__all__ = ["leads_to_others", "used_outside_their_unit"]


def used_outside_their_unit(root: nn.Module) -> list[str]:
    """Names of parameters of a unit of which a use is not below the unit's module."""
    return [
        repr(clean_name(name))
        for name, param in root.named_parameters()
        if owner_of(param) is not None
    ]


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
