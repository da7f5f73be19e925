# SPDX-License-Identifier: Apache-2.0
"""Memory: what processes use now, what a model holds on a rank, and what sharding saves."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fullshard.core.layout import stored_bytes
from fullshard.core.strategy import ShardingStrategy
from fullshard.core.text import bytes_text, in_columns
from fullshard.host_memory import host_total_bytes, resident_bytes
from fullshard.torch.comm.compressed import CompressedComm
from fullshard.torch.comm.ranks import Where, ranks_of
from fullshard.torch.inspection.forecast import forecast_step, named_units
from fullshard.torch.optim.checks import held_bytes, optimizer_state_bytes
from fullshard.torch.step.managed import managed_units
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.unit import Unit

_STEP_COUNT_BYTES = 4  # AdamW counts the steps of each parameter in a float32
_MOMENTS = 2


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
    rows: list[list[Any]] = [
        [None if figure < 0 else figure for figure in row]
        for row in full.view(comm.size, len(figures)).tolist()
    ]
    return MemoryOfRanks(MemoryOfRank(rank, *row) for rank, row in enumerate(rows))


def _text(count: int | None) -> str:
    return "-" if count is None else bytes_text(count)


@dataclass(frozen=True)
class Bytes:
    """Bytes that one process holds for a model: at rest, and at most beyond that within a step."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    transient_bytes: int = 0

    @classmethod
    def unsharded(cls, model: nn.Module) -> "Bytes":
        """Return the bytes that one process needs for ``model`` without shards, with AdamW.

        Computed from shapes: AdamW keeps two moments like the parameter and a float32 step count
        for each trained one. Tied parameters count once.
        """
        params = list(model.parameters())
        trained = [param for param in params if param.requires_grad]
        size = sum(map(_global_bytes, trained))
        optimizer = _MOMENTS * size + _STEP_COUNT_BYTES * len(trained)
        return cls(sum(map(_global_bytes, params)), size, optimizer)

    @property
    def at_rest_bytes(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        """Everything: at rest and transient."""
        return self.at_rest_bytes + self.transient_bytes


def beside(
    rank: Bytes, unsharded: Bytes, state: str = "optimizer state"
) -> list[tuple[str, int, int]]:
    """Return the bytes of a rank by purpose, beside those of one process without shards."""
    return [
        (name, getattr(rank, f"{field}_bytes"), getattr(unsharded, f"{field}_bytes"))
        for name, field in (
            ("parameters", "parameters"),
            ("gradients", "gradients"),
            (state, "optimizer"),
            ("at rest", "at_rest"),
            ("full units in a step, at most", "transient"),
            ("peak, without activations", "total"),
        )
    ]


@dataclass(frozen=True)
class MemorySummary:
    """Bytes of one rank and of one process without shards; ``str()`` is a table.

    ``measured`` says if optimizer state was counted, else it is AdamW's by its definition.
    ``on_host`` is the part of this rank's bytes at rest that is offloaded to host memory.
    """

    rank: Bytes
    unsharded: Bytes
    measured: bool
    on_host: int = 0

    @property
    def savings(self) -> float:
        """The share of bytes at rest that a rank is spared, 0 to 1."""
        return _spared(self.rank.at_rest_bytes, self.unsharded.at_rest_bytes)

    @property
    def peak_savings(self) -> float:
        """The share of the peak that a rank is spared; below 0 if few units hold all."""
        return _spared(self.rank.total_bytes, self.unsharded.total_bytes)

    @property
    def times_larger(self) -> float:
        """The factor by which a model could be larger in the same bytes at rest of each rank.

        Without shards over with shards, both at rest: parameters, gradients and optimizer state. Of
        a larger model the full units and activations are larger too; they are not in this figure.
        """
        mine, whole = self.rank.at_rest_bytes, self.unsharded.at_rest_bytes
        return whole / mine if mine else 1.0

    def __str__(self) -> str:
        state = "measured" if self.measured else "AdamW's"
        rows: list[tuple[object, ...]] = [("bytes", "this rank", "without shards", "share")]
        for name, mine, whole in beside(self.rank, self.unsharded, f"optimizer state ({state})"):
            rows.append((name, mine, whole, f"{mine / whole:.1%}" if whole else ""))
        lines = [in_columns(rows, right=(1, 2, 3))]
        if self.on_host:
            lines.append(f"{bytes_text(self.on_host)} of what rests is in host memory.")
        lines.append(
            f"Saves {self.savings:.1%} at rest, {self.peak_savings:.1%} at the peak. In the same "
            f"bytes at rest, ranks can train a model {self.times_larger:.2f} times larger\n"
            "(its full units and activations, larger too, are not counted)."
        )
        return "\n".join(lines)


def memory_summary(model: nn.Module, optimizer: Optimizer | None = None) -> MemorySummary:
    """Sum up the bytes of ``model`` on this rank, and in one process without sharding.

    At rest means after a backward: parameters and gradients by the units' layouts, padding
    included, and everything else as it is. Optimizer state is counted if ``optimizer`` has stepped
    (or is an SGD that keeps none), and computed for AdamW otherwise. "Full units in a step" is the
    peak of the engine's own schedule for a step that runs each unit once, with every reduce ending
    as late as it may; copies on their way to the host, activations and buffers are not included. A
    plain model saves nothing. Works behind both interfaces. Not collective: ranks may differ by
    padding and by where parameters end.
    """
    units = named_units(model)
    sharded = {id(param) for each in units for param in each.unit.sharded}
    others = [param for param in model.parameters() if id(param) not in sharded]
    all_units = [each.unit for each in units]
    whole = Bytes.unsharded(model)
    plain = sum(param.nbytes for param in others)
    trained = sum(param.nbytes for param in others if param.requires_grad)
    parameters = plain + sum(map(_parameter_bytes, all_units))
    gradients = trained + sum(map(_gradient_bytes, all_units))
    measured = optimizer is not None and (bool(optimizer.state) or _keeps_none(optimizer))
    if optimizer is not None and measured:
        mine, values = optimizer_state_bytes(optimizer), tree_leaves(list(optimizer.state.values()))
        of_all = sum(_global_bytes(value) for value in values if isinstance(value, Tensor))
        whole = replace(whole, optimizer_bytes=of_all)
    else:
        mine = _adamw_bytes(list(model.parameters()))
    rank = Bytes(parameters, gradients, mine, forecast_step(units).peak_bytes)
    return MemorySummary(rank, whole, measured, _bytes_on_host(all_units))


def _spared(mine: int, whole: int) -> float:
    return 1 - mine / whole if whole else 0.0


def _global_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # of a sharded one, both are global


def _adamw_bytes(params: Sequence[Tensor]) -> int:
    trained = [param for param in params if param.requires_grad]
    return _MOMENTS * sum(map(held_bytes, trained)) + _STEP_COUNT_BYTES * len(trained)


def _keeps_none(optimizer: Optimizer) -> bool:
    """Return True if ``optimizer`` never keeps state."""
    groups = optimizer.param_groups
    return isinstance(optimizer, torch.optim.SGD) and not any(g["momentum"] for g in groups)


def _parameter_bytes(unit: Unit) -> int:
    """Add up its shard and the copy that stays on the device if only optimizer state is away."""
    offload = unit.plan.offload
    copies = offload.to_host and not offload.params
    working = sum(stored_bytes(s.slice_numel, s.full_dtype) for s in unit.layout.segments)
    return unit.layout.shard_bytes + (working if copies else 0)


def _gradient_bytes(unit: Unit) -> int:
    if not unit.plan.precision.keep_low_grads:
        return unit.layout.grad_shard_bytes
    return unit.layout.grad_full_bytes // unit.layout.shards


def _bytes_on_host(units: Sequence[Unit]) -> int:
    total = 0
    for unit in units:
        if unit.plan.offload.to_host and unit.device != torch.device("cpu"):
            total += unit.layout.shard_bytes + _gradient_bytes(unit) + _adamw_bytes(unit.sharded)
    return total


def resting_bytes(model: nn.Module, optimizer: Optimizer | None) -> Bytes:
    """Return the bytes that this rank holds now for parameters, gradients and optimizer state.

    They are counted from existing storages, not from the layout; the rounding errors that error
    feedback keeps count as gradients. Works for plain models too. Not collective.
    """
    params = list(model.parameters())
    grads = [param.grad for param in params if param.grad is not None]
    reduces = [managed.unit.ranks.reduce for managed in managed_units(model)]
    residuals = sum(each.residual_bytes for each in reduces if isinstance(each, CompressedComm))
    return Bytes(
        _storage_bytes(params),
        _storage_bytes(grads) + residuals,
        0 if optimizer is None else optimizer_state_bytes(optimizer),
    )


def _storage_bytes(tensors: list[Any]) -> int:
    local = [t.local if isinstance(t, ShardedParameter) else t for t in tensors]
    storages = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in local)}
    return sum(storages.values())
