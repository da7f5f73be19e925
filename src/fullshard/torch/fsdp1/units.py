# SPDX-License-Identifier: Apache-2.0
"""The translation of FSDP1's arguments and its policy's choices into plans of units."""

import os
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn

from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.core.grouping import group_parameters
from fullshard.core.strategy import BackwardPrefetch, ShardingStrategy
from fullshard.torch.comm.compressed import check_compression
from fullshard.torch.comm.process_group import group_of
from fullshard.torch.comm.ranks import compressed, ranks_of
from fullshard.torch.sharding.initialisation import value_of_first_rank
from fullshard.torch.sharding.options import (
    CPUOffload,
    MixedPrecision,
    check_align,
    offload_of,
    precision_of,
)
from fullshard.torch.unit.plan import Plan, own_value
from fullshard.torch.unit.sites import ParamSites, clean_name

__all__ = [
    "attributes_of",
    "check_unit_options",
    "in_full_precision",
    "members_by_name",
    "parameters_by_module",
    "plan_of",
    "prefetch_of",
    "prefetches_backward",
]

_ACCEPTED = {"limit_all_gathers", "use_orig_params"}
"""Options that ask for what is always done."""


_FULL_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"  # PyTorch's


def check_unit_options(
    given: dict[str, Any], overrides: Mapping[nn.Module, Mapping[str, Any]]
) -> None:
    """Refuse options that a unit does not have, from the caller or from the policy."""
    for module, its_own in overrides.items():
        if unknown := sorted(its_own.keys() - given.keys() - _ACCEPTED):
            raise ConfigurationError(
                f"the policy's options for {type(module).__name__} have {', '.join(unknown)}, but "
                f"what a policy can choose for one unit is {', '.join(given)}"
            )
        options = {**given, **its_own}
        strategy = options["sharding_strategy"]
        if strategy is not None and not isinstance(strategy, ShardingStrategy):
            raise ConfigurationError(
                f"sharding_strategy must be a fullshard ShardingStrategy or None, got {strategy!r}"
            )
        prefetch = options["backward_prefetch"]
        if prefetch is not None and not isinstance(prefetch, BackwardPrefetch):
            raise ConfigurationError(
                f"backward_prefetch must be a fullshard BackwardPrefetch or None, got {prefetch!r}"
            )
        check_align(options["align"])
        offload_of("cpu_offload", options["cpu_offload"])
        precision_of("mixed_precision", options["mixed_precision"])
        if options["mixed_precision"] is not None and os.environ.get(_FULL_IN_EVAL) == "1":
            raise NotSupportedError(
                f"{_FULL_IN_EVAL}=1 asks for full precision in evaluation, which units do not "
                "change to: unset it, or evaluate a copy that is wrapped without mixed_precision"
            )
        check_compression(options["compression"])


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
        object.__setattr__(self, "output_dtype", around)


def plan_of(options: dict[str, Any], device: torch.device, sync_states: bool) -> Plan:
    """Make the plan of a unit from its options."""
    sharding = (options["sharding_strategy"] or ShardingStrategy.FULL_SHARD).sharding
    ranks = compressed(ranks_of(options["process_group"], sharding), options["compression"])
    return Plan(
        ranks,
        device,
        None if sharding.reshard_after_forward else False,
        precision_of("mixed_precision", options["mixed_precision"]),
        offload_of("cpu_offload", options["cpu_offload"]),
        value_of_first_rank(ranks, device) if sync_states else own_value,
        "element" if options["align"] == "matrix" else options["align"],
    )


def prefetches_backward(options: Mapping[str, Any]) -> bool:
    """True if the next unit is gathered while this one's backward runs."""
    return options["backward_prefetch"] is BackwardPrefetch.BACKWARD_PRE


def prefetch_of(root: Mapping[str, Any], units: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Return the depths of prefetch in forward and backward, where a unit has no other wish."""
    forward = 2 if root["forward_prefetch"] else 1
    return forward, int(any(prefetches_backward(options) for options in units))


def attributes_of(options: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return the attributes that scripts read from FSDP1's wrappers: choices and ranks."""
    ranks = plan.ranks
    comm = ranks.gather if ranks.gather.size > 1 else ranks.replicas
    return {
        "rank": comm.rank,
        "world_size": comm.size,
        "process_group": group_of(comm),
        "compute_device": plan.device,
        "backward_prefetch": options["backward_prefetch"],
        "forward_prefetch": options["forward_prefetch"],
        "sharding_strategy": options["sharding_strategy"] or ShardingStrategy.FULL_SHARD,
        "mixed_precision": options["mixed_precision"] or MixedPrecision(),
        "cpu_offload": options["cpu_offload"] or CPUOffload(),
    }


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
