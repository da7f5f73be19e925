# SPDX-License-Identifier: Apache-2.0
"""The calls by which ranks talk about a checkpoint: bytes, gathered, broadcast and shared."""

import json
from typing import Any, Protocol

from fullshard.checkpoint.format.envelope import checksum_of
from fullshard.core.errors import (
    CheckpointError,
    ConfigurationError,
    FullshardError,
    NotSupportedError,
)

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

    def share(self, data: bytes) -> list[bytes]:
        """Every rank's ``data`` in rank order, on every rank; cheapest for short ones."""

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

    def share(self, data: bytes) -> list[bytes]:
        """A list of the only one's."""
        return [data]

    def duplicate(self) -> "SoloRanks":
        """Itself."""
        return self


def failure_text(error: BaseException) -> str:
    """How a failure is told to the other ranks."""
    if isinstance(error, FullshardError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def agree(ranks: Ranks, what: str, failure: Exception | None, note: str = "") -> str:
    """Raise on all ranks if one of them has a failure. Collective.

    `ConfigurationError` if that of the lowest rank is one, else `CheckpointError`. Its text stands
    after ``what``, which says what cannot be done. Returns a checksum of all ranks' notes.
    """
    mine: list[Any] = []
    if failure is not None:
        refused = isinstance(failure, ConfigurationError | NotSupportedError)
        mine = [failure_text(failure), refused, *_place_of(failure)]
    told = [json.loads(each) for each in ranks.share(json.dumps([note, *mine]).encode())]
    failed = [(rank, each[1:]) for rank, each in enumerate(told) if each[1:]]
    if not failed:
        return checksum_of(json.dumps([each[0] for each in told]).encode())
    rank, (text, refused, file, tensor, span) = failed[0]
    where = f" on rank {rank} of {ranks.size}" if ranks.size > 1 else ""
    more = f" ({len(failed) - 1} other ranks failed too)" if len(failed) > 1 else ""
    message = f"{what}{where}: {text}{more}"
    if refused:
        raise ConfigurationError(message) from failure
    byte_range = (span[0], span[1]) if span else None
    raise CheckpointError(message, file=file, tensor=tensor, byte_range=byte_range) from failure


def _place_of(failure: Exception) -> list[Any]:
    if isinstance(failure, CheckpointError):
        return [failure.file, failure.tensor, failure.byte_range]
    return [None, None, None]
