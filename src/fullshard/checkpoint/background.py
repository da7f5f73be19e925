# SPDX-License-Identifier: Apache-2.0
"""Saving while training goes on: the caller copies, a thread writes and agrees with other ranks."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fullshard.checkpoint.commit import Keep
from fullshard.checkpoint.files import Files
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.saving import About, write_step
from fullshard.checkpoint.shards import Piece
from fullshard.checkpoint.streaming import BLOCK_BYTES, Blocks, Conveyor
from fullshard.core.errors import CheckpointError, ConfigurationError

__all__ = ["Background", "Saving", "save_in_background"]


@dataclass(frozen=True)
class Background:
    """How an asynchronous save holds what is not written yet.

    ``host_memory_bytes`` is the most that a rank holds for it, in blocks of 16 MiB that are made
    when they are first needed and kept for the next save. With room for the rank's whole shard the
    caller waits for the copy alone; with less it waits until the rest is copied too, which is as
    fast as blocks are written. See [Note: Back-pressure] in `fullshard.checkpoint.streaming`.
    """

    host_memory_bytes: int = 16 * 2**30

    def __post_init__(self) -> None:
        if self.host_memory_bytes < 2 * BLOCK_BYTES:
            raise ConfigurationError(
                f"Background(host_memory_bytes={self.host_memory_bytes}): two blocks of "
                f"{BLOCK_BYTES} bytes are the least"
            )


class Saving:
    """A save that may still be under way."""

    def __init__(self, step: int):
        self.step = step
        self._folder: Path | None = None
        self._failure: BaseException | None = None
        self._work: Future[None] | None = None

    @staticmethod
    def finished(step: int, folder: Path) -> "Saving":
        """One that was complete when its call returned."""
        saving = Saving(step)
        saving._folder = folder
        return saving

    @property
    def done(self) -> bool:
        """True if `wait` would not block."""
        return self._work is None or self._work.done()

    def wait(self) -> Path:
        """Block until the step is there, and return its folder.

        Raises `CheckpointError` if it was not saved, on all ranks alike.
        """
        if self._work is not None:
            self._work.result()
        if self._failure is not None:
            if isinstance(self._failure, CheckpointError):
                raise self._failure
            raise CheckpointError(
                f"step {self.step} was not saved: {self._failure}"
            ) from self._failure
        assert self._folder is not None
        return self._folder


class _Threads:
    """Threads that write. They are kept: one that starts takes the caller's time.

    As many as there are saves under way at a time, which may wait for each other's ranks.
    """

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)  # threads stay with the parent

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], None]) -> Future[None]:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_MOST_SAVES, "fullshard-save")
            return self._pool.submit(work)


_MOST_SAVES = 1024
_threads = _Threads()


def save_in_background(
    run: Path,
    mine: Sequence[Piece],
    about: About,
    ranks: Ranks,
    files: Files,
    blocks: Blocks,
    keep: Keep | None = None,
) -> Saving:
    """Copy what is ``mine`` and return; a thread writes it, as `write_step` does. Collective.

    ``ranks`` is for the thread alone, and ``blocks`` for this save until it is done. The process
    does not end before the save has (an interpreter waits for such threads); one that is killed
    leaves a staging folder, which the next save removes.
    """
    saving = Saving(about.step)
    conveyor = Conveyor(blocks)

    def work() -> None:
        try:
            saving._folder = write_step(run, mine, about, ranks, files, keep, conveyor.pour)
        except BaseException as error:
            saving._failure = error
        finally:
            conveyor.stop()

    if sum(piece.size_bytes for piece in mine) > blocks.most_bytes:
        saving._work = _threads.submit(work)
        conveyor.fill(mine)
        return saving
    try:
        conveyor.fill(mine)  # first: the copy has the processor for itself
    finally:
        saving._work = _threads.submit(work)  # which tells all ranks if the copy has failed
    return saving
