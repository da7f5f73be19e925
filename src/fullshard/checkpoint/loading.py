# SPDX-License-Identifier: Apache-2.0
"""Reading a checkpoint: only what is wanted, and nothing that was not verified.

[Note: Verify, then deliver]
A model must not be half loaded when damage is found in the last file. So reading has two passes:
`Loading.verify` reads every wanted chunk and checks it, and keeps what fits into a stated amount of
memory; when all ranks have agreed that theirs is right, `Loading.deliver` hands out what was kept
and reads the rest again, mostly from the page cache, verifying it once more.
"""

import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import local
from typing import Any

import numpy
from numpy.typing import NDArray

from fullshard.checkpoint.commit import (
    find_step,
    is_verified,
    mark_verified,
    read_manifest,
    steps_in,
)
from fullshard.checkpoint.files import Files
from fullshard.checkpoint.format.manifest import (
    CHUNK_BYTES,
    MANIFEST,
    Manifest,
    StoredBox,
    StoredTensor,
    chunk_count,
)
from fullshard.checkpoint.format.values import from_json
from fullshard.checkpoint.reshard import Copy, chunk_bytes, reads_for
from fullshard.checkpoint.shards import ShardReader
from fullshard.core.boxes import Box, boxes_of_interval
from fullshard.core.errors import CheckpointError, ConfigurationError

__all__ = [
    "Checkpoint",
    "Loading",
    "Progress",
    "Want",
    "carry_out",
    "open_checkpoint",
    "pieces_of_want",
    "read_boxes",
]

THREADS = min(4, os.cpu_count() or 1)
PIECE_BYTES = 16 * 2**20  # of a want that are read at a time
KEPT_BYTES = 64 * 2**20  # of verified data that are kept until they are delivered
_NUMPY = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
}
Progress = Callable[[int], None]  # is told how many bytes more are done


@dataclass(frozen=True)
class Want:
    """Boxes of one tensor, to be read into memory in which they follow each other.

    ``target`` is memory of that size, or None to be given some that is used again for the next one.
    ``key`` is the caller's.
    """

    name: str
    boxes: tuple[Box, ...]
    target: memoryview | None = None
    key: Any = None


class Checkpoint:
    """One complete step: its manifest, read and checked, and the files beside it."""

    def __init__(self, folder: Path, files: Files | None = None):
        self.folder = folder
        self.files = files or Files()
        self.manifest: Manifest = read_manifest(self.files, folder)

    @property
    def step(self) -> int:
        """The step at which it was saved."""
        return self.manifest.step

    @property
    def extra(self) -> Any:
        """The user's own values."""
        return from_json(self.manifest.extra)

    @property
    def is_verified(self) -> bool:
        """True if all of it was read and right at some time."""
        return is_verified(self.files, self.folder)

    def stored(self, name: str) -> StoredTensor:
        """The tensor of that name. Raises `CheckpointError`."""
        tensor = self.manifest.tensor(name)
        if tensor is None:
            raise CheckpointError(
                f"{self.folder} holds no tensor {name!r}", file=str(self.folder), tensor=name
            )
        return tensor

    def read(self, name: str) -> NDArray[Any]:
        """A whole tensor, verified. Types that numpy has not come as their bytes.

        bfloat16 and the 8-bit floats get a last dim of bytes: view it as `ml_dtypes.bfloat16`.
        """
        tensor = self.stored(name)
        data = numpy.empty(tensor.size_bytes, numpy.uint8)
        whole = (Box((0,) * len(tensor.shape), tensor.shape),) if tensor.size_bytes else ()
        with Loading(self, [Want(name, whole, data.data)], kept_bytes=0) as loading:
            for _ in loading.deliver():
                pass
        if tensor.dtype in _NUMPY:
            return data.view(_NUMPY[tensor.dtype]).reshape(tensor.shape)
        return data.reshape(*tensor.shape, tensor.item_bytes)

    def verify(self, progress: Progress | None = None) -> None:
        """Read every byte of every file and check it, then mark the step as verified.

        Raises `CheckpointError` for the first damage in the order of the files.
        """
        with ShardReader(self.files, self.folder, self.manifest) as reader:
            for number, file in enumerate(self.manifest.files):
                reader.check_header(number)
                if progress is not None:
                    progress(file.header_bytes)
            for _ in _in_threads(
                lambda each: _verify_box(reader, each, progress), _boxes_by_file(self.manifest)
            ):
                pass
        mark_verified(self.files, self.folder)


def open_checkpoint(path: str | Path, step: int | None = None) -> Checkpoint:
    """The newest complete step of a run folder, or ``step``; or the step folder ``path`` itself.

    Raises `CheckpointError` if there is none, or its manifest is damaged.
    """
    files, folder = Files(), Path(path)
    if step is None and (folder / MANIFEST).is_file() and not steps_in(files, folder):
        return Checkpoint(folder, files)
    return Checkpoint(find_step(files, folder, step).path, files)


def _boxes_by_file(manifest: Manifest) -> list[tuple[str, StoredTensor, StoredBox]]:
    held = [
        (name, tensor, stored)
        for name, tensor in manifest.tensors.items()
        for stored in tensor.boxes
    ]
    return sorted(held, key=lambda each: (each[2].file, each[2].start))


_scratch = local()


def _scratch_chunk(size_bytes: int) -> memoryview:
    """Memory of this thread for one chunk, used again and again."""
    if not hasattr(_scratch, "chunk"):
        _scratch.chunk = memoryview(bytearray(CHUNK_BYTES))
    view: memoryview = _scratch.chunk
    return view[:size_bytes]


