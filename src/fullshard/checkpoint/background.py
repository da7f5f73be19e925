# SPDX-License-Identifier: Apache-2.0
"""Saving while training goes on: the caller copies, a thread writes and agrees with other ranks."""

import atexit
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from fullshard.checkpoint.format.stored import About
from fullshard.checkpoint.planning import WritePlan
from fullshard.checkpoint.ranks import CheckpointRanks, FolderRanks
from fullshard.checkpoint.runs.folder import RunFolder
from fullshard.checkpoint.saving import WrittenStep, write_step
from fullshard.checkpoint.streaming import Blocks, Conveyor
from fullshard.core.errors import CheckpointError


class Saving:
    """A save that may still be under way."""

    def __init__(self, step: int):
        self.step = step
        self._written: WrittenStep | None = None
        self._failure: BaseException | None = None
        self._work: Future[None] | None = None
        self.is_told: bool = False  # that it failed, to who called `wait`

    @staticmethod
    def finished(step: int, written: WrittenStep) -> "Saving":
        """One that was complete when its call returned."""
        saving = Saving(step)
        saving._written = written
        return saving

    @property
    def done(self) -> bool:
        """True if `wait` would not block."""
        return self._work is None or self._work.done()

    def wait(self) -> Path:
        """Wait for the step, return its folder. Raises `CheckpointError`, on all ranks alike."""
        return self.written().folder

    def written(self) -> WrittenStep:
        """Block as `wait` does; the step's folder and the name of this very save."""
        if self._work is not None:
            self._work.result()
        if self._failure is not None:
            self.is_told = True
            _untold.discard(self)
            if isinstance(self._failure, CheckpointError):
                raise self._failure
            raise CheckpointError(
                f"step {self.step} was not saved: {self._failure}"
            ) from self._failure
        assert self._written is not None
        return self._written


_untold: set[Saving] = set()  # that failed, and nobody has asked for


@atexit.register
def _end_with_failure() -> None:
    """End the process with status 1 if a save has failed that nobody has waited for.

    Runs when the threads that save are done. Nothing else can change the status that late.
    """
    failed = sorted(_untold, key=lambda saving: saving.step)
    for saving in failed:
        print(
            f"fullshard: step {saving.step} was not saved: {saving._failure}\n"
            "fullshard: wait() for the last asynchronous save to handle this",
            file=sys.stderr,
        )
    if failed:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)


# As many threads as there are saves under way at a time, which may wait for each other's ranks.
# They are kept: one that starts takes the caller's time.
_MOST_SAVES = 1024
_threads = ThreadPoolExecutor(_MOST_SAVES, "fullshard-save")


def _make_threads_anew() -> None:
    """Leave the threads with the parent of a fork."""
    global _threads
    _threads = ThreadPoolExecutor(_MOST_SAVES, "fullshard-save")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_make_threads_anew)


def save_in_background(
    run: RunFolder, plan: WritePlan, about: About, ranks: CheckpointRanks, blocks: Blocks
) -> Saving:
    """Copy this rank's part of ``plan`` and return; a thread writes it, as `write_step` does.

    Collective. ``ranks`` is for the thread alone, and ``blocks`` for this save until it is done.
    The process does not end before the save has (an interpreter waits for such threads); one that
    is killed leaves a staging folder, which the next save removes.
    """
    saving = Saving(about.step)
    conveyor = Conveyor(blocks)

    def work() -> None:
        try:
            saving._written = write_step(run, plan, about, ranks, conveyor.pour)
        except BaseException as error:
            saving._failure = error
            _untold.add(saving)
        finally:
            conveyor.stop()
            if isinstance(ranks, FolderRanks):
                ranks.leave()

    if sum(piece.size_bytes for piece in plan.pieces) > blocks.most_bytes:
        saving._work = _threads.submit(work)
        conveyor.fill(plan.pieces)
        return saving
    try:
        conveyor.fill(plan.pieces)  # first: the copy has the processor for itself
    finally:
        saving._work = _threads.submit(work)  # which tells all ranks if the copy has failed
    return saving
