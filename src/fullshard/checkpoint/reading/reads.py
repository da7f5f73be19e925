# SPDX-License-Identifier: Apache-2.0
"""From stored boxes and wanted boxes to reads, and boxes of tensors out of verified chunks.

The unit of reading is the chunk, since a chunk has a checksum. A chunk is an interval of the
flattened stored box, and so at most 2n-1 boxes of the tensor; each of them is intersected with each
wanted box, and what they share is copied.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from threading import local

import numpy
from numpy.typing import NDArray

from fullshard.checkpoint.format.index import CHUNK_BYTES
from fullshard.checkpoint.format.stored import StoredBox, StoredTensor
from fullshard.checkpoint.format.tiling import flat_index
from fullshard.checkpoint.shards import ShardReader
from fullshard.core.boxes import Box, boxes_of_interval, intersection

PART_BYTES = 8 * 2**20
_scratch = local()


@dataclass(frozen=True)
class PlacedBox:
    """A box of a tensor, whose elements begin at element ``start`` of some memory."""

    box: Box
    start: int


@dataclass(frozen=True)
class ChunkRead:
    """A chunk to read and what to copy out of it.

    ``copies`` are boxes in the chunk, boxes in the wanted memory, and what both share. ``straight``
    is the element of the wanted memory at which the whole chunk belongs, in one piece; None if it
    must be copied.
    """

    stored: StoredBox
    chunk: int
    copies: tuple[tuple[PlacedBox, PlacedBox, Box], ...]
    straight: int | None


def chunk_bytes(tensor: StoredTensor, stored: StoredBox, chunk: int) -> int:
    """Bytes of a chunk."""
    return min(CHUNK_BYTES, stored.box.numel * tensor.item_bytes - chunk * CHUNK_BYTES)


def in_parts(tensor: StoredTensor) -> Iterator[tuple[list[Box], int]]:
    """A whole tensor in row-major order: boxes of at most 8 MiB together, and their bytes."""
    item, most = tensor.item_bytes, PART_BYTES // tensor.item_bytes
    numel = tensor.size_bytes // item
    for start in range(0, numel, most):
        stop = min(start + most, numel)
        yield boxes_of_interval(tensor.shape, start, stop), (stop - start) * item


def reads_for(tensor: StoredTensor, wanted: Sequence[Box]) -> Iterator[ChunkRead]:
    """The chunks that hold the ``wanted`` boxes, which follow each other in the wanted memory.

    Each chunk comes once. Together the copies fill each wanted element once. Touches no file.
    """
    starts = accumulate((box.numel for box in wanted), initial=0)
    targets = [PlacedBox(box, start) for box, start in zip(wanted, starts, strict=False)]
    for stored in tensor.near(wanted):
        shared = [
            (target, common)
            for target in targets
            if (common := intersection(target.box, stored.box)) is not None
        ]
        if shared:
            yield from _reads_of(tensor, stored, shared)


_Shared = list[tuple[PlacedBox, Box]]


def _reads_of(tensor: StoredTensor, stored: StoredBox, shared: _Shared) -> Iterator[ChunkRead]:
    per_chunk = CHUNK_BYTES // tensor.item_bytes
    first = min(flat_index(common.offsets, stored.box) for _, common in shared)
    last = max(flat_index(common.last, stored.box) for _, common in shared)
    straight = _straight(stored, shared)
    for chunk in range(first // per_chunk, last // per_chunk + 1):
        begin = chunk * per_chunk
        if straight is not None:
            yield ChunkRead(stored, chunk, (), straight + begin)
            continue
        copies = tuple(_copies(stored, begin, min(begin + per_chunk, stored.box.numel), shared))
        if copies:
            yield ChunkRead(stored, chunk, copies, None)


def _straight(stored: StoredBox, shared: _Shared) -> int | None:
    """Find where the stored box belongs as a whole: it lies in one wanted box, in one run."""
    target, common = shared[0]
    if len(shared) != 1 or common != stored.box or not _is_interval(stored.box, target.box):
        return None
    return target.start + flat_index(stored.box.offsets, target.box)


def _is_interval(inner: Box, outer: Box) -> bool:
    """True if the elements of ``inner`` follow each other in the row-major order of ``outer``."""
    long = [dim for dim, size in enumerate(inner.sizes) if size > 1]
    return not long or inner.sizes[long[0] + 1 :] == outer.sizes[long[0] + 1 :]


def _copies(
    stored: StoredBox, begin: int, stop: int, shared: _Shared
) -> Iterator[tuple[PlacedBox, PlacedBox, Box]]:
    start = 0
    for part in boxes_of_interval(stored.box.sizes, begin, stop):
        here = PlacedBox(part.moved(stored.box.offsets), start)
        for target, _ in shared:
            common = intersection(here.box, target.box)
            if common is not None:
                yield here, target, common
        start += part.numel


# -- carried out ---------------------------------------------------------------------------------


def scratch_chunk(size_bytes: int) -> memoryview:
    """Memory of this thread for one chunk, used again and again."""
    if not hasattr(_scratch, "chunk"):
        _scratch.chunk = memoryview(bytearray(CHUNK_BYTES))
    view: memoryview = _scratch.chunk
    return view[:size_bytes]


def read_boxes(
    reader: ShardReader, name: str, tensor: StoredTensor, boxes: Sequence[Box], target: memoryview
) -> None:
    """Fill ``target`` with verified ``boxes``, one after the other. Raises `CheckpointError`."""
    flat = numpy.frombuffer(target, numpy.uint8)
    for read in reads_for(tensor, boxes):
        size_bytes = chunk_bytes(tensor, read.stored, read.chunk)
        view = scratch_chunk(size_bytes)
        if read.straight is not None:
            start = read.straight * tensor.item_bytes
            view = target[start : start + size_bytes]
        reader.read_chunk(name, tensor, read.stored, read.chunk, view)
        carry_out(read, tensor.item_bytes, numpy.frombuffer(view, numpy.uint8), flat)


def carry_out(
    read: ChunkRead, item_bytes: int, chunk: NDArray[numpy.uint8], target: NDArray[numpy.uint8]
) -> None:
    """Copy what is wanted of a ``chunk`` to ``target``: flat bytes, ``item_bytes`` an element."""
    for held, wanted, common in read.copies:
        into = _within(target, wanted, common, item_bytes)
        into[...] = _within(chunk, held, common, item_bytes)


def _within(
    flat: NDArray[numpy.uint8], placed: PlacedBox, common: Box, item_bytes: int
) -> NDArray[numpy.uint8]:
    """The elements of ``common``, which lies in ``placed``, as a view of their shape and bytes."""
    box, begin = placed.box, placed.start * item_bytes
    shaped = flat[begin : begin + box.numel * item_bytes].reshape(*box.sizes, item_bytes)
    ends = zip(common.offsets, common.sizes, box.offsets, strict=True)
    view: NDArray[numpy.uint8] = shaped[tuple(slice(o - at, o - at + n) for o, n, at in ends)]
    return view
