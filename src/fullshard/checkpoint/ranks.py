# SPDX-License-Identifier: Apache-2.0
"""The calls by which ranks talk about a checkpoint: bytes, gathered, broadcast and shared."""

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fullshard.checkpoint.files import Files, read_whole, write_new
from fullshard.checkpoint.format.envelope import checksum_of
from fullshard.checkpoint.runs.retention import remove_entry
from fullshard.core.errors import (
    CheckpointError,
    ConfigurationError,
    FullshardError,
    NotSupportedError,
)

_FOLDER = re.compile(r"\.ranks-[0-9a-f]{32}")
_LEFT = "left"
T = TypeVar("T")


class CheckpointRanks(Protocol):
    """A group of ranks. Its methods are collective and called in the same order by all.

    An implementation raises when a peer has died or its time-out has passed; it never waits for
    ever.
    """

    rank: int
    size: int

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's ``data`` in rank order on rank 0, an empty list on the others."""

    def broadcast(self, data: bytes) -> bytes:
        """The ``data`` of rank 0."""

    def share(self, data: bytes) -> list[bytes]:
        """Every rank's ``data`` in rank order, on every rank; cheapest for short ones."""

    def duplicate(self, run: Path, files: Files) -> "CheckpointRanks":
        """Return these ranks for the thread that saves to ``run``: its calls may overlap."""


class SoloRanks:
    """A group of one."""

    rank = 0
    size = 1

    def gather(self, data: bytes) -> list[bytes]:
        """A list of the only one's."""
        return [data]

    share = gather

    def broadcast(self, data: bytes) -> bytes:
        """Return ``data``."""
        return data

    def duplicate(self, run: Path, files: Files) -> "SoloRanks":
        """Itself."""
        return self


class FolderRanks:
    """Ranks that leave each other messages in a folder of the run: for threads without a network.

    The threads of a JAX program have no collectives of their own. They all see the run's folder,
    since they write to it. A rank that waits for one that has left, or for more than ``timeout_s``,
    raises `OSError`.
    """

    def __init__(
        self, run: Path, name: str, rank: int, size: int, files: Files, timeout_s: float = 1800.0
    ):
        self.rank: int = rank
        self.size: int = size
        self._run, self._files, self._timeout_s = run, files, timeout_s
        self._folder = run / f".ranks-{name}"
        self._calls = 0

    def open(self) -> None:
        """Make the folder, and remove those of earlier saves. To be called by one rank."""
        self._files.make_folder(self._run)
        for name in self._files.names(self._run):
            if _FOLDER.fullmatch(name):
                remove_entry(self._files, self._run, name)
        self._files.make_new_folder(self._folder)

    def gather(self, data: bytes) -> list[bytes]:
        self._calls += 1
        if self.rank:
            self._leave_message(f"{self._calls}-{self.rank}", data)
            return []
        return [data, *(self._message(each) for each in range(1, self.size))]

    def broadcast(self, data: bytes) -> bytes:
        self._calls += 1
        if self.rank:
            return self._message(0)
        self._leave_message(f"{self._calls}-0", data)
        return data

    def share(self, data: bytes) -> list[bytes]:
        return unpacked(self.broadcast(packed(self.gather(data))))

    def duplicate(self, run: Path, files: Files) -> "FolderRanks":
        """Itself: it is made for one thread."""
        return self

    def leave(self) -> None:
        """Let nobody wait for this rank; rank 0 removes the folder when all have left."""
        with contextlib.suppress(OSError):
            self._leave_message(f"{_LEFT}-{self.rank}", b"")
            if self.rank == 0:
                for each in range(1, self.size):
                    self._wait_for(f"{_LEFT}-{each}", each)
                remove_entry(self._files, self._run, self._folder.name)

    def _leave_message(self, name: str, data: bytes) -> None:
        staged = self._folder / f"new-{name}"
        write_new(self._files, staged, data)
        self._files.rename(staged, self._folder / name)

    def _message(self, rank: int) -> bytes:
        name = f"{self._calls}-{rank}"
        self._wait_for(name, rank)
        return read_whole(self._files, self._folder / name)

    def _wait_for(self, name: str, rank: int) -> None:
        end, pause_s = time.monotonic() + self._timeout_s, 0.001
        while True:
            there = self._files.names(self._folder)
            if name in there:
                return
            if f"{_LEFT}-{rank}" in there:
                raise ConnectionError(f"rank {rank} has given up")
            if time.monotonic() > end:
                raise TimeoutError(f"rank {rank} has left no message for {self._timeout_s} s")
            time.sleep(pause_s)
            pause_s = min(0.1, 1.5 * pause_s)


def packed(parts: Sequence[bytes]) -> bytes:
    """Put messages behind each other, for `unpacked`."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def unpacked(data: bytes) -> list[bytes]:
    """Take apart what `packed` has joined."""
    parts, start = [], 0
    while start < len(data):
        stop = start + 8 + int.from_bytes(data[start : start + 8], "little")
        parts.append(data[start + 8 : stop])
        start = stop
    return parts


def failure_text(error: BaseException) -> str:
    """Put a failure into the words that the other ranks are told."""
    if isinstance(error, FullshardError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def agree(ranks: CheckpointRanks, what: str, failure: Exception | None, note: str = "") -> str:
    """Raise on all ranks if one of them has a failure. Collective.

    `ConfigurationError` if that of the lowest rank is one, else `CheckpointError`. Its text stands
    after ``what``, which says what cannot be done. Returns a checksum of all ranks' notes.
    """
    mine = [note, *(_told(failure) if failure is not None else [])]
    told = [json.loads(each) for each in ranks.share(json.dumps(mine).encode())]
    failed = [(rank, each[1:]) for rank, each in enumerate(told) if each[1:]]
    if not failed:
        return checksum_of(json.dumps([each[0] for each in told]).encode())
    rank, first = failed[0]
    where = f" on rank {rank} of {ranks.size}" if ranks.size > 1 else ""
    more = f" ({len(failed) - 1} other ranks failed too)" if len(failed) > 1 else ""
    raise _error(what + where, first, more) from failure


@contextlib.contextmanager
def agreed(ranks: CheckpointRanks, what: str) -> Iterator[None]:
    """Raise on all ranks, as `agree` does, what is raised within on one of them. Collective."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    agree(ranks, what, failure)


def from_first(ranks: CheckpointRanks, what: str, make: Callable[[], T]) -> T:
    """Return on all ranks what ``make`` gives on rank 0: JSON. Collective; raises as `agree`."""
    told: list[Any] = []
    failure: Exception | None = None
    if ranks.rank == 0:
        try:
            told = [make()]
        except Exception as error:
            failure, told = error, _told(error)
    told = json.loads(ranks.broadcast(json.dumps(told).encode()))
    if len(told) > 1:
        raise _error(what, told) from failure
    value: T = told[0]
    return value


def _told(failure: Exception) -> list[Any]:
    refused = isinstance(failure, ConfigurationError | NotSupportedError)
    place = ("file", "tensor", "byte_range")
    return [failure_text(failure), refused, *(getattr(failure, key, None) for key in place)]


def _error(what: str, told: Sequence[Any], more: str = "") -> FullshardError:
    text, refused, file, tensor, span = told
    message = f"{what}: {text}{more}"
    if refused:
        return ConfigurationError(message)
    byte_range = (span[0], span[1]) if span else None
    return CheckpointError(message, file=file, tensor=tensor, byte_range=byte_range)
