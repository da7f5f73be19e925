# SPDX-License-Identifier: Apache-2.0
"""Regular cuts of a tensor as a rule of a few numbers, in place of a list of boxes.

A rule is a tuple of slicings. The first cuts the whole tensor into parts, the next each of those,
and so on: all the parts together have each element once, whatever the numbers are. Parts are
numbered in row-major order of the slicings. It is what meshes do, dim by dim, and what an engine
does that cuts a flat buffer into equal slices: the buffer's edges fall where they may.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from fullshard.core.boxes import Box, boxes_of_interval, intersection


@dataclass(frozen=True)
class Slicing:
    """Part i has [i * size - start, (i + 1) * size - start) of dim ``dim``, cut off at its ends.

    With ``dim`` None it is an interval of the elements in row-major order, not of a dim.
    """

    dim: int | None
    start: int
    size: int
    parts: int

    def interval(self, number: int, length: int) -> tuple[int, int]:
        """[first, stop) of part ``number`` of ``length`` rows or elements; may be empty."""
        first = number * self.size - self.start
        return min(max(first, 0), length), min(max(first + self.size, 0), length)

    def meeting(self, first: int, last: int) -> range:
        """The numbers of the parts that have rows or elements from ``first`` to ``last``."""
        return range((first + self.start) // self.size, (last + self.start) // self.size + 1)


Run = tuple[int, int, int]
"""First, step and count of numbers that follow each other regularly."""


@dataclass(frozen=True)
class Tile:
    """Part ``index`` of a rule: how one rank says which of a tensor's elements it has."""

    slicings: tuple[Slicing, ...]
    index: int


@dataclass(frozen=True)
class Tiling:
    """All parts of a rule, and the number of the file of each, in runs. Empty parts have any."""

    slicings: tuple[Slicing, ...]
    files: tuple[Run, ...]

    def file_of(self, index: int) -> int:
        """The number of the file of part ``index``."""
        for first, step, count in self.files:
            if index < count:
                return first + step * index
            index -= count
        raise IndexError(index)

    def parts_in(self, file: int) -> Iterator[int]:
        """The parts in file number ``file``, in order."""
        before = 0
        for first, step, count in self.files:
            if step == 0:
                yield from range(before, before + count) if file == first else ()
            elif (file - first) % step == 0 and 0 <= (file - first) // step < count:
                yield before + (file - first) // step
            before += count


def part_count(slicings: Sequence[Slicing]) -> int:
    """Count the parts of a rule, empty ones too."""
    return math.prod(slicing.parts for slicing in slicings)


def why_no_rule(shape: Sequence[int], slicings: Sequence[Slicing]) -> str | None:
    """Tell why numbers are no rule for ``shape``; None if they are one."""
    lengths = list(shape)
    for place, slicing in enumerate(slicings):
        if slicing.dim is None:
            length, is_last = math.prod(lengths), place + 1 == len(slicings)
        else:
            length, is_last = lengths[slicing.dim] if slicing.dim < len(lengths) else -1, True
        reach = slicing.size * slicing.parts - slicing.start
        if length < 0 or not is_last or slicing.size < 1 or reach < max(1, length):
            return f"slicing {place} does not cut all of its shape"
        if slicing.dim is not None:
            lengths[slicing.dim] = min(slicing.size, length)
    return None


def boxes_of_part(
    shape: tuple[int, ...], slicings: Sequence[Slicing], index: int
) -> tuple[Box, ...]:
    """The boxes of part ``index``, which follow each other; none if it is empty."""
    box = Box((0,) * len(shape), shape)
    for slicing, number in zip(slicings, _digits(slicings, index), strict=True):
        if slicing.dim is None:
            first, stop = slicing.interval(number, box.numel)
            inner = boxes_of_interval(box.sizes, first, stop)
            return tuple(part.moved(box.offsets) for part in inner)
        box = _sliced(box, slicing, number)
    return () if 0 in box.sizes else (box,)


def parts_meeting(
    shape: tuple[int, ...], slicings: Sequence[Slicing], wanted: Box
) -> Iterator[int]:
    """The parts that may have elements of ``wanted``, and no others than their neighbours."""
    yield from _meeting(Box((0,) * len(shape), shape), slicings, wanted, 0)


def _meeting(box: Box, slicings: Sequence[Slicing], wanted: Box, index: int) -> Iterator[int]:
    common = intersection(box, wanted)
    if common is None:
        return
    if not slicings:
        yield index
        return
    slicing, dim = slicings[0], slicings[0].dim
    if dim is None:
        ends = flat_index(common.offsets, box), flat_index(common.last, box)
    else:
        ends = common.offsets[dim] - box.offsets[dim], common.last[dim] - box.offsets[dim]
    for number in slicing.meeting(*ends):
        inner = box if dim is None else _sliced(box, slicing, number)
        yield from _meeting(inner, slicings[1:], wanted, index * slicing.parts + number)


def part_numels(shape: tuple[int, ...], slicings: Sequence[Slicing]) -> NDArray[numpy.int64]:
    """Count the elements of all parts."""
    lengths = numpy.array([shape], numpy.int64).reshape(1, len(shape))  # by part and dim
    for slicing in slicings:
        first = numpy.arange(slicing.parts, dtype=numpy.int64) * slicing.size - slicing.start
        dim = slicing.dim
        of_part = lengths.prod(1) if dim is None else lengths[:, dim]
        stops = numpy.clip(first + slicing.size, 0, of_part[:, None])
        sizes = (stops - numpy.clip(first, 0, of_part[:, None])).reshape(-1)
        if dim is None:
            return sizes
        lengths = lengths.repeat(slicing.parts, 0)
        lengths[:, dim] = sizes
    numels: NDArray[numpy.int64] = lengths.prod(1)
    return numels


def grid_tile(shape: tuple[int, ...], box: Box) -> Tile | None:
    """The tile that ``box`` is in a grid of boxes of its size; None if there is no such grid."""
    slicings, index = [], 0
    for dim, (offset, size, length) in enumerate(zip(box.offsets, box.sizes, shape, strict=True)):
        if size < 1 or length % size or offset % size:
            return None
        if size < length:
            slicings.append(Slicing(dim, 0, size, length // size))
            index = index * (length // size) + offset // size
    return Tile(tuple(slicings), index)


def runs_of(numbers: NDArray[numpy.int64]) -> tuple[Run, ...]:
    """Numbers as few runs."""
    steps = numpy.diff(numbers)
    runs, first = [], 0
    ends = [*(numpy.flatnonzero(steps[1:] != steps[:-1]) + 1).tolist(), len(numbers) - 1]
    for end in ends:
        if end >= first:
            step = int(steps[first]) if end > first else 0
            runs.append((int(numbers[first]), step, end - first + 1))
            first = end + 1
    return tuple(runs)


def flat_index(place: Sequence[int], box: Box) -> int:
    """The index in the row-major ``box`` of the element at ``place`` of the tensor."""
    flat = 0
    for index, offset, size in zip(place, box.offsets, box.sizes, strict=True):
        flat = flat * size + index - offset
    return flat


def _digits(slicings: Sequence[Slicing], index: int) -> list[int]:
    digits = []
    for slicing in reversed(slicings):
        index, digit = divmod(index, slicing.parts)
        digits.append(digit)
    return digits[::-1]


def _sliced(box: Box, slicing: Slicing, number: int) -> Box:
    dim = slicing.dim
    assert dim is not None
    first, stop = slicing.interval(number, box.sizes[dim])
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim] += first
    sizes[dim] = stop - first
    return Box(tuple(offsets), tuple(sizes))
