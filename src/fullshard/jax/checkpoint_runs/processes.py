# SPDX-License-Identifier: Apache-2.0
"""The processes of a JAX program, as `fullshard.checkpoint` wants them."""

import jax
import numpy as np
from jax.experimental import multihost_utils

from fullshard.checkpoint import Ranks, SoloRanks

__all__ = ["ProcessRanks", "process_ranks"]


class ProcessRanks:
    """The processes of a JAX program."""

    def __init__(self) -> None:
        self.rank, self.size = jax.process_index(), jax.process_count()

    def gather(self, data: bytes) -> list[bytes]:
        """See `fullshard.checkpoint.Ranks`."""
        found = self.share(data)
        return [] if self.rank else found

    def broadcast(self, data: bytes) -> bytes:
        """See `fullshard.checkpoint.Ranks`."""
        size = int(multihost_utils.broadcast_one_to_all(np.asarray(len(data), np.int32)))
        padded = np.zeros(max(1, size), np.uint8)
        if self.rank == 0:
            padded[:size] = np.frombuffer(data, np.uint8)
        return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))[:size])

    def share(self, data: bytes) -> list[bytes]:
        """See `fullshard.checkpoint.Ranks`."""
        sizes = multihost_utils.process_allgather(np.asarray([len(data)], np.int32))
        padded = np.zeros(max(1, int(sizes.max())), np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        rows = multihost_utils.process_allgather(padded)
        return [bytes(row[: int(n)]) for row, n in zip(rows, sizes.reshape(-1), strict=True)]

    def duplicate(self) -> "ProcessRanks":
        """Itself: nothing runs beside."""
        return self


def process_ranks() -> Ranks:
    """All processes."""
    return ProcessRanks() if jax.process_count() > 1 else SoloRanks()
