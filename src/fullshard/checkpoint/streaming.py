# SPDX-License-Identifier: Apache-2.0
"""A rank's bytes on their way to its file: copied into blocks by one thread, written by another.

[Note: Back-pressure]
Whoever has the bytes fills blocks and hands on each full one; the writing thread gives it back when
it is written. If all blocks are under way, the one that fills waits. So a save never holds more
host memory than its blocks, which are as many as were stated.

[Note: Around the page cache]
Blocks are aligned and so is the data's place in the file, which is written with O_DIRECT where the
file system can: a save does not displace what the page cache holds, and needs no fresh pages, which
cost several times the writing itself on virtual machines (docs/log.md has figures). Blocks are in
huge pages where there are any: a disk takes twice as long for memory that lies in small ones.
"""

import mmap
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from fullshard.checkpoint.shards import Piece, ShardWriter

BLOCK_BYTES = 16 * 2**20
NewBlock = Callable[[int], memoryview]


_WIPE_ON_FORK = 18  # on Linux; `mmap` has no name for it


def _plain_block(size_bytes: int) -> memoryview:
    """Make memory of this process alone: a fork finds zeros in it, and costs no copy."""
    memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        for advice in (mmap.MADV_HUGEPAGE, _WIPE_ON_FORK):
            with suppress(OSError):  # a system without it
                memory.madvise(advice)
    return memoryview(memory)


class Blocks:
    """Page-aligned host memory for one save at a time, at most ``most_bytes`` of it.

    ``new_block`` makes memory of a number of bytes, pinned where copies come from a GPU.
    """

    def __init__(self, most_bytes: int, new_block: NewBlock = _plain_block):
        self._left = max(2, most_bytes // BLOCK_BYTES)
        self.most_bytes: int = self._left * BLOCK_BYTES
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._new_block = new_block
        self.held_bytes: int = 0

    def take(self) -> memoryview:
        """A block of `BLOCK_BYTES`, as soon as there is one."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            if self._left == 0:
                return self._free.get()
        self._left -= 1
        self.held_bytes += BLOCK_BYTES
        return self._new_block(BLOCK_BYTES)

    def give_back(self, block: memoryview) -> None:
        """Let the block be used again."""
        self._free.put(block)


class Conveyor:
    """Between the thread that fills blocks, by `fill`, and the one that writes them, by `pour`."""

    def __init__(self, blocks: Blocks):
        self._blocks = blocks
        self._filled: queue.SimpleQueue[tuple[memoryview, int] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Copy all bytes of ``pieces`` into blocks, unless the writing stops, and hand them on."""
        block: memoryview | None = None
        used = 0
        try:
            for piece in pieces:
                start = 0
                while start < piece.size_bytes:
                    if self._stopped.is_set():
                        return
                    if block is None:
                        block, used = self._blocks.take(), 0
                    size_bytes = min(BLOCK_BYTES - used, piece.size_bytes - start)
                    piece.source.copy_into(block[used : used + size_bytes], start)
                    start, used = start + size_bytes, used + size_bytes
                    if used == BLOCK_BYTES:
                        self._filled.put((block, used))
                        block = None
            if block is not None:
                self._filled.put((block, used))
                block = None
        finally:
            if block is not None:
                self._blocks.give_back(block)
            self._filled.put(None)
            if self._stopped.is_set():
                self._empty()

    def pour(self, _: Sequence[Piece], writer: ShardWriter) -> None:
        """Write what is handed on, until all is."""
        while (each := self._filled.get()) is not None:
            block, size_bytes = each
            try:
                writer.append(block[:size_bytes])
            finally:
                self._blocks.give_back(block)

    def stop(self) -> None:
        """Nothing more will be written: let the one that fills go on."""
        self._stopped.set()
        self._empty()

    def _empty(self) -> None:
        while True:
            try:
                rest = self._filled.get_nowait()
            except queue.Empty:
                return
            if rest is not None:
                self._blocks.give_back(rest[0])


def stream(pieces: Sequence[Piece], writer: ShardWriter, blocks: Blocks | None = None) -> None:
    """Write all bytes of ``pieces``; a thread writes while the next block is filled."""
    conveyor = Conveyor(blocks or Blocks(3 * BLOCK_BYTES))
    failures: list[BaseException] = []

    def write() -> None:
        try:
            conveyor.pour(pieces, writer)
        except BaseException as error:
            failures.append(error)
        finally:
            conveyor.stop()

    thread = threading.Thread(target=write, name="fullshard-write", daemon=True)
    thread.start()
    try:
        conveyor.fill(pieces)
    finally:
        thread.join()
    if failures:
        raise failures[0]
