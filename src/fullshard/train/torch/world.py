# SPDX-License-Identifier: Apache-2.0
"""One rank's view of all ranks: who it is, where it computes, and the few numbers they agree on."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.distributed import cleanup, get_device, join
from fullshard.plan.cluster.read import device_of_driver
from fullshard.torch.inspection.memory import memory_of_rank

__all__ = ["World", "joined"]


@dataclass(frozen=True)
class World:
    """This rank, how many there are, and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """True if this rank prints and writes."""
        return self.rank == 0

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """FLOP/s that this rank's device reaches at most; known for bf16 on some GPUs."""
        if self.device.type != "cuda" or dtype is not torch.bfloat16:
            return None
        device = device_of_driver(torch.cuda.get_device_name(self.device))
        return device.peak("bfloat16") if device else None

    def memory_used(self) -> dict[str, int]:
        """Return the most bytes used so far and how many there are: of the GPU, or of the host."""
        memory = memory_of_rank(self.device)
        if memory.device_peak_allocated_bytes is None or memory.device_total_bytes is None:
            used, total = memory.host_peak_rss_bytes, memory.host_total_bytes
        else:
            used, total = memory.device_peak_allocated_bytes, memory.device_total_bytes
        return {"memory_bytes": used, "memory_total_bytes": total}

    def total(self, values: Tensor) -> Tensor:
        """Sum of ``values`` (a small tensor, on `device`) over all ranks, in place. Collective."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def shared_text(self, text: str) -> str:
        """Rank 0's text. Collective."""
        data = list(text.encode()) if self.is_first else []
        size = torch.tensor([float(len(data))], dtype=torch.float64, device=self.device)
        full = torch.zeros(int(self.total(size)), dtype=torch.float64, device=self.device)
        if self.is_first:
            full += torch.tensor(data, dtype=torch.float64, device=self.device)
        return bytes(int(each) for each in self.total(full).tolist()).decode()


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
