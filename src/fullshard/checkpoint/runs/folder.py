# SPDX-License-Identifier: Apache-2.0
"""A run's folder with how it is kept.

[Note: One process at a time]
The process of rank 0 locks ``.lock`` in the folder at its first save and until it ends, however it
ends; the system gives the lock back. The file says who has it, for the text of the refusal. File
systems without locks are used without one. Within a process one save at a time is under way: a
second one would take what the first has staged for left over.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fullshard.checkpoint.files import Files, OpenFile
from fullshard.checkpoint.runs.commit import StepFolder, steps_in
from fullshard.checkpoint.runs.retention import Keep
from fullshard.checkpoint.streaming import BLOCK_BYTES
from fullshard.core.errors import CheckpointError, ConfigurationError

LOCK = ".lock"
_MOST = 64  # folders that a process keeps locked; of more the ones that were used first are freed
_locked: dict[tuple[int, str], OpenFile] = {}
_under_way: set[tuple[int, str]] = set()  # locks of the runs into which this process saves now
_changing = threading.Lock()


@contextlib.contextmanager
def save_into(files: Files, run: Path) -> Iterator[None]:
    """Make and lock ``run`` for a save; see [Note: One process at a time].

    It stays locked until this process ends. Raises `CheckpointError` if another save goes there.
    """
    files.make_folder(run)
    key = _lock(files, run)
    with _changing:
        if key in _under_way:
            raise CheckpointError(
                f"{run} is in use: another save of this process is under way. Call wait() for that "
                "one first; models that are saved apart need folders of their own",
                file=str(run),
            )
        _under_way.add(key)
    try:
        yield
    finally:
        _under_way.discard(key)


def _lock(files: Files, run: Path) -> tuple[int, str]:
    path = run / LOCK
    key = (os.getpid(), os.path.realpath(path))  # a fork has no locks of its parent
    with _changing:
        known = _locked.pop(key, None)
        if known is not None and not _is_same(known, path):
            os.close(known.descriptor)
            known = None
        if known is None:
            known = _taken(files, run, path)
        _locked[key] = known
        while len(_locked) > _MOST:
            os.close(_locked.pop(next(iter(_locked))).descriptor)
    return key


def _taken(files: Files, run: Path, path: Path) -> OpenFile:
    owner, now = "", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    try:
        return files.lock(path, f"process {os.getpid()} on {socket.gethostname()}, since {now}\n")
    except BlockingIOError as error:
        with contextlib.suppress(OSError):
            owner = path.read_text("utf-8", "replace").strip()[:200]
        raise CheckpointError(
            f"{run} is in use: {owner or 'another process'} saves into it. A run "
            "folder belongs to one run at a time: give this one its own, or end the other",
            file=str(path),
        ) from error


def _is_same(known: OpenFile, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(known.descriptor), path.stat())
    except OSError:
        return False


@dataclass(frozen=True)
class Background:
    """Bounds for what an asynchronous save holds before it is written.

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


@dataclass(frozen=True)
class RunFolder:
    """A folder of checkpoints and how it is kept; wherever a path to one is taken.

    ``path`` may be a text; it is made absolute when the `RunFolder` is made. ``keep`` says which
    steps stay when a new one has come (None: all), ``background`` how much host memory asynchronous
    saves may hold, and ``files`` is the file system. Raises `ConfigurationError` for a path that
    cannot be one.
    """

    path: Path
    keep: Keep | None = None
    background: Background = field(default_factory=Background)
    files: Files = field(default_factory=Files)

    def __init__(
        self,
        path: str | os.PathLike[str],
        keep: Keep | None = None,
        background: Background | None = None,
        files: Files | None = None,
    ):
        try:
            text = os.fspath(path)
        except TypeError:
            text = None
        if not isinstance(text, str) or not text or "\0" in text:
            raise ConfigurationError(
                f"a run folder is a path, got {path!r}" + " (it is empty)" * (text == "")
            )
        object.__setattr__(self, "path", Path(os.path.abspath(text)))
        object.__setattr__(self, "keep", keep)
        object.__setattr__(self, "background", background or Background())
        object.__setattr__(self, "files", files or Files())

    def newest(self) -> StepFolder | None:
        """The newest complete step, with its ``step`` and ``path``; None if there is none.

        Not collective; ranks may see different steps while one of them saves. Raises
        `CheckpointError` if the folder cannot be read.
        """
        return next(reversed(steps_in(self.files, self.path)), None)


def run_folder(path: str | os.PathLike[str] | RunFolder) -> RunFolder:
    """``path`` as a `RunFolder`."""
    return path if isinstance(path, RunFolder) else RunFolder(path)
