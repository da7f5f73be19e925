# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint needs of the ranks that write it together: two calls with bytes."""

import json
from collections.abc import Sequence
from typing import Any, Protocol

from fullshard.core.errors import CheckpointError, FullshardError

__all__ = ["Ranks", "SoloRanks", "agree", "failure_text"]


class Ranks(Protocol):
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

    def duplicate(self) -> "Ranks":
        """The same ranks for another thread: its calls may overlap with these."""


class SoloRanks:
    """A group of one."""

    rank = 0
    size = 1

    def gather(self, data: bytes) -> list[bytes]:
        """A list of the only one's."""
        return [data]

    def broadcast(self, data: bytes) -> bytes:
        """The same."""
        return data

    def duplicate(self) -> "SoloRanks":
        """Itself."""
        return self


def failure_text(error: BaseException) -> str:
    """How a failure is told to the other ranks."""
    if isinstance(error, FullshardError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def agree(ranks: Ranks, what: str, failures: Sequence[BaseException]) -> None:
    """Raise `CheckpointError` on all ranks if one of them has a failure. Collective.

    The first failure of the lowest rank is told, after ``what``, which says what cannot be done.
    """
    told = ranks.gather(json.dumps([failure_text(each) for each in failures[:1]]).encode())
    failed: list[Any] = [
        [rank, texts[0]] for rank, texts in enumerate(map(json.loads, told)) if texts
    ]
    failed = json.loads(ranks.broadcast(json.dumps([len(failed), *failed[:1]]).encode()))
    if failed[0]:
        rank, text = failed[1]
        more = f" ({failed[0] - 1} other ranks failed too)" if failed[0] > 1 else ""
        where = f" on rank {rank} of {ranks.size}" if ranks.size > 1 else ""
        cause = failures[0] if failures else None
        known = cause if isinstance(cause, CheckpointError) and ranks.rank == rank else None
        raise CheckpointError(
            f"{what}{where}: {text}{more}",
            file=known.file if known else None,
            tensor=known.tensor if known else None,
            byte_range=known.byte_range if known else None,
        ) from cause
