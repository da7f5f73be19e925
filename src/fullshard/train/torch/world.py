# SPDX-License-Identifier: Apache-2.0
"""One rank's view of all ranks of the torch engine."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.distributed import cleanup, get_device, join
from fullshard.torch.comm.process_group import ProcessGroupComm
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.comm.texts import broadcast_bytes
from fullshard.train.run import World

__all__ = ["RankWorld", "joined"]


class RankWorld(World):
    """A rank of ``comm`` that computes on ``device``."""

    noun = "rank"

    def __init__(self, comm: Comm, device: torch.device):
        self.comm: Comm = comm
        self.device: torch.device = device
        self.part: tuple[int, int] = comm.rank, comm.size
        self.size: int = comm.size
        self.is_first: bool = comm.rank == 0
        self.name: str = f"{comm.size} ranks"
        self.where: str = f"{self.name} on {device.type}"
        cuda = device.type == "cuda"
        self.driver = torch.cuda.get_device_name(device) if cuda else device.type

    def device_memory(self) -> tuple[int, int] | None:
        """See `World.device_memory`."""
        if self.device.type != "cuda":
            return None
        total = torch.cuda.mem_get_info(self.device)[1]
        return torch.cuda.max_memory_allocated(self.device), total

    def total(self, values: Tensor) -> Tensor:
        """Sum of ``values`` (a small tensor, on `device`) over all ranks, in place. Collective."""
        self.comm.all_reduce([values]).wait()
        return values

    def of_all(self, *values: float) -> list[list[float]]:
        """See `World.of_all`."""
        rows = torch.zeros(self.size, len(values), dtype=torch.float64, device=self.device)
        rows[self.part[0]] = torch.tensor(values, dtype=torch.float64, device="cpu")
        return self.total(rows).tolist()

    def somewhere(self, *flags: bool) -> tuple[bool, ...]:
        """See `World.somewhere`."""
        counts = self.total(torch.tensor(flags, dtype=torch.float64, device=self.device))
        return tuple(count > 0 for count in counts.tolist())

    def shared_text(self, text: str) -> str:
        """See `World.shared_text`."""
        return broadcast_bytes(self.comm, text.encode(), self.device).decode()


@contextmanager
def joined(*, ask_hosts: bool = False) -> Iterator[RankWorld]:
    """Join the ranks that the environment names (RANK, WORLD_SIZE, MASTER_ADDR, ...), then leave.

    Collective. With GPUs each local rank takes one and NCCL carries the collectives, else Gloo.
    With ``ask_hosts`` Gloo carries what is in host memory there, too: optional units ask in it.
    """
    device = get_device()
    on_gpu = "cpu:gloo,cuda:nccl" if ask_hosts else "nccl"
    join(on_gpu if device.type == "cuda" else "gloo")
    world = dist.group.WORLD
    assert world is not None
    yield RankWorld(ProcessGroupComm(world), device)
    # Not after an error: leaving would fail the other ranks before this one has said why.
    cleanup()
