# SPDX-License-Identifier: Apache-2.0
"""Communication between ranks: the one protocol that the engine speaks, and torch.distributed's.

This is the only file of the engine that calls collectives. Every collective is asynchronous: the
call returns a `Work`, its outputs may be read, and its inputs changed or freed, only after
``wait()``. On CUDA ``wait()`` makes the current stream wait, not the host.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Comm", "Done", "ProcessGroupComm", "ReduceOp", "SoloComm", "Work", "rank_order_sum"]

ReduceOp = Literal["sum", "max", "min"]


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block (on CUDA: make the current stream wait) until the outputs are there."""

    def is_completed(self) -> bool:
        """True if ``wait()`` would not block."""


@runtime_checkable
class Comm(Protocol):
    """A group of ranks and what they can do together.

    Each method is collective: all ranks of the group call it, in the same order, with tensors of
    the same sizes and dtypes. A method takes a list of tensors (or pairs) that travel in one call.
    ``label`` says for people what the call is for; it too must be the same on all ranks.
    """

    rank: int
    size: int

    def duplicate(self) -> "Comm":
        """A communicator over the same ranks whose calls may overlap with this one's.

        May be this one where a further one cannot be had: calls keep one order over both.
        """

    def block(self, size: int) -> "Comm":
        """A communicator over the ``size`` consecutive ranks among which this rank is.

        ``size`` divides this one's. Called by all ranks.
        """

    def all_gather(self, pairs: Sequence[tuple[Tensor, Tensor]], label: str = "") -> Work:
        """For each (full, shard): write the shards of all ranks into ``full`` in rank order.

        ``full`` is contiguous, with ``size`` times the elements of ``shard``, which may be this
        rank's slice of ``full`` itself.
        """

    def reduce_scatter(self, pairs: Sequence[tuple[Tensor, Tensor]], label: str = "") -> Work:
        """For each (shard, full): ``shard`` gets the sum over ranks of its slice of ``full``."""

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp = "sum", label: str = "") -> Work:
        """Replace every tensor by its sum, maximum or minimum over the ranks."""

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> Work:
        """Replace every tensor by that of rank ``source`` (counted in this group)."""

    def reduce_scratch_bytes(self, full: Tensor) -> int:
        """Bytes that a `reduce_scatter` of ``full`` holds beside its tensors meanwhile."""


def rank_order_sum(slices: Sequence[Tensor], out: Tensor) -> None:
    """``out`` = the sum of ``slices``, added in rank order, low precision accumulated in fp32.

    The fixed order makes a reduce reproducible bit by bit, on threads, processes and in a
    reference.
    """
    total = out
    if out.dtype in (torch.bfloat16, torch.float16):
        total = torch.empty_like(out, dtype=torch.float32)
    total.copy_(slices[0])
    for piece in slices[1:]:
        total += piece
    if total is not out:
        out.copy_(total)


class Done:
    """The `Work` of something that was finished when it was issued."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Always true."""
        return True


class SoloComm:
    """A group of one rank: collectives are copies, or nothing."""

    rank = 0
    size = 1

    def duplicate(self) -> "SoloComm":
        """Itself: there is no order to keep."""
        return self

    def block(self, size: int) -> "SoloComm":
        """Itself: the only block there is."""
        return self

    def all_gather(self, pairs: Sequence[tuple[Tensor, Tensor]], label: str = "") -> Work:
        """Copy each shard to its full tensor."""
        for full, shard in pairs:
            full.copy_(shard)
        return Done()

    def reduce_scatter(self, pairs: Sequence[tuple[Tensor, Tensor]], label: str = "") -> Work:
        """Copy each full tensor to its shard."""
        for shard, full in pairs:
            shard.copy_(full)
        return Done()

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp = "sum", label: str = "") -> Work:
        """Nothing to do: the sum over one rank."""
        return Done()

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> Work:
        """Nothing to do: the source is this rank."""
        return Done()

    def reduce_scratch_bytes(self, full: Tensor) -> int:
        """None."""
        return 0


class _Pending:
    """Several works of torch.distributed as one, and what is to be done with their results."""

    def __init__(self, works: Sequence[dist.Work], finish: Callable[[], None] | None = None):
        self._works = works
        self._finish = finish

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = ()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


