# SPDX-License-Identifier: Apache-2.0
"""The processes of a JAX program, as `fullshard.checkpoint` wants them."""

import uuid
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from fullshard.checkpoint import CheckpointRanks, Files, SoloRanks
from fullshard.checkpoint.ranks import FolderRanks, agree

__all__ = ["ProcessRanks", "process_ranks"]


class ProcessRanks:
    """The processes of a JAX program."""

    def __init__(self) -> None:
        self.rank: int = jax.process_index()
        self.size: int = jax.process_count()

    def gather(self, data: bytes) -> list[bytes]:
        """See `fullshard.checkpoint.CheckpointRanks`."""
        parts = self.share(data)
        return [] if self.rank else parts

    def broadcast(self, data: bytes) -> bytes:
        """See `fullshard.checkpoint.CheckpointRanks`."""
        return self.share(b"" if self.rank else data)[0]

    def share(self, data: bytes) -> list[bytes]:
        """See `fullshard.checkpoint.CheckpointRanks`."""
        sizes = multihost_utils.process_allgather(np.asarray([len(data)], np.int32))
        padded = np.zeros(max(1, int(sizes.max())), np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        rows = multihost_utils.process_allgather(padded)
        return [bytes(row[: int(n)]) for row, n in zip(rows, sizes.reshape(-1), strict=True)]

    def duplicate(self, run: Path, files: Files) -> FolderRanks:
        """Ranks that talk through ``run``: threads of a JAX program have no collectives."""
        name = self.broadcast(uuid.uuid4().hex.encode()).decode()
        aside = FolderRanks(run, name, self.rank, self.size, files)
        failure: Exception | None = None
        try:
            if self.rank == 0:
                aside.open()
        except OSError as error:
            failure = error
        agree(self, f"nothing can be saved to {run}", failure)
        return aside


def process_ranks() -> CheckpointRanks:
    """All processes."""
    return ProcessRanks() if jax.process_count() > 1 else SoloRanks()
