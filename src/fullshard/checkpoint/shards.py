# SPDX-License-Identifier: Apache-2.0
"""The safetensors files of a checkpoint: one written by each rank, read in verified chunks."""

import mmap
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy
import xxhash
from numpy.typing import NDArray

from fullshard.checkpoint.files import ALIGNMENT, Files, OpenFile
from fullshard.checkpoint.format.envelope import checksum_of
from fullshard.checkpoint.format.index import CHUNK_BYTES, TABLE, BoxPlace, FileIndex, entry_name
from fullshard.checkpoint.format.stored import Manifest, StoredBox, StoredFile, StoredTensor
from fullshard.checkpoint.format.tiling import Tile
from fullshard.core.boxes import Box
from fullshard.core.errors import CheckpointError, ConfigurationError
from fullshard.core.safetensors_format import DTYPE_BYTES, Entry, header_of


class Source(Protocol):
    """The place of a piece's bytes."""

    def copy_into(self, view: memoryview, start: int) -> None:
        """Fill ``view`` with the bytes from ``start``; they are there on return."""


def memory_view(array: NDArray[Any]) -> memoryview:
    """The memory of a contiguous array as bytes, also of one without dims or elements."""
    return array.reshape(-1).view(numpy.uint8).data


@dataclass(frozen=True)
class Piece:
    """One rank's part of a tensor: boxes, whose elements follow each other in ``source``.

    ``dtype`` is the name that safetensors has for it. ``tile`` tells which part of a rule the boxes
    are, if other ranks have the others.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]
    source: Source
    tile: Tile | None = None

    @property
    def item_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @cached_property
    def size_bytes(self) -> int:
        return sum(box.numel for box in self.boxes) * self.item_bytes


# -- writing -------------------------------------------------------------------------------------


class ShardWriter:
    """One file, written from its beginning to its end; its end are the checksums of its chunks.

    The file's data are one stream: the bytes of ``pieces``, in that order, given to `append` in
    parts of any size.
    """

    def __init__(
        self, files: Files, path: Path, pieces: Sequence[Piece], metadata: Mapping[str, str]
    ):
        self._files = files
        self._pieces = pieces
        header = _padded(header_of(_entries(pieces), metadata))
        self._header_bytes, self._header_checksum = len(header), checksum_of(header)
        self._table = bytearray()
        self._lengths = _chunk_lengths(pieces)
        self._left = next(self._lengths, 0)
        self._open_hash: xxhash.xxh3_128 | None = None
        self._file = files.create(path, direct=True)
        files.write(self._file, header)

    def append(self, data: memoryview) -> None:
        """Write the next bytes. All calls but the last have a multiple of `ALIGNMENT` of them."""
        position = 0
        while position < data.nbytes:
            part = data[position : position + self._left]
            position += part.nbytes
            self._left -= part.nbytes
            self._hash(part)
        self._files.write(self._file, data)

    def finish(self) -> StoredFile:
        """Write the checksums, flush to the medium and close."""
        if self._left:
            raise CheckpointError("not all of the shard was handed over: its copy was interrupted")
        self._files.write(self._file, memoryview(self._table))
        self._files.flush(self._file)
        self._files.close(self._file)
        return StoredFile(
            self._file.path.name,
            self._header_bytes + sum(p.size_bytes for p in self._pieces) + len(self._table),
            self._header_bytes,
            self._header_checksum,
            len(self._table),
            checksum_of(self._table),
        )

    def abandon(self) -> None:
        """Close without more ado."""
        self._files.close(self._file)

    def _hash(self, part: memoryview) -> None:
        if self._left == 0 and self._open_hash is None:
            self._table += xxhash.xxh3_128_digest(part)
        else:
            if self._open_hash is None:
                self._open_hash = xxhash.xxh3_128()
            self._open_hash.update(part)
            if self._left == 0:
                self._table += self._open_hash.digest()
                self._open_hash = None
        if self._left == 0:
            self._left = next(self._lengths, 0)


def _padded(header: bytes) -> memoryview:
    """The header in aligned memory, with spaces until the data begin on an aligned place."""
    size_bytes = -(-len(header) // ALIGNMENT) * ALIGNMENT
    aligned = memoryview(mmap.mmap(-1, size_bytes))
    text = header[8:] + b" " * (size_bytes - len(header))
    aligned[:] = len(text).to_bytes(8, "little") + text
    return aligned


def _chunk_lengths(pieces: Sequence[Piece]) -> Iterator[int]:
    for piece in pieces:
        for box in piece.boxes:
            size_bytes = box.numel * piece.item_bytes
            for start in range(0, size_bytes, CHUNK_BYTES):
                yield min(CHUNK_BYTES, size_bytes - start)


def _entries(pieces: Sequence[Piece]) -> dict[str, Entry]:
    """List the header's entries: a whole tensor by name, a box with its intervals behind it."""
    entries: dict[str, Entry] = {}
    for piece in pieces:
        for box in piece.boxes:
            name = entry_name(piece.name, piece.shape, box)
            if name in entries or name == TABLE:
                raise CheckpointError(f"two tensors would be stored as {name!r}", tensor=name)
            entries[name] = Entry(piece.dtype, box.sizes)
    entries[TABLE] = Entry("U8", (sum(1 for _ in _chunk_lengths(pieces)), 16))
    return entries


# -- reading -------------------------------------------------------------------------------------


_READ_BYTES = 2**20  # that are read at a time: their checksum is taken while a cache has them
_MOST_OPEN = 32
_MOST_PLACES = 2**18  # that are remembered of files: some 60 MB


