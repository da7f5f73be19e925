# SPDX-License-Identifier: Apache-2.0
"""Full parameters between steps, shown to be read and changed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fullshard.core.errors import ConfigurationError, UsageError
from fullshard.torch.comm.watch.roll_call import call_roll
from fullshard.torch.step.managed import ManagedUnit, managed_units
from fullshard.torch.step.paths import make_ties
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.shards import span_of
from fullshard.torch.unit.sites import notes_on
from fullshard.torch.unit.unit import Unit

_INSTEAD = (
    "enter it on every rank, and do inside what one rank is to do: "
    "with summon_full_params(model, rank0_only=True, writeback=False): if rank == 0: ..."
)


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Let modules show full parameters within, in the dtypes in which they rest.

    Collective, between steps. All units of ``module`` (``recurse``: and below) are whole at the
    same time, which costs their memory. ``writeback``: on leaving, by an error too, every rank
    keeps its spans of what it sees then; change them alike on all ranks. ``rank0_only``: only the
    first rank sees them. ``offload_to_cpu``: in host memory. ``with_grads``: with full ``.grad``,
    written back too.

    Raises:
        ConfigurationError: ``writeback`` with ``rank0_only``: other ranks have nothing to write.
        UsageError: in the middle of a step, or within another such context; on some ranks only.
    """
    if writeback and rank0_only:
        raise ConfigurationError(
            "writeback with rank0_only is impossible: other ranks see no full parameters whose "
            "spans they could keep; pass writeback=False, or change them on all ranks"
        )
    chosen = list(managed_units(module, recurse=recurse))
    for managed in chosen:
        if managed.summoned or managed.in_step:
            raise UsageError(
                f"unit {managed.unit.name!r} is in the middle of a step, or summoned already; "
                "summon full parameters between steps"
            )
    call_roll([managed.unit.ranks.gather for managed in chosen], "summon_full_params()", _INSTEAD)
    make_ties(module)
    for managed in chosen:
        if not managed.unit.on_meta:
            managed.unit.check_shown()
    try:
        for managed in chosen:
            seen = managed.unit.ranks.first or not rank0_only
            _show(managed, seen, offload_to_cpu, with_grads)
        try:
            yield
        finally:  # what was changed before an error stays changed, as in memory of one's own
            if writeback:
                for managed in chosen:
                    _write_back(managed.unit, with_grads)
    finally:
        for managed in chosen:
            if managed.summoned:
                managed.summoned = False
                managed.unit.show_sharded()


def _show(managed: ManagedUnit, seen: bool, offload: bool, with_grads: bool) -> None:
    unit = managed.unit
    full = unit.gather_values()
    grads = {
        index: param.grad.gathered()
        for index, param in enumerate(unit.sharded)
        if with_grads and isinstance(param.grad, ShardedParameter)
    }
    managed.summoned = True
    if not seen:
        return
    for index, (each, view) in enumerate(zip(unit.params, unit.full_views(full), strict=True)):
        data = view.cpu() if offload else view
        param = nn.Parameter(data, requires_grad=unit.sharded[index].requires_grad)
        param.__dict__.update(notes_on(each.param))
        if index in grads:
            param.grad = grads[index].to(data.device)
        each.put(param)


@torch.no_grad()
def _write_back(unit: Unit, with_grads: bool) -> None:
    for sharded, shown in zip(unit.sharded, (p.shown for p in unit.params), strict=True):
        sharded.local.copy_(span_of(shown, sharded.ownership))
        if not with_grads:
            continue
        if shown.grad is None:
            sharded.grad = None
        elif isinstance(sharded.grad, ShardedParameter):
            sharded.grad.local.copy_(span_of(shown.grad, sharded.ownership))
        else:
            local = span_of(shown.grad, sharded.ownership).to(sharded.local.device, copy=True)
            sharded.grad = ShardedParameter.value(local, sharded.ownership)