# torch 2.13 renamed the tensor collectives and warns of the old names; 2.11 knows only those.
_all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class ProcessGroupComm:
    """`Comm` over a process group of torch.distributed (NCCL, Gloo, ...)."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._tag = 0
        # By device, since a group may have Gloo for the host and NCCL for CUDA at the same time.
        self._backends: dict[torch.device, str] = {}

    def _on_gloo(self, tensor: Tensor) -> bool:
        device = tensor.device
        if device not in self._backends:
            self._backends[device] = self.group._get_backend(device).name()
        return self._backends[device] == dist.Backend.GLOO

    def duplicate(self) -> "ProcessGroupComm":
        """A new process group if this one spans the world, else itself.

        A group of some ranks cannot be made by those ranks alone: ``new_group`` with
        ``use_local_synchronization`` names it by how many groups each rank knows, and hangs when
        they know different numbers (torch 2.13). Gathers and reduces then share a communicator,
        which is correct, as all ranks issue them in one order, but overlaps less under NCCL.
        """
        if self.size < dist.get_world_size():
            return self
        ranks = dist.get_process_group_ranks(self.group)
        return ProcessGroupComm(dist.new_group(ranks))

    def all_gather(self, pairs: Sequence[tuple[Tensor, Tensor]], label: str = "") -> Work:
        """See `Comm.all_gather`."""
        if self._on_gloo(pairs[0][0]):
            return self._all_gather_by_exchange(pairs)
        return _Pending(
            [
                _all_gather_tensor(full, shard, group=self.group, async_op=True)
                for full, shard in pairs
            ]
        )

    def reduce_scatter(self, pairs: Sequence[tuple[Tensor, Tensor]], label: str = "") -> Work:
        """See `Comm.reduce_scatter`."""
        if self._on_gloo(pairs[0][0]):
            return self._reduce_scatter_by_exchange(pairs)
        return _Pending(
            [
                _reduce_scatter_tensor(shard, full, group=self.group, async_op=True)
                for shard, full in pairs
            ]
        )

    # [Note: Direct exchange]
    # Gloo's all-gather goes through a flat buffer of its own, twice the memory and a copy, and its
    # reduce-scatter is an all-reduce underneath, which sends twice what is needed and adds in an
    # order of its own. So ranks send each other slices directly: a gather receives every slice in
    # its place; a reduce receives the other ranks' parts of this rank's slice and adds them in rank
    # order, in fp32 for low precision. Both send (N-1)/N of the buffer, the least possible.

    def _all_gather_by_exchange(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Work:
        works: list[dist.Work] = []
        for full, shard in pairs:
            slices = full.chunk(self.size)
            if slices[self.rank].data_ptr() != shard.data_ptr():
                slices[self.rank].copy_(shard)
            works += self._exchange([shard] * self.size, slices)
        return _Pending(works)

    def _reduce_scatter_by_exchange(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Work:
        works: list[dist.Work] = []
        sums: list[tuple[list[Tensor], Tensor]] = []
        for shard, full in pairs:
            slices = full.chunk(self.size)
            parts = [
                slices[rank] if rank == self.rank else torch.empty_like(shard)
                for rank in range(self.size)
            ]
            works += self._exchange(slices, parts)
            sums.append((parts, shard))

        def add_up() -> None:
            for parts, shard in sums:
                rank_order_sum(parts, shard)
            sums.clear()

        return _Pending(works, add_up)

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> list[dist.Work]:
        """Send ``outgoing[r]`` to each other rank r, receive ``incoming[r]`` from it."""
        self._tag += 1  # several exchanges may be under way between two ranks
        works = []
        for step in range(1, self.size):
            target, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            works += [
                dist.irecv(incoming[source], group=self.group, group_src=source, tag=self._tag),
                dist.isend(outgoing[target], group=self.group, group_dst=target, tag=self._tag),
            ]
        return [work for work in works if work is not None]

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp = "sum", label: str = "") -> Work:
        """See `Comm.all_reduce`."""
        return _Pending(
            [
                dist.all_reduce(tensor, op=_REDUCE_OPS[op], group=self.group, async_op=True)
                for tensor in tensors
            ]
        )

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> Work:
        """See `Comm.broadcast`."""
        return _Pending(
            [
                dist.broadcast(tensor, group=self.group, group_src=source, async_op=True)
                for tensor in tensors
            ]
        )

    def reduce_scratch_bytes(self, full: Tensor) -> int:
        """The other ranks' parts of this rank's slice if reduces are exchanges, else none."""
        return full.nbytes * (self.size - 1) // self.size if self._on_gloo(full) else 0
