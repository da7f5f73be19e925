# SPDX-License-Identifier: Apache-2.0
"""The shard of one rank between steps: slices of a unit, and the parameters that look into them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.core.errors import ConfigurationError
from fullshard.core.layout import Layout, Segment, Slot, Span
from fullshard.torch.tensor.ownership import Ownership, next_serial
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.tensor.placements import Placed, placed
from fullshard.torch.unit.buffers import FlatBuffer, dtype_of
from fullshard.torch.unit.extensions import is_extended, plain_data, without_values
from fullshard.torch.unit.guards.replaced import mark_replaced, take_over_hooks
from fullshard.torch.unit.plan import Plan, Values
from fullshard.torch.unit.sites import ParamSites, notes_on

_requires_grad = attrgetter("requires_grad")


@dataclass(frozen=True)
class Place:
    """The place of one parameter in the layout, and this rank's span of it."""

    segment: Segment
    slot: Slot
    number: int  # of the segment in the layout, and so of its flat view in a buffer
    grad_number: int  # of the segment among the trainable ones, -1 if frozen
    span: Span
    in_slice: slice  # where the span lies in this rank's slice of the segment
    room: int  # from there to the next span: the elements of this one, then zeros


class Shards:
    """This rank's slices of a unit's segments in one buffer, and the `ShardedParameter`s.

    ``params``, ``places`` and ``sharded`` go together, in the order of the layout. Parameters in
    ``known`` (by their name in the unit) stay the same objects and look into the new buffer.
    """

    def __init__(
        self,
        params: Sequence[ParamSites],
        layout: Layout,
        plan: Plan,
        device: torch.device,
        known: Mapping[str, ShardedParameter],
    ):
        self.layout = layout
        self.device = device
        self._ranks = plan.ranks  # not the plan, whose values would stay
        self.trainable: list[Segment] = [
            segment for segment in layout.segments if segment.trainable
        ]
        self.places: list[Place] = list(self._find_places())
        by_name = {each.spec.name: each for each in params}
        self.params: list[ParamSites] = [by_name[place.slot.spec.name] for place in self.places]
        rank = plan.ranks.gather.rank
        sizes = [(each.numel_of(rank), dtype_of(each.dtype)) for each in layout.segments]
        self.buffer: FlatBuffer = FlatBuffer(sizes, device, pin=plan.pin and device.type == "cpu")
        self.buffer.zero_()  # padding must be a number
        values = plan.values
        self.sharded: list[ShardedParameter] = []
        for each, place in zip(self.params, self.places, strict=True):
            self.sharded.append(self._shard_one(each, place, values, known.get(each.spec.name)))
        # The originals are not needed any more, and must not keep their memory.
        self.params = [replace(each, param=_stub(each.param)) for each in self.params]
        self.seen_trainable: list[bool] = [param.requires_grad for param in self.sharded]

    @property
    def flats(self) -> list[Tensor]:
        """This rank's slice of each segment."""
        return self.buffer.flats

    @property
    def toggled(self) -> bool:
        """True if ``requires_grad`` of a parameter is not what it was when last looked at."""
        return list(map(_requires_grad, self.sharded)) != self.seen_trainable

    def _find_places(self) -> Iterator[Place]:
        rank = self._ranks.gather.rank
        for number, segment in enumerate(self.layout.segments):
            grad_number = self.trainable.index(segment) if segment.trainable else -1
            spans = [segment.span(slot, rank) for slot in segment.slots]
            starts = [segment.offset_in_slice(slot, rank) for slot in segment.slots]
            held = [start for start, span in zip(starts, spans, strict=True) if span.numel]
            ends = iter([*held[1:], segment.numel_of(rank)])
            for slot, span, start in zip(segment.slots, spans, starts, strict=True):
                in_slice = slice(start, start + span.numel)
                room = next(ends) - start if span.numel else 0
                yield Place(segment, slot, number, grad_number, span, in_slice, room)

    def _shard_one(
        self, each: ParamSites, place: Place, values: Values, known: ShardedParameter | None
    ) -> ShardedParameter:
        local = self.buffer.flats[place.number][place.in_slice]
        spec, ranks = place.slot.spec, self._ranks
        shape = spec.shape if each.tensor_parallel is None else each.tensor_parallel.shape
        ownership = Ownership(
            name=spec.name,
            shape=shape,
            spans=place.segment.spans(place.slot),
            comm=ranks.gather,
            device_mesh=ranks.device_mesh,
            tensor_parallel=each.tensor_parallel,
            serial=(serial := next_serial(ranks.gather)),
            unit=self.sharded[0].ownership.unit if self.sharded else serial,
            dim=spec.cut_dim if place.segment.travels_apart else 0,
            placed=self._placed(each, place, shape),
            whole_on=spec.owner,
            room=place.room,
        )
        value = values(each)
        if not (value.device.type == "meta" and self.device.type != "meta"):
            local.copy_(span_of(value, ownership))
        if known is not None and known.is_meta == local.is_meta:
            known.ownership = replace(ownership, name=known.ownership.name)
            known.hold(local)
            return known
        param = ShardedParameter.parameter(local, ownership, requires_grad=spec.trainable)
        param.__dict__.update(notes_on(each.param))
        take_over_hooks(each.param, param)
        mark_replaced(each.param, spec.name)
        return param

    def pieces(self) -> list[tuple[list[int], list[ShardedParameter | None]]]:
        """Split this rank's slice of each trainable segment into spans and the padding between.

        For each piece its elements, and the parameter whose span it is, None for padding.
        """
        found: list[tuple[list[int], list[ShardedParameter | None]]] = []
        for number, segment in enumerate(self.trainable):
            numels: list[int] = []
            params: list[ShardedParameter | None] = []
            end = 0
            for param, place in zip(self.sharded, self.places, strict=True):
                if place.grad_number == number:
                    start = place.in_slice.start if place.span.numel else end
                    if start > end:
                        numels.append(start - end)
                        params.append(None)
                    numels.append(place.span.numel)
                    params.append(param)
                    end = start + place.span.numel
            rest = segment.numel_of(self._ranks.gather.rank) - end
            found.append(([*numels, rest], [*params, None]) if rest else (numels, params))
        return found

    def _placed(self, each: ParamSites, place: Place, shape: tuple[int, ...]) -> Placed | None:
        """Return what DTensor calls the place, if ranks hold whole rows and have a mesh."""
        ranks, spec = self._ranks, place.slot.spec
        if not place.segment.by_row or ranks.device_mesh is None:
            return None
        mesh, size = ranks.device_mesh, ranks.gather.size
        return placed(spec.name, shape, mesh, size, each.tensor_parallel, spec.cut_dim)

    def rename(self, prefix: str) -> None:
        """Name the parameters as the whole model names them."""
        for place, param in zip(self.places, self.sharded, strict=True):
            full_name = f"{prefix}.{place.slot.spec.name}" if prefix else place.slot.spec.name
            param.ownership = replace(param.ownership, name=full_name)

    def shown(self) -> list[Tensor]:
        """The values that the modules show now in the places of the parameters."""
        return [each.shown for each in self.params]


def _stub(original: Tensor) -> Any:
    """Keep everything of a parameter but its values: class, shape, dtype, notes of users."""
    if is_extended(original):
        return without_values(original)
    nothing = torch.zeros((), dtype=original.dtype, device=original.device)
    stub = nn.Parameter(nothing.expand(original.shape), requires_grad=False)
    stub.__dict__.update(notes_on(original))
    return stub


def span_of(value: Tensor, ownership: Ownership) -> Tensor:
    """Return this rank's elements of a full tensor, or of one that is sharded.

    Collective if the tensor is sharded otherwise than ``ownership`` says. Raises
    `ConfigurationError` for another shape.
    """
    if isinstance(value, ShardedParameter):
        if value.ownership.agrees_with(ownership):
            return value.local
        value = value.gathered()
    value = plain_data(value)
    if tuple(value.shape) != ownership.shape:
        raise ConfigurationError(
            f"parameter {ownership.name!r} has shape {ownership.shape}, got a value of shape "
            f"{tuple(value.shape)}"
        )
    return ownership.cut(value)
