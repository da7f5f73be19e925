# SPDX-License-Identifier: Apache-2.0
"""The place of each box in its file, and the checksums of its chunks.

The file tells both: its header has the places, and its last entry is a table of checksums.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from fullshard.core.boxes import Box
from fullshard.core.errors import ConfigurationError
from fullshard.core.safetensors_format import Entry, entries_of

CHUNK_BYTES = 4 * 2**20
TABLE = "fullshard/xxh3_128"  # the entry with the checksums of all chunks before it
CHECKSUM_BYTES = 16


def chunk_count(size_bytes: int) -> int:
    """Into how many chunks that many bytes fall."""
    return -(-size_bytes // CHUNK_BYTES)


def entry_name(name: str, shape: tuple[int, ...], box: Box) -> str:
    """The name of a box in a file's header: of a whole tensor its own, else its intervals too."""
    if box.sizes == shape:
        return name
    ends = zip(box.offsets, box.sizes, strict=True)
    return f"{name}[{','.join(f'{first}:{first + size}' for first, size in ends)}]"


@dataclass(frozen=True)
class BoxPlace:
    """A box's bytes in a file, and the checksums of their chunks, 16 bytes each."""

    start: int
    size_bytes: int
    checksums: bytes

    def checksum(self, chunk: int) -> bytes:
        return self.checksums[chunk * CHECKSUM_BYTES : (chunk + 1) * CHECKSUM_BYTES]


class FileIndex:
    """All places in a file, by name in its header. ``spans``: (name, start, bytes), in order."""

    def __init__(self, spans: Iterable[tuple[str, int, int]], table: bytes):
        self._places: dict[str, tuple[int, int, int]] = {}
        self._table = table
        chunks = 0
        for name, start, size_bytes in spans:
            self._places[name] = start, size_bytes, chunks
            chunks += chunk_count(size_bytes)
        if chunks * CHECKSUM_BYTES != len(table):
            raise ConfigurationError(f"it has {len(table)} bytes of checksums for {chunks} chunks")

    @staticmethod
    def of_file(header: bytes, size_bytes: int, table: bytes) -> "FileIndex":
        """The index that a file tells. Raises `ConfigurationError` if it cannot be."""
        entries = entries_of(header, size_bytes - len(header))
        told = entries.pop(TABLE, None)
        if told is None or told.entry != Entry("U8", (len(table) // CHECKSUM_BYTES, 16)):
            raise ConfigurationError(f"it has no checksums {TABLE!r}")
        if told.start + len(table) != size_bytes:
            raise ConfigurationError(f"{TABLE!r} is not at its end")
        spans = [(name, each.start, each.entry.size_bytes) for name, each in entries.items()]
        return FileIndex(sorted(spans, key=lambda span: span[1]), table)

    def __len__(self) -> int:
        return len(self._places)

    def find(self, name: str) -> BoxPlace | None:
        place = self._places.get(name)
        if place is None:
            return None
        start, size_bytes, first = place
        end = (first + chunk_count(size_bytes)) * CHECKSUM_BYTES
        return BoxPlace(start, size_bytes, self._table[first * CHECKSUM_BYTES : end])
