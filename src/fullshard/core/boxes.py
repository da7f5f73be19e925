# SPDX-License-Identifier: Apache-2.0
"""Rectangles: what an interval of a flattened tensor is in the tensor's own dims.

Checkpoint formats and arrays on meshes speak of n-d rectangles, our shards are intervals
([Note: Equal slices] in `fullshard.core.layout`). An interval of an n-d tensor in row-major order
is at most 2n-1 rectangles: a head and a tail in every dim but the first, and one body.
"""

import math
from dataclasses import dataclass

from fullshard.core.errors import ConfigurationError


@dataclass(frozen=True)
class Box:
    """An n-d rectangle of a tensor: where it starts and how far it reaches, dim by dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in the box; a box of no dims has one."""
        return math.prod(self.sizes)

    def moved(self, by: tuple[int, ...]) -> "Box":
        """Return the box that starts ``by`` farther."""
        return Box(tuple(a + b for a, b in zip(self.offsets, by, strict=True)), self.sizes)

    @property
    def last(self) -> tuple[int, ...]:
        """The place of the last element."""
        ends = zip(self.offsets, self.sizes, strict=True)
        return tuple(offset + size - 1 for offset, size in ends)


def boxes_of_interval(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The boxes of elements [start, stop) of a row-major tensor, in order, at most 2n-1."""
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise ConfigurationError(
            f"interval [{start}, {stop}) is not within the {numel} elements of shape {shape}"
        )
    return _boxes(shape, start, stop)


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row_shape = shape[1:]
    row_numel = math.prod(row_shape)
    first, into_first = divmod(start, row_numel)
    last, into_last = divmod(stop, row_numel)
    if first == last:
        return _in_row(first, _boxes(row_shape, into_first, into_last))
    boxes = []
    if into_first:
        boxes += _in_row(first, _boxes(row_shape, into_first, row_numel))
        first += 1
    if first < last:
        boxes.append(Box((first, *(0 for _ in row_shape)), (last - first, *row_shape)))
    if into_last:
        boxes += _in_row(last, _boxes(row_shape, 0, into_last))
    return boxes


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes]


def intersection(a: Box, b: Box) -> Box | None:
    """The box common to ``a`` and ``b``, or None if they do not meet."""
    if len(a.offsets) != len(b.offsets):
        raise ConfigurationError(
            f"boxes of {len(a.offsets)} and {len(b.offsets)} dims cannot be intersected"
        )
    offsets = tuple(map(max, a.offsets, b.offsets))
    ends = tuple(
        min(ao + an, bo + bn)
        for ao, an, bo, bn in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )
    sizes = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None
