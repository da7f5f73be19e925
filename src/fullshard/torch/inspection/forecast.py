# SPDX-License-Identifier: Apache-2.0
"""Prices of the units of a model as they stand, and the forecast of its next step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from fullshard.core.forecast import Sent, UnitCost, forecast, step_events, unit_cost
from fullshard.core.strategy import Prefetch
from fullshard.torch.comm.compressed import CompressedComm
from fullshard.torch.step.executor import policy_of
from fullshard.torch.step.managed import ManagedUnit, managed_unit_of
from fullshard.torch.step.tracker import Tracker
from fullshard.torch.unit.buffers import dtype_of
from fullshard.torch.unit.sites import clean_name
from fullshard.torch.unit.unit import Unit


@dataclass(frozen=True)
class NamedUnit:
    """A unit by its name in the model at hand; ``around`` numbers the unit that encloses it."""

    name: str
    managed: ManagedUnit
    around: int | None

    @property
    def unit(self) -> Unit:
        """The unit itself."""
        return self.managed.unit


@dataclass(frozen=True)
class StepForecast:
    """The bytes that units will hold beyond their shards, and send, in one step."""

    peak_bytes: int
    sent: dict[str, Sent]  # by the unit's name


def named_units(model: nn.Module) -> list[NamedUnit]:
    """List the units of ``model`` in the order of its modules, each where its first module is."""
    found: list[NamedUnit] = []
    numbers: dict[ManagedUnit, int] = {}

    def visit(module: nn.Module, path: str, around: int | None, seen: set[nn.Module]) -> None:
        if module in seen:
            return
        seen.add(module)
        managed = managed_unit_of(module)
        if managed is not None:
            if managed not in numbers:
                numbers[managed] = len(found)
                found.append(NamedUnit(clean_name(path) or "(root)", managed, around))
            around = numbers[managed]
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name, around, seen)

    visit(model, "", None, set())
    return found


def forecast_step(units: Sequence[NamedUnit]) -> StepForecast:
    """Forecast what one forward and backward holds and sends with the present settings.

    The forecast is of a step after an optimizer's (full parameters that were kept are gathered
    again), and not of the very first, in which nothing is gathered ahead.
    """
    around = [each.around for each in units]
    trained = [each.unit.trainable for each in units]
    numbers = {each.managed: number for number, each in enumerate(units)}
    policies = {}
    for number, each in enumerate(units):
        managed = each.managed
        reduced = each.unit.trainable and managed.step.requires_gradient_sync
        root = managed.number == 0 if managed.tracker is not None else each.around is None
        policy = policy_of(managed, reduced=reduced, root=root)
        policies[number] = replace(
            policy,
            prefetch_forward=_numbered(managed.prefetch_forward, numbers),
            prefetch_backward=_numbered(managed.prefetch_backward, numbers),
        )
    costs = {number: cost_of(each.unit) for number, each in enumerate(units)}
    tracker = units[0].managed.tracker if units else None
    prefetch = tracker.prefetch if isinstance(tracker, Tracker) else Prefetch()
    found = forecast(step_events(around, trained), policies, costs, prefetch)
    sent = {units[number].name: each for number, each in found.sent.items()}
    return StepForecast(found.peak_bytes, sent)


def _numbered(
    chosen: list[ManagedUnit] | None, numbers: dict[ManagedUnit, int]
) -> tuple[int, ...] | None:
    return None if chosen is None else tuple(numbers[each] for each in chosen if each in numbers)


def cost_of(unit: Unit) -> UnitCost:
    """Price the ops on ``unit`` as it stands; see `fullshard.core.forecast.unit_cost`."""
    layout, ranks, settings = unit.layout, unit.ranks, unit.settings
    own = settings.hook is not None  # a communication hook of the user's takes the sums' place
    fulls = [
        _of_size(each.grad_dtype, each.full_numel, unit)
        for each in layout.segments
        if each.trainable
    ]
    steps, reduce = ranks.gather_of_steps, ranks.reduce
    gathered, reduced = layout.sent_bytes, layout.grad_sent_bytes
    if isinstance(steps, CompressedComm) and isinstance(reduce, CompressedComm):
        shards = [_of_size(each.full_dtype, each.full_numel, unit) for each in layout.segments]
        gathered = sum(map(steps.gather_part_bytes, shards))
        reduced = sum(map(reduce.reduce_part_bytes, fulls))
    return unit_cost(
        layout,
        replicas=ranks.replicas.size if settings.all_reduce and not own else 1,
        block=ranks.block.size if ranks.block is not None else 1,
        resident=unit.resident,
        scratch_bytes=sum(map(reduce.reduce_scratch_bytes, fulls)),
        sent_bytes=(gathered, 0 if own else reduced),
    )


def _of_size(dtype: str, numel: int, unit: Unit) -> torch.Tensor:
    """Make a tensor of that many elements that takes no memory."""
    return torch.empty((), dtype=dtype_of(dtype), device=unit.device).expand(numel)
