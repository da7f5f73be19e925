# SPDX-License-Identifier: Apache-2.0
"""One rank's view of all ranks: who it is, where it computes, and the few numbers they agree on."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

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
    device = torch.device("cpu")
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        # A launcher may show each process one GPU only.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    on_gpu = device.type == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    yield World(dist.get_rank(), dist.get_world_size(), device)
    # Not after an error: leaving would fail the other ranks before this one has said why.
    dist.destroy_process_group()
