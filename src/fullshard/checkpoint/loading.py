# SPDX-License-Identifier: Apache-2.0
"""Reading a checkpoint: only what is wanted, and nothing that was not verified.

[Note: Verify, then deliver]
A model must not be half loaded when damage is found in the last file. So reading has two passes:
`Loading.verify` reads every wanted chunk and checks it, and keeps what fits into a stated amount of
memory; when all ranks have agreed that theirs is right, `Loading.deliver` hands out what was kept
and reads the rest again, mostly from the page cache, verifying it once more. What goes into memory
that nobody looks at before the load is done (`Want.fresh`, as new optimizer state) is there after
the first pass.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy
from numpy.typing import NDArray

from fullshard.checkpoint.conversion import numpy_dtype
from fullshard.checkpoint.files import Files
from fullshard.checkpoint.format.index import chunk_count
from fullshard.checkpoint.format.manifest import MANIFEST
from fullshard.checkpoint.format.stored import Manifest, StoredBox, StoredTensor
from fullshard.checkpoint.format.values import from_json
from fullshard.checkpoint.reading.reads import chunk_bytes, read_boxes, reads_for, scratch_chunk
from fullshard.checkpoint.reading.streams import in_streams
from fullshard.checkpoint.runs.commit import (
    find_step,
    is_verified,
    mark_verified,
    read_manifest,
    steps_in,
)
from fullshard.checkpoint.runs.folder import RunFolder
from fullshard.checkpoint.shards import ShardReader
from fullshard.core.boxes import Box, boxes_of_interval
from fullshard.core.errors import CheckpointError, ConfigurationError

BATCH_BOXES = 2**16  # that are verified before the next files are opened
PIECE_BYTES = 16 * 2**20  # of a want that are read at a time
KEPT_BYTES = 64 * 2**20  # of verified data that are kept until they are delivered
Progress = Callable[[int], None]  # is told how many bytes more are done
Result = TypeVar("Result")


@dataclass(frozen=True)
class Want:
    """Boxes of one tensor, to be read into memory in which they follow each other.

    ``target`` is memory of that size, or None to be given some. ``key`` is the caller's. ``fresh``
    says that nobody looks at where it goes before all is loaded, ``inspect`` that its values are to
    be looked at before anything is delivered.
    """

    name: str
    boxes: tuple[Box, ...]
    target: memoryview | None = None
    key: Any = None
    fresh: bool = False
    inspect: bool = False


Take = Callable[[Want, memoryview], None]


class Checkpoint:
    """One complete step: its manifest, read and checked, and the files beside it."""

    def __init__(self, folder: Path, files: Files | None = None):
        self.folder = folder
        self.files: Files = files or Files()
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
        if dtype := numpy_dtype(tensor.dtype):
            return data.view(dtype).reshape(tensor.shape)
        return data.reshape(*tensor.shape, tensor.item_bytes)

    def verify(self, progress: Progress | None = None) -> None:
        """Read and check every byte, then mark the step as verified. Raises `CheckpointError`."""
        with ShardReader(self.files, self.folder, self.manifest) as reader:
            for boxes in _boxes_in_batches(reader, self.manifest, progress):
                sizes = [stored.box.numel * tensor.item_bytes for _, tensor, stored in boxes]
                for _ in in_streams(lambda each: _verify_box(reader, each, progress), boxes, sizes):
                    pass
        mark_verified(self.files, self.folder)


def open_checkpoint(path: str | Path, step: int | None = None) -> Checkpoint:
    """The newest complete step of a run folder, or ``step``; or the step folder ``path`` itself.

    Raises `CheckpointError` if there is none, or its manifest is damaged.
    """
    files, folder = Files(), RunFolder(path).path
    if step is None and (folder / MANIFEST).is_file() and not steps_in(files, folder):
        return Checkpoint(folder, files)
    return Checkpoint(find_step(files, folder, step).path, files)


_Held = tuple[str, StoredTensor, StoredBox]


def _boxes_in_batches(
    reader: ShardReader, manifest: Manifest, progress: Progress | None
) -> Iterator[list[_Held]]:
    """The boxes of all files, checked against what the files tell, in the order of their bytes."""
    batch: list[_Held] = []
    for number, file in enumerate(manifest.files):
        batch += reader.boxes(number)
        if progress is not None:
            progress(file.header_bytes + file.table_bytes)
        if len(batch) >= BATCH_BOXES:
            yield batch
            batch = []
    yield batch


def _verify_box(reader: ShardReader, held: _Held, progress: Progress | None) -> None:
    name, tensor, stored = held
    for chunk in range(chunk_count(stored.box.numel * tensor.item_bytes)):
        view = scratch_chunk(chunk_bytes(tensor, stored, chunk))
        reader.read_chunk(name, tensor, stored, chunk, view)
        if progress is not None:
            progress(view.nbytes)


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
            inside = boxes_of_interval(box.sizes, first, stop)
            boxes = tuple(inner.moved(box.offsets) for inner in inside)
            begin, end = (start + first) * item_bytes, (start + stop) * item_bytes
            target = want.target[begin:end] if want.target is not None else None
            yield Want(
                want.name, boxes, target, (want.key, start + first), want.fresh, want.inspect
            )
        start += box.numel


class Loading:
    """The reads of one rank. See [Note: Verify, then deliver]."""

    def __init__(self, checkpoint: Checkpoint, wants: Sequence[Want], kept_bytes: int = KEPT_BYTES):
        self._checkpoint = checkpoint
        self._reader = ShardReader(checkpoint.files, checkpoint.folder, checkpoint.manifest)
        self._room_bytes = kept_bytes
        self._kept: dict[int, NDArray[numpy.uint8]] = {}
        self._done: set[int] = set()  # parts that were handed out by `verify`
        self._order = {name: n for n, name in enumerate(checkpoint.manifest.tensors)}
        parts: list[Want] = []
        for want in wants:
            tensor = checkpoint.stored(want.name)
            for box in want.boxes:
                ends = zip(box.offsets, box.sizes, tensor.shape, strict=False)
                if len(box.sizes) != len(tensor.shape) or any(o + n > s for o, n, s in ends):
                    raise ConfigurationError(
                        f"{box} is no box of {want.name!r}, which has shape {tensor.shape}"
                    )
            parts += pieces_of_want(want, tensor.item_bytes)
        # In the order of the files: see [Note: Long runs] in `reading.streams`.
        self._parts = sorted(parts, key=self._place)

    def __enter__(self) -> "Loading":
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()
        self._kept.clear()

    @property
    def size_bytes(self) -> int:
        """Bytes of all that is wanted."""
        return sum(map(self._size, self._parts))

    def verify(self, take: Take | None = None) -> None:
        """Read and check every chunk that holds something wanted. Raises `CheckpointError`.

        ``take`` is given the fresh parts and their bytes, at most 16 MiB each, as `deliver` would
        give them out; then that one leaves them out. It is also given those to ``inspect``.
        """
        room = self._room_bytes
        for number, part in enumerate(self._parts):
            size_bytes = self._size(part)
            if size_bytes <= room and not (part.fresh and take):
                room -= size_bytes
                self._kept[number] = numpy.empty(size_bytes, numpy.uint8)

        def work(number: int) -> tuple[int, memoryview | None]:
            part = self._parts[number]
            if part.fresh and take:
                return number, self._filled(part)
            if number in self._kept:
                self._read_part(part, self._kept[number].data)
                return number, self._kept[number].data if part.inspect else None
            if part.inspect and take:
                return number, self._filled(replace(part, target=None))
            tensor = self._checkpoint.stored(part.name)
            for read in reads_for(tensor, part.boxes):
                view = scratch_chunk(chunk_bytes(tensor, read.stored, read.chunk))
                self._reader.read_chunk(part.name, tensor, read.stored, read.chunk, view)
            return number, None

        for number, held in self._in_streams(work, range(len(self._parts))):
            if held is not None and take is not None:
                take(self._parts[number], held)
                if self._parts[number].fresh:
                    self._done.add(number)

    def deliver(self, name: str | None = None) -> Iterator[tuple[Want, memoryview]]:
        """Hand out the parts that are wanted, of the tensor ``name`` alone or of all, as bytes.

        They are in their ``target`` if they have one.

        Threads read a few parts ahead, at most 16 MiB each. Raises `CheckpointError` if a chunk
        that is read now is damaged; parts behind it may be in their targets already.
        """

        def work(number: int) -> tuple[Want, memoryview]:
            part, kept = self._parts[number], self._kept.pop(number, None)
            if kept is None:
                return part, self._filled(part)
            if part.target is None:
                return part, kept.data
            part.target[:] = kept.data
            return part, part.target

        left = [
            number
            for number, part in enumerate(self._parts)
            if number not in self._done and name in (None, part.name)
        ]
        yield from self._in_streams(work, left)

    def _in_streams(
        self, work: Callable[[int], Result], numbers: Sequence[int]
    ) -> Iterator[Result]:
        return in_streams(work, numbers, [self._size(self._parts[each]) for each in numbers])

    def _place(self, part: Want) -> tuple[int, int, int]:
        """Return about where a part is: files have tensors in the manifest's order."""
        first = next(reads_for(self._checkpoint.stored(part.name), part.boxes), None)
        if first is None:
            return (0, 0, 0)
        name = self._checkpoint.manifest.aliases.get(part.name, part.name)
        return first.stored.file, self._order[name], first.chunk

    def _size(self, part: Want) -> int:
        tensor = self._checkpoint.stored(part.name)
        return sum(box.numel for box in part.boxes) * tensor.item_bytes

    def _filled(self, part: Want) -> memoryview:
        """The bytes of a part, in its target if it has one."""
        held = part.target
        if held is None:
            held = numpy.empty(self._size(part), numpy.uint8).data
        self._read_part(part, held)
        return held

    def _read_part(self, part: Want, target: memoryview) -> None:
        tensor = self._checkpoint.stored(part.name)
        read_boxes(self._reader, part.name, tensor, part.boxes, target)