class ShardReader:
    """The files of one checkpoint, opened when they are needed. Any thread may read.

    Each thread has at most 32 of them open. To be closed when all threads are done.
    """

    def __init__(self, files: Files, folder: Path, manifest: Manifest):
        self._files = files
        self._folder = folder
        self._manifest = manifest
        self._open: dict[int, dict[int, OpenFile]] = {}  # by thread, least recently used first
        self._indexes: dict[int, FileIndex] = {}  # by file, read last at the end
        self._remembering = threading.Lock()

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._open:
            _, mine = self._open.popitem()
            for file in mine.values():
                self._files.close(file)

    def index(self, number: int, name: str | None = None) -> FileIndex:
        """The places in file ``number``, checked; `CheckpointError` tells for which ``name``."""
        told = self._manifest.files[number]
        index = self._indexes.get(number)
        if index is None:
            file = self._opened(number, name)
            header = _part(self._files, file, 0, told.header_bytes, told.header_checksum, name)
            start = told.size_bytes - told.table_bytes
            table = _part(self._files, file, start, told.table_bytes, told.table_checksum, name)
            try:
                index = FileIndex.of_file(header, told.size_bytes, table)
            except ConfigurationError as error:
                raise _damaged(file.path, name, (0, told.header_bytes), f"say: {error}") from error
            with self._remembering:
                while len(self._indexes) > _MOST_PLACES // max(1, len(index)):
                    self._indexes.pop(next(iter(self._indexes)))
                self._indexes[number] = index
        return index

    def boxes(self, number: int) -> list[tuple[str, StoredTensor, StoredBox]]:
        """All in file ``number``, by bytes. Raises `CheckpointError` if the manifest differs."""
        self._opened(number)
        count = len(self.index(number))
        held = list(islice(self._manifest.boxes_in(number), count + 1))
        if len(held) != count:
            told = self._manifest.files[number]
            path, span = self._folder / told.name, (0, told.header_bytes)
            raise _damaged(path, None, span, "tell of other boxes than the manifest")
        return sorted(held, key=lambda each: self.place(*each).start)

    def place(self, name: str, tensor: StoredTensor, stored: StoredBox) -> BoxPlace:
        """The place of a stored box in its file. Raises `CheckpointError`."""
        own = self._manifest.aliases.get(name, name)
        key = entry_name(own, tensor.shape, stored.box)
        place = self.index(stored.file, name).find(key)
        if place is None or place.size_bytes != stored.box.numel * tensor.item_bytes:
            told = self._manifest.files[stored.file]
            path, span = self._folder / told.name, (0, told.header_bytes)
            raise _damaged(path, name, span, f"do not tell of {key!r} as the manifest does")
        return place

    def read_chunk(
        self, name: str, tensor: StoredTensor, stored: StoredBox, chunk: int, into: memoryview
    ) -> None:
        """Fill ``into``, of a chunk's size, and verify it. Raises `CheckpointError` for damage."""
        place = self.place(name, tensor, stored)
        start = place.start + chunk * CHUNK_BYTES
        span = (start, start + into.nbytes)
        file = self._opened(stored.file, name)
        digest = xxhash.xxh3_128()
        for done in range(0, into.nbytes, _READ_BYTES):
            part = into[done : done + _READ_BYTES]
            with _readable(file.path, name, span):
                count = self._files.read_into(file, part, start + done)
            if count < part.nbytes:
                raise _damaged(file.path, name, span, f"end after {done + count} bytes")
            digest.update(part)
        if digest.digest() != place.checksum(chunk):
            raise _damaged(file.path, name, span, "do not match their checksum: they are damaged")

    def _opened(self, number: int, name: str | None = None) -> OpenFile:
        """The file, open for this thread: the system foresees what each of them reads next."""
        mine = self._open.setdefault(threading.get_ident(), {})
        file = mine.pop(number, None)
        if file is None:
            while len(mine) >= _MOST_OPEN:
                self._files.close(mine.pop(next(iter(mine))))
            file = self._checked(self._manifest.files[number], name)
        mine[number] = file  # behind those that were used before
        return file

    def _checked(self, told: StoredFile, name: str | None) -> OpenFile:
        path = self._folder / told.name
        whole = (0, told.size_bytes)
        with _readable(path, name, whole):
            file = self._files.open(path)
            try:
                size = self._files.size(file)
                if size != told.size_bytes:
                    what = f"were written, but the file has {size} bytes"
                    raise _damaged(path, name, whole, what)
                _part(self._files, file, 0, told.header_bytes, told.header_checksum, name)
            except (OSError, CheckpointError):
                self._files.close(file)
                raise
        return file


def _part(
    files: Files, file: OpenFile, start: int, size_bytes: int, checksum: str, name: str | None
) -> bytes:
    """Read a part of which the manifest has the checksum."""
    span, data = (start, start + size_bytes), bytearray(size_bytes)
    with _readable(file.path, name, span):
        count = files.read_into(file, memoryview(data), start)
    if count < size_bytes or checksum_of(data) != checksum:
        raise _damaged(
            file.path,
            name,
            span,
            "do not match their checksum in the manifest: they are damaged, or the file is that "
            "of another save or rank",
        )
    return bytes(data)


@contextmanager
def _readable(path: Path, name: str | None, span: tuple[int, int]) -> Iterator[None]:
    """Raise `CheckpointError` where the system cannot read."""
    try:
        yield
    except OSError as error:
        raise _damaged(path, name, span, f"cannot be read: {error}") from error


def _damaged(path: Path, name: str | None, span: tuple[int, int], what: str) -> CheckpointError:
    of_tensor = f" (tensor {name!r})" if name is not None else ""
    return CheckpointError(
        f"{path}: bytes {span[0]} to {span[1]}{of_tensor} {what}. Load another step, or restore "
        "the file",
        file=str(path),
        tensor=name,
        byte_range=span,
    )
