# SPDX-License-Identifier: Apache-2.0
"""What the two front doors share: the check of what is to be sharded, and the act.

The doors (`fullshard.torch.fsdp1`, `fullshard.torch.fsdp2`) differ in who chooses the units, a
policy or the caller, and in what is left standing, a wrapper or the module with another class.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.core.strategy import Prefetch
from fullshard.torch.groups import Where, compute_device
from fullshard.torch.hooks import ManagedUnit
from fullshard.torch.modules import ParamSites, device_of, find_parameters
from fullshard.torch.runtime import Runtime, runtime_of
from fullshard.torch.unit import Ranks, Unit

__all__ = ["Plan", "set_prefetch", "shard_modules", "shardable_parameters"]


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before the first parameter is touched."""

    ranks: Ranks
    device: torch.device
    reshard_after_forward: bool | None


def shard_modules(modules: Sequence[nn.Module], params: Sequence[ParamSites], plan: Plan) -> None:
    """Make one unit of ``params`` and let the forwards of ``modules`` drive it."""
    name = type(modules[0]).__name__
    unit = Unit(name, params, plan.ranks, plan.device)
    ManagedUnit(unit, modules, plan.reshard_after_forward, Runtime.adopt)


def shardable_parameters(
    modules: Sequence[nn.Module], where: Where
) -> tuple[list[ParamSites], torch.device]:
    """The parameters that are to be sharded now, all checked, and where they shall live."""
    params = find_parameters(modules)
    device = device_of(params) or torch.device("cpu")
    if device.type == "meta":
        raise NotSupportedError(
            f"parameter {params[0].spec.name!r} is on the meta device, which is not supported yet; "
            "build the module on a real device"
        )
    return params, compute_device(where, device)


def set_prefetch(module: nn.Module, forward: int = 1, backward: int = 1) -> None:
    """Set how many units are gathered ahead of use below the root ``module``, between steps.

    ``forward`` and ``backward`` count units beyond the one in use: 0 gathers each when it is
    needed. Every unit more costs the memory of one full unit. All ranks must choose the same.
    """
    prefetch = Prefetch(forward, backward)
    runtime = runtime_of(module)
    if not runtime.idle:
        raise UsageError("prefetch can only be changed between steps, not in the middle of one")
    runtime.set_prefetch(prefetch)
