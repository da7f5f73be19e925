# SPDX-License-Identifier: Apache-2.0
"""What the two front doors share: the check of what is to be sharded, and the act.

The doors (`fullshard.torch.fsdp1`, `fullshard.torch.fsdp2`) differ in who chooses the units, a
policy or the caller, and in what is left standing, a wrapper or the module with another class.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import nn

from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.core.strategy import Prefetch
from fullshard.torch.groups import Where, compute_device
from fullshard.torch.hooks import ManagedUnit, managed_unit_of
from fullshard.torch.modules import ParamSites, device_of, find_parameters
from fullshard.torch.parameter import ShardedParameter
from fullshard.torch.runtime import Runtime, runtime_of
from fullshard.torch.unit import Ranks, Unit

__all__ = [
    "Plan",
    "require_gradient_sync",
    "set_prefetch",
    "shard_modules",
    "shardable_parameters",
    "take_states_of_first_rank",
]


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
    managed = ManagedUnit(unit, modules, plan.reshard_after_forward, Runtime.adopt)
    managed.ends_with_backward = any(
        param.requires_grad and not isinstance(param, ShardedParameter)
        for module in modules
        for param in module.parameters()
    )


def shardable_parameters(
    modules: Sequence[nn.Module],
    where: Where,
    ignored: AbstractSet[nn.Parameter] = frozenset(),
    device_id: int | torch.device | None = None,
) -> tuple[list[ParamSites], torch.device]:
    """The parameters that are to be sharded now, all checked, and where they shall live."""
    params = find_parameters(modules, ignored)
    device = device_of(params) or torch.device("cpu")
    if device.type == "meta":
        raise NotSupportedError(
            f"parameter {params[0].spec.name!r} is on the meta device, which is not supported yet; "
            "build the module on a real device"
        )
    return params, compute_device(where, device, device_id)


def take_states_of_first_rank(
    modules: Sequence[nn.Module], params: Sequence[ParamSites], plan: Plan
) -> None:
    """Give ``params`` and the modules' buffers the values they have on the first rank. Collective.

    One tensor at a time, so that a device holds one full parameter, not the model.
    """
    buffers = {buffer for module in modules for buffer in module.buffers()}
    for tensor in [*(each.param.detach() for each in params), *buffers]:
        sent = tensor.to(plan.device, copy=True, memory_format=torch.contiguous_format)
        plan.ranks.broadcast(sent)
        tensor.copy_(sent)


def require_gradient_sync(module: nn.Module, required: bool, *, recurse: bool = True) -> None:
    """Say if the units of ``module`` (``recurse``: and below) are reduced after backward."""
    for each in module.modules() if recurse else (module,):
        managed = managed_unit_of(each)
        if managed is not None:
            managed.requires_gradient_sync = required


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
