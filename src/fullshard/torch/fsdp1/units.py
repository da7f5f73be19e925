# SPDX-License-Identifier: Apache-2.0
"""The translation of FSDP1's arguments and its policy's choices into plans of units."""

import os
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch

from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.core.grouping import group_parameters
from fullshard.core.strategy import ShardingStrategy
from fullshard.torch.comm.compressed import CommunicationCompression, check_compression
from fullshard.torch.comm.process_group import group_of
from fullshard.torch.comm.ranks import Where, compressed, ranks_of
from fullshard.torch.sharding.initialisation import value_of_first_rank
from fullshard.torch.sharding.options import (
    CPUOffload,
    MixedPrecision,
    check_align,
    offload_of,
    precision_of,
)
from fullshard.torch.sharding.owners import AlignOrMatrix
from fullshard.torch.unit.plan import Plan, own_value
from fullshard.torch.unit.sites import ParamSites, clean_name

_FULL_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"  # PyTorch's
_ACCEPTED = {"limit_all_gathers", "use_orig_params"}
"""Options that ask for what is always done."""


@dataclass(frozen=True)
class UnitOptions:
    """The arguments of the wrapper that a policy may choose for each unit.

    Raises `ConfigurationError` for a value of another class, `NotSupportedError` for mixed
    precision where evaluation shall be in full precision.
    """

    process_group: Where
    sharding_strategy: ShardingStrategy | None
    cpu_offload: CPUOffload | None
    mixed_precision: MixedPrecision | None
    compression: CommunicationCompression | None
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    align: AlignOrMatrix

    def __post_init__(self) -> None:
        for name, kind in (
            ("sharding_strategy", ShardingStrategy),
            ("backward_prefetch", BackwardPrefetch),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ConfigurationError(
                    f"{name} must be a fullshard {kind.__name__} or None, got {value!r}"
                )
        check_align(self.align)
        offload_of("cpu_offload", self.cpu_offload)
        precision_of("mixed_precision", self.mixed_precision)
        if self.mixed_precision is not None and os.environ.get(_FULL_IN_EVAL) == "1":
            raise NotSupportedError(
                f"{_FULL_IN_EVAL}=1 asks for full precision in evaluation, which units do not "
                "change to: unset it, or evaluate a copy that is wrapped without mixed_precision"
            )
        check_compression(self.compression)

    def chosen_for(self, module: nn.Module, choices: Mapping[str, Any]) -> "UnitOptions":
        """Return the options of one unit, for which the policy has made ``choices``."""
        names = [each.name for each in fields(self)]
        if unknown := sorted(choices.keys() - set(names) - _ACCEPTED):
            raise ConfigurationError(
                f"the policy's options for {type(module).__name__} have {', '.join(unknown)}, but "
                f"what a policy can choose for one unit is {', '.join(names)}"
            )
        return replace(self, **{name: choices[name] for name in names if name in choices})

    @property
    def strategy(self) -> ShardingStrategy:
        """The strategy, FULL_SHARD if none was named."""
        return self.sharding_strategy or ShardingStrategy.FULL_SHARD

    @property
    def prefetches_backward(self) -> bool:
        """True if the next unit is gathered while this one's backward runs."""
        return self.backward_prefetch is BackwardPrefetch.BACKWARD_PRE

    def plan(self, device: torch.device, sync_states: bool) -> Plan:
        """Make the unit's plan. Collective the first time that its ranks are named."""
        sharding = self.strategy.sharding
        ranks = compressed(ranks_of(self.process_group, sharding), self.compression)
        return Plan(
            ranks,
            device,
            None if sharding.reshard_after_forward else False,
            precision_of("mixed_precision", self.mixed_precision),
            offload_of("cpu_offload", self.cpu_offload),
            value_of_first_rank(ranks, device) if sync_states else own_value,
            "element" if self.align == "matrix" else self.align,
        )

    def attributes(self, plan: Plan) -> dict[str, Any]:
        """Return the attributes that scripts read from FSDP1's wrappers: choices and ranks."""
        comm = plan.ranks.gather if plan.ranks.gather.size > 1 else plan.ranks.replicas
        return {
            "rank": comm.rank,
            "world_size": comm.size,
            "process_group": group_of(comm),
            "compute_device": plan.device,
            "backward_prefetch": self.backward_prefetch,
            "forward_prefetch": self.forward_prefetch,
            "sharding_strategy": self.strategy,
            "mixed_precision": self.mixed_precision or MixedPrecision(),
            "cpu_offload": self.cpu_offload or CPUOffload(),
        }


def in_full_precision(
    root: nn.Module, options: MixedPrecision | None, ignored: AbstractSet[nn.Module]
) -> dict[nn.Module, dict[str, Any]]:
    """Find the modules that mixed precision shall leave alone, as units of their own."""
    if options is None or options.param_dtype is None:
        return {}
    classes = tuple(options._module_classes_to_ignore)
    return {
        module: {"mixed_precision": _FullPrecision(options.param_dtype)}
        for module in root.modules()
        if isinstance(module, classes) and module is not root and module not in ignored
    }


class _FullPrecision(MixedPrecision):
    """Computes in fp32 and returns the dtype of those around it."""

    def __init__(self, around: torch.dtype):
        super().__init__(param_dtype=torch.float32, cast_forward_inputs=True)
        self.output_dtype = around


def parameters_by_module(
    root: nn.Module, chosen: Iterable[nn.Module], params: Sequence[ParamSites]
) -> dict[nn.Module, list[ParamSites]]:
    """Assign ``params`` to the units of the chosen modules, named from that module on.

    ``chosen`` has children before parents: of a module and a wrapper around it, which have one name
    in the plain model, the inner one owns.
    """
    paths = {module: clean_name(path) for path, module in root.named_modules()}
    by_path: dict[str, nn.Module] = {}
    members: dict[nn.Module, list[ParamSites]] = {}
    for module in chosen:
        by_path.setdefault(paths[module], module)
        members[module] = []
    by_name = {each.spec.name: each for each in params}
    groups = group_parameters((each.spec for each in params), by_path)
    for path, module in by_path.items():
        members[module] = [by_name[spec.name].relative_to(path) for spec in groups[path]]
    return members


def members_by_name(
    root: nn.Module, members: Mapping[nn.Module, list[ParamSites]]
) -> dict[str, list[ParamSites]]:
    """Key the same by the paths of the modules, including wrappers' parts of them."""
    paths = {module: path for path, module in root.named_modules()}
    return {paths[module]: params for module, params in members.items()}
