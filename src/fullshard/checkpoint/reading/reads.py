# SPDX-License-Identifier: Apache-2.0
"""From stored boxes and wanted boxes to reads. Pure: no file is touched here.

The unit of reading is the chunk, since a chunk has a checksum. A chunk is an interval of the
flattened stored box, and so at most 2n-1 boxes of the tensor; each of them is intersected with each
wanted box, and what they share is copied.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fullshard.checkpoint.format.index import CHUNK_BYTES
from fullshard.checkpoint.format.stored import StoredBox, StoredTensor
from fullshard.checkpoint.format.tiling import flat_index
from fullshard.core.boxes import Box, boxes_of_interval, intersection

__all__ = ["ChunkRead", "Copy", "chunk_bytes", "reads_for"]


@dataclass(frozen=True)
class Copy:
    """Elements to copy from a chunk to the wanted memory.

    From the box ``source`` of a row-major array of shape ``source_shape`` that begins at element
    ``source_start`` of the chunk, to the box ``target`` of one of ``target_shape`` that begins at
    element ``target_start`` of the wanted memory.
    """

    source_start: int
    source_shape: tuple[int, ...]
    source: Box
    target_start: int
    target_shape: tuple[int, ...]
    target: Box


@dataclass(frozen=True)
class ChunkRead:
    """A chunk to read and what to copy out of it.

    ``straight`` is the element of the wanted memory at which the whole chunk belongs, in one piece;
    None if it must be copied.
    """

    stored: StoredBox
    chunk: int
    copies: tuple[Copy, ...]
    straight: int | None


def chunk_bytes(tensor: StoredTensor, stored: StoredBox, chunk: int) -> int:
    """Bytes of a chunk."""
    return min(CHUNK_BYTES, stored.box.numel * tensor.item_bytes - chunk * CHUNK_BYTES)


def reads_for(tensor: StoredTensor, wanted: Sequence[Box]) -> Iterator[ChunkRead]:
    """The chunks that hold the ``wanted`` boxes, which follow each other in the wanted memory.

    Each chunk comes once. Together the copies fill each wanted element once.
    """
    starts = list(accumulate((box.numel for box in wanted), initial=0))
    for stored in tensor.near(wanted):
        shared = [
            (box, start, common)
            for box, start in zip(wanted, starts, strict=False)
            if (common := intersection(box, stored.box)) is not None
        ]
        if shared:
            yield from _reads_of(tensor, stored, shared)


_Shared = tuple[Box, int, Box]


def _reads_of(
    tensor: StoredTensor, stored: StoredBox, shared: list[_Shared]
) -> Iterator[ChunkRead]:
    per_chunk = CHUNK_BYTES // tensor.item_bytes
    first = min(flat_index(common.offsets, stored.box) for _, _, common in shared)
    last = max(flat_index(common.last, stored.box) for _, _, common in shared)
    for chunk in range(first // per_chunk, last // per_chunk + 1):
        begin = chunk * per_chunk
        stop = min(begin + per_chunk, stored.box.numel)
        straight = _straight(stored, begin, shared)
        if straight is not None:
            yield ChunkRead(stored, chunk, (), straight)
            continue
        copies = tuple(_copies(stored, begin, stop, shared))
        if copies:
            yield ChunkRead(stored, chunk, copies, None)


def _straight(stored: StoredBox, begin: int, shared: list[_Shared]) -> int | None:
    """Find where the chunk belongs as a whole: its box lies in one wanted box, in one run."""
    if len(shared) != 1:
        return None
    wanted, start, common = shared[0]
    if common != stored.box or not _is_interval(stored.box, wanted):
        return None
    return start + flat_index(stored.box.offsets, wanted) + begin


def _is_interval(inner: Box, outer: Box) -> bool:
    """True if the elements of ``inner`` follow each other in the row-major order of ``outer``."""
    long = [dim for dim, size in enumerate(inner.sizes) if size > 1]
    if not long:
        return True
    return inner.sizes[long[0] + 1 :] == outer.sizes[long[0] + 1 :]


def _copies(stored: StoredBox, begin: int, stop: int, shared: list[_Shared]) -> Iterator[Copy]:
    source_start = 0
    for part in boxes_of_interval(stored.box.sizes, begin, stop):
        here = part.moved(stored.box.offsets)
        for wanted, target_start, _ in shared:
            common = intersection(here, wanted)
            if common is not None:
                yield Copy(
                    source_start,
                    here.sizes,
                    _inside(common, here),
                    target_start,
                    wanted.sizes,
                    _inside(common, wanted),
                )
        source_start += part.numel


def _inside(box: Box, outer: Box) -> Box:
    return box.moved(tuple(-offset for offset in outer.offsets))
