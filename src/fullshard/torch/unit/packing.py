# SPDX-License-Identifier: Apache-2.0
"""Parameters that travel in another order than their own: the rows of several, rank by rank.

See [Note: Whole rows] in `fullshard.core.layout`. A packed segment travels as one slice a rank,
each with that rank's rows of every parameter. Here a parameter and what travels are taken apart
into pieces of equal shapes: all full chunks of rows as one, and the last chunk if it is shorter.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fullshard.core.layout import Segment, Slot
from fullshard.torch.unit.buffers import FlatBuffer
from fullshard.torch.unit.plan import Plan


def pieces_of(value: Tensor, slot: Slot, shards: int) -> list[Tensor]:
    """Take a tensor of the parameter's shape apart into the chunks that ranks hold: views."""
    rows = value.movedim(slot.spec.cut_dim, 0)
    chunks, chunk, rest = _counts(slot, shards)
    pieces = [rows[: chunks * chunk].view(chunks, chunk, *rows.shape[1:])] if chunks else []
    return [*pieces, rows[chunks * chunk :]] if rest else pieces


def travelling_pieces(flat: Tensor, segment: Segment, slot: Slot) -> list[Tensor]:
    """The places of `pieces_of` in a packed segment as it travels: views of the same shapes."""
    shards, spec = segment.shards, slot.spec
    chunks, chunk, rest = _counts(slot, shards)
    row = spec.shape[: spec.cut_dim] + spec.shape[spec.cut_dim + 1 :]
    start, numel = slot.start // shards, math.prod(row)
    slices = flat.view(shards, segment.slice_numel)
    held = slices[:chunks, start : start + chunk * numel]
    pieces = [held.view(chunks, chunk, *row)] if chunks else []
    if rest:
        pieces.append(slices[chunks, start : start + rest * numel].view(rest, *row))
    return pieces


def _counts(slot: Slot, shards: int) -> tuple[int, int, int]:
    """Count the ranks with full chunks, the rows of a chunk, and those of the last, shorter one."""
    rows = slot.spec.shape[slot.spec.cut_dim]
    chunk = -(-rows // shards)
    return (rows // chunk, chunk, rows % chunk) if chunk else (0, 0, 0)


class Unpacking:
    """The copies from where packed segments arrive to their parameters, which stay the same."""

    def __init__(self, segments: Iterable[tuple[Segment, Tensor, Tensor]]):
        pairs = [pair for each in segments for pair in _both(*each)]
        self._params = [mine for mine, _ in pairs]
        self._arrived = [theirs for _, theirs in pairs]

    def copy(self) -> None:
        """Copy what has arrived."""
        if self._params:
            torch._foreach_copy_(self._params, self._arrived)


class PackedArrival:
    """Memory for packed segments: where they arrive, and where their parameters are.

    Only one of the two is held but for the moment of the copy.
    """

    def __init__(self, segments: Sequence[tuple[Segment, torch.dtype]], plan: Plan):
        sizes = [(segment.full_numel, dtype) for segment, dtype in segments]
        self.arriving: FlatBuffer = FlatBuffer(sizes, plan.device)
        self.there: FlatBuffer = FlatBuffer(sizes, plan.device)
        self.flats: tuple[list[Tensor], list[Tensor]] = (
            self.arriving.flats,
            self.there.flats,
        )
        self._unpacking = Unpacking(
            (segment, arrived, there)
            for (segment, _), arrived, there in zip(segments, *self.flats, strict=True)
        )
        self._fills = plan.ranks.block is not None  # what lies between parameters is sent, too

    @property
    def bytes(self) -> int:
        """Bytes held now."""
        return sum(each.bytes for each in (self.arriving, self.there) if each.allocated)

    def unpack(self) -> None:
        """Copy what has arrived to the parameters."""
        self.there.allocate()
        if self._fills:
            self.there.zero_()
        self._unpacking.copy()
        self.arriving.release()


def _both(segment: Segment, travelling: Tensor, full: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for slot in segment.slots:
        param = full[slot.start : slot.stop].view(slot.spec.shape)
        yield from zip(
            pieces_of(param, slot, segment.shards),
            travelling_pieces(travelling, segment, slot),
            strict=True,
        )
