# SPDX-License-Identifier: Apache-2.0
"""Boxes of tensors out of verified chunks."""

import math
from collections.abc import Sequence
from threading import local

import numpy
from numpy.typing import NDArray

from fullshard.checkpoint.format.index import CHUNK_BYTES
from fullshard.checkpoint.format.stored import StoredTensor
from fullshard.checkpoint.reading.reads import Copy, chunk_bytes, reads_for
from fullshard.checkpoint.shards import ShardReader
from fullshard.core.boxes import Box

__all__ = ["carry_out", "read_boxes", "scratch_chunk"]

_scratch = local()


def scratch_chunk(size_bytes: int) -> memoryview:
    """Memory of this thread for one chunk, used again and again."""
    if not hasattr(_scratch, "chunk"):
        _scratch.chunk = memoryview(bytearray(CHUNK_BYTES))
    view: memoryview = _scratch.chunk
    return view[:size_bytes]


def read_boxes(
    reader: ShardReader,
    name: str,
    tensor: StoredTensor,
    boxes: Sequence[Box],
    target: memoryview,
) -> None:
    """Fill ``target`` with ``boxes`` of a tensor, one after the other, verified.

    Raises `CheckpointError`.
    """
    flat = numpy.frombuffer(target, numpy.uint8)
    for read in reads_for(tensor, boxes):
        size_bytes = chunk_bytes(tensor, read.stored, read.chunk)
        if read.straight is not None:
            start = read.straight * tensor.item_bytes
            view = target[start : start + size_bytes]
            reader.read_chunk(name, tensor, read.stored, read.chunk, view)
            continue
        view = scratch_chunk(size_bytes)
        reader.read_chunk(name, tensor, read.stored, read.chunk, view)
        source = numpy.frombuffer(view, numpy.uint8)
        for copy in read.copies:
            carry_out(copy, tensor.item_bytes, source, flat)


def carry_out(
    copy: Copy, item_bytes: int, source: NDArray[numpy.uint8], target: NDArray[numpy.uint8]
) -> None:
    """Copy elements of ``item_bytes`` bytes from ``source`` to ``target``, both flat."""
    into = _box_of(target, copy.target_start, copy.target_shape, copy.target, item_bytes)
    into[...] = _box_of(source, copy.source_start, copy.source_shape, copy.source, item_bytes)


def _box_of(
    flat: NDArray[numpy.uint8], start: int, shape: tuple[int, ...], box: Box, item_bytes: int
) -> NDArray[numpy.uint8]:
    """The elements of ``box`` as a view of shape (*box.sizes, item_bytes)."""
    size_bytes = math.prod(shape) * item_bytes
    begin = start * item_bytes
    shaped = flat[begin : begin + size_bytes].reshape(*shape, item_bytes)
    slices = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
    view: NDArray[numpy.uint8] = shaped[slices]
    return view