def _verify_box(
    reader: ShardReader, held: tuple[str, StoredTensor, StoredBox], progress: Progress | None
) -> None:
    name, tensor, stored = held
    for chunk in range(chunk_count(stored.box.numel * tensor.item_bytes)):
        view = _scratch_chunk(chunk_bytes(tensor, stored, chunk))
        reader.read_chunk(name, tensor, stored, chunk, view)
        if progress is not None:
            progress(view.nbytes)


def _in_threads(work: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """The results of ``work`` for each of ``items``, in their order; a few are under way."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="fullshard-read") as pool:
        under_way: deque[Future[Any]] = deque()
        try:
            for item in items:
                under_way.append(pool.submit(work, item))
                if len(under_way) > 2 * THREADS:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()


# -- what is wanted ------------------------------------------------------------------------------


def pieces_of_want(want: Want, item_bytes: int) -> Iterator[Want]:
    """``want`` in parts of at most 16 MiB, each of one of its boxes, in order.

    A part's ``key`` is (the key of the whole, its first element in the whole's memory).
    """
    start = 0
    most = PIECE_BYTES // item_bytes
    for box in want.boxes:
        for first in range(0, box.numel, most):
            stop = min(first + most, box.numel)
            boxes = tuple(
                Box(tuple(map(sum, zip(inner.offsets, box.offsets, strict=True))), inner.sizes)
                for inner in boxes_of_interval(box.sizes, first, stop)
            )
            begin, end = (start + first) * item_bytes, (start + stop) * item_bytes
            target = want.target[begin:end] if want.target is not None else None
            yield Want(want.name, boxes, target, (want.key, start + first))
        start += box.numel


class Loading:
    """The reads of one rank. See [Note: Verify, then deliver]."""

    def __init__(self, checkpoint: Checkpoint, wants: Sequence[Want], kept_bytes: int = KEPT_BYTES):
        self._checkpoint = checkpoint
        self._reader = ShardReader(checkpoint.files, checkpoint.folder, checkpoint.manifest)
        self._room_bytes = kept_bytes
        self._kept: dict[int, NDArray[numpy.uint8]] = {}
        self._parts: list[Want] = []
        for want in wants:
            tensor = checkpoint.stored(want.name)
            for box in want.boxes:
                ends = zip(box.offsets, box.sizes, tensor.shape, strict=False)
                if len(box.sizes) != len(tensor.shape) or any(o + n > s for o, n, s in ends):
                    raise ConfigurationError(
                        f"{box} is no box of {want.name!r}, which has shape {tensor.shape}"
                    )
            self._parts += pieces_of_want(want, tensor.item_bytes)

    def __enter__(self) -> "Loading":
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()
        self._kept.clear()

    @property
    def size_bytes(self) -> int:
        """Bytes of all that is wanted."""
        return sum(self._size(part) for part in self._parts)

    def verify(self, progress: Progress | None = None) -> None:
        """Read and check every chunk that holds something wanted. Raises `CheckpointError`."""
        room = self._room_bytes
        jobs = []
        read_bytes: Counter[int] = Counter()  # of each file
        for number, part in enumerate(self._parts):
            tensor, size_bytes = self._checkpoint.stored(part.name), self._size(part)
            for read in reads_for(tensor, part.boxes):
                read_bytes[read.stored.file] += chunk_bytes(tensor, read.stored, read.chunk)
            if size_bytes <= room:
                room -= size_bytes
                self._kept[number] = numpy.empty(size_bytes, numpy.uint8)
            jobs.append((number, part))
        self._reader.foresee(read_bytes)
        for part in _in_threads(self._verify_part, jobs):
            if progress is not None:
                progress(self._size(part))

    def deliver(self) -> Iterator[tuple[Want, memoryview]]:
        """Each part of what is wanted, in order, and its bytes: in its ``target`` if it has one.

        Threads read a few parts ahead, at most 16 MiB each. Raises `CheckpointError` if a chunk
        that is read now is damaged; parts behind it may be in their targets already.
        """
        yield from _in_threads(self._deliver_part, list(enumerate(self._parts)))

    def _deliver_part(self, job: tuple[int, Want]) -> tuple[Want, memoryview]:
        number, part = job
        kept = self._kept.pop(number, None)
        held = part.target if kept is None else kept.data
        if held is None:
            held = numpy.empty(self._size(part), numpy.uint8).data
        if kept is None:
            self._read_part(part, held)
        elif part.target is not None:
            part.target[:] = held
            held = part.target
        return part, held

    def _size(self, part: Want) -> int:
        tensor = self._checkpoint.stored(part.name)
        return sum(box.numel for box in part.boxes) * tensor.item_bytes

    def _verify_part(self, job: tuple[int, Want]) -> Want:
        number, part = job
        if number in self._kept:
            self._read_part(part, self._kept[number].data)
        else:
            tensor = self._checkpoint.stored(part.name)
            for read in reads_for(tensor, part.boxes):
                view = _scratch_chunk(chunk_bytes(tensor, read.stored, read.chunk))
                self._reader.read_chunk(part.name, tensor, read.stored, read.chunk, view)
        return part

    def _read_part(self, part: Want, target: memoryview) -> None:
        tensor = self._checkpoint.stored(part.name)
        read_boxes(self._reader, part.name, tensor, part.boxes, target)


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
        view = _scratch_chunk(size_bytes)
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
