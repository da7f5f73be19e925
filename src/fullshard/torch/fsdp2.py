# SPDX-License-Identifier: Apache-2.0
"""FSDP2's door: a function that shards modules in place, bottom-up."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fullshard.core.errors import ConfigurationError, NotSupportedError, UsageError
from fullshard.torch.groups import Where, ranks_of
from fullshard.torch.hooks import managed_unit_of
from fullshard.torch.modules import ignored_parts, move_buffers
from fullshard.torch.options import MixedPrecisionPolicy, OffloadPolicy, refuse_unsupported
from fullshard.torch.shard_modules import (
    Plan,
    require_gradient_sync,
    shard_modules,
    shardable_parameters,
)

__all__ = ["FSDPModule", "fully_shard"]


class FSDPModule:
    """What a module's class gains from `fully_shard`."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose, between steps, if full parameters are dropped after forward."""
        assert isinstance(self, nn.Module)
        for module in self.modules() if recurse else (self,):
            managed = managed_unit_of(module)
            if managed is not None:
                managed.set_reshard_after_forward(reshard_after_forward)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Choose if the next backwards reduce gradients, or keep them full for a later one.

        With False, gradients of several micro-batches add up without communication, at the price
        of the full gradients' memory on every rank; the first backward with True again reduces
        their sum. Until then ``.grad`` has none of it. All ranks must choose the same.
        """
        assert isinstance(self, nn.Module)
        require_gradient_sync(self, requires_gradient_sync, recurse=recurse)


_sharded_classes: dict[type[nn.Module], type[nn.Module]] = {}


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: Where = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 - frozen
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Shard the parameters of ``module`` that are not sharded yet, in place, as one unit.

    Call it bottom-up: first on the blocks, then on the root, which takes what is left. Of a list of
    modules the parameters form one unit, gathered when the first of them runs. Collective over the
    ranks of ``mesh``; every rank must hold the same values.

    Args:
        module: the module or modules; their parameters must be on one device.
        mesh: a 1-D ``DeviceMesh`` (or a process group); None is the default group.
        reshard_after_forward: drop full parameters between forward and backward. None: yes, but not
            for the root, whose parameters backward needs at once.
        shard_placement_fn: not supported yet, like the following ones.
        mp_policy: see there.
        offload_policy: see there.
        ignored_params: parameters that stay as they are on every rank, their gradients unreduced.
        dp_mesh_dims: see there.

    Returns:
        ``module``; its class is now a subclass of its own class and of `FSDPModule`.

    Raises:
        ConfigurationError: parameters on several devices, or a mesh that is none.
        NotSupportedError: an argument that this version cannot honour.
        UsageError: no process group, or a module that is sharded already.
    """
    refuse_unsupported(
        {
            "shard_placement_fn": shard_placement_fn,
            "mp_policy": mp_policy,
            "offload_policy": offload_policy,
            "dp_mesh_dims": dp_mesh_dims,
        }
    )
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise NotSupportedError(
            f"reshard_after_forward={reshard_after_forward!r} (a group size) is not supported yet; "
            "use True, False or None"
        )
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    _check_modules(modules)
    _, ignored = ignored_parts({"ignored_params": ignored_params})
    params, device = shardable_parameters(modules, mesh, ignored)
    ranks = ranks_of(mesh, sharded=True)
    for each in modules:
        move_buffers(each, device)
        each.__class__ = _sharded_class(type(each))
    shard_modules(modules, params, Plan(ranks, device, reshard_after_forward))
    return module


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ConfigurationError("fully_shard needs at least one module, got an empty list")
    for each in modules:
        if not isinstance(each, nn.Module) or isinstance(each, (nn.ModuleList, nn.ModuleDict)):
            raise ConfigurationError(
                "fully_shard needs modules that have a forward, got "
                f"{type(each).__name__}; shard the modules inside it"
            )
        if managed_unit_of(each) is not None:
            raise UsageError(f"this {type(each).__name__} is sharded already")


def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    if cls not in _sharded_classes:
        _sharded_classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    return _sharded_classes[cls]
