# SPDX-License-Identifier: Apache-2.0
"""The memory that this process, or every rank's, uses at the moment."""

from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from fullshard.core.strategy import ShardingStrategy
from fullshard.core.text import bytes_text, in_columns
from fullshard.host_memory import host_total_bytes, resident_bytes
from fullshard.torch.comm.ranks import Where, ranks_of

__all__ = ["MemoryOfRank", "MemoryOfRanks", "memory_of_rank", "memory_of_ranks"]


@dataclass(frozen=True)
class MemoryOfRank:
    """The bytes that one process uses; None for figures that cannot be known or do not exist.

    ``host_rss_bytes`` is physical memory now, ``host_peak_rss_bytes`` the most since the process
    began, ``host_total_bytes`` what its host has. The rest is of one GPU: what tensors hold now and
    held at most (since the start, or `torch.cuda.reset_peak_memory_stats`), what torch's allocator
    keeps for them, and the device's own figures for all its processes together.
    """

    rank: int
    host_rss_bytes: int | None
    host_peak_rss_bytes: int
    host_total_bytes: int
    device_allocated_bytes: int | None = None
    device_reserved_bytes: int | None = None
    device_peak_allocated_bytes: int | None = None
    device_free_bytes: int | None = None
    device_total_bytes: int | None = None

    def __str__(self) -> str:
        host = (
            f"rank {self.rank}: host {_text(self.host_rss_bytes)} "
            f"(peak {_text(self.host_peak_rss_bytes)} of {_text(self.host_total_bytes)})"
        )
        if self.device_total_bytes is None:
            return f"{host}, no GPU"
        return (
            f"{host}, GPU {_text(self.device_allocated_bytes)} allocated "
            f"(peak {_text(self.device_peak_allocated_bytes)}), "
            f"{_text(self.device_reserved_bytes)} reserved, "
            f"{_text(self.device_free_bytes)} of {_text(self.device_total_bytes)} free"
        )


class MemoryOfRanks(tuple[MemoryOfRank, ...]):
    """The memory of all ranks, in rank order; ``str()`` is a table that ends with min, max, sum."""

    __slots__ = ()

    def __str__(self) -> str:
        names = [field.name for field in fields(MemoryOfRank)[1:]]
        columns = {name: [getattr(each, name) for each in self] for name in names}
        shown = {name: values for name, values in columns.items() if set(values) != {None}}
        heads = [name.removesuffix("_bytes").replace("_", " ") for name in shown]
        rows: list[list[object]] = [["rank", *heads]]
        for number, each in enumerate(self):
            rows.append([f"{each.rank}", *(_text(values[number]) for values in shown.values())])
        for name, summary in (("min", min), ("max", max), ("sum", sum)):
            row: list[object] = [name]
            for column, values in shown.items():
                # Ranks share a host, or a GPU: what that has adds up to nothing.
                shared = name == "sum" and column.endswith(("_total_bytes", "_free_bytes"))
                row.append("-" if shared or None in values else _text(summary(values)))
            rows.append(row)
        return in_columns(rows, right=range(len(rows[0])))


def memory_of_rank(device: torch.device | None = None) -> MemoryOfRank:
    """Return what this process uses now, on its host and on ``device`` (by default its GPU).

    Not collective. The rank is that in the default process group, 0 without one.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    rss, peak = resident_bytes()
    total = host_total_bytes()
    if device is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    if device is None or device.type != "cuda":
        return MemoryOfRank(rank, rss, peak, total)
    free, on_device = torch.cuda.mem_get_info(device)
    return MemoryOfRank(
        rank,
        rss,
        peak,
        total,
        torch.cuda.memory_allocated(device),
        torch.cuda.memory_reserved(device),
        torch.cuda.max_memory_allocated(device),
        free,
        on_device,
    )


def memory_of_ranks(group: Where = None) -> MemoryOfRanks:
    """Return what every rank of ``group`` (all ranks, if None) uses now. Collective.

    Ranks are numbered within the group. Without a process group there is this process alone.
    """
    mine = memory_of_rank()
    if group is None and not dist.is_initialized():
        return MemoryOfRanks([mine])
    comm = ranks_of(group, ShardingStrategy.FULL_SHARD.sharding).gather
    figures = [-1 if figure is None else figure for figure in astuple(mine)[1:]]
    shard = torch.tensor(figures, dtype=torch.int64, device="cpu")
    full = torch.empty(comm.size * len(figures), dtype=torch.int64, device="cpu")
    comm.all_gather([(full, shard)], label="memory of ranks").wait()
    rows = full.view(comm.size, len(figures)).tolist()
    return MemoryOfRanks(_from_figures(rank, row) for rank, row in enumerate(rows))


def _from_figures(rank: int, figures: list[int]) -> MemoryOfRank:
    names = [field.name for field in fields(MemoryOfRank)[1:]]
    values = zip(names, figures, strict=True)
    known: dict[str, Any] = {name: value if value >= 0 else None for name, value in values}
    return MemoryOfRank(rank, **known)


def _text(count: int | None) -> str:
    return "-" if count is None else bytes_text(count)
