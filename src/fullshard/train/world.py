# SPDX-License-Identifier: Apache-2.0
"""One rank's view of all ranks: who it is, where it computes, and the few numbers they agree on."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.distributed import cleanup, get_device, join

__all__ = ["World", "joined"]


@dataclass(frozen=True)
class World:
    """This rank, how many there are, and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """Sum of ``values`` (a small tensor, on `device`) over all ranks, in place. Collective."""
        if self.size > 1:
            dist.all_reduce(values)
        return values


@contextmanager
def joined() -> Iterator[World]:
    """Join the ranks that the environment names (RANK, WORLD_SIZE, MASTER_ADDR, ...), then leave.

    Collective. With GPUs each local rank takes one and NCCL carries the collectives, else Gloo.
    """
    device = get_device()
    join("nccl" if device.type == "cuda" else "gloo")
    yield World(dist.get_rank(), dist.get_world_size(), device)
    # Not after an error: leaving would fail the other ranks before this one has said why.
    cleanup()
