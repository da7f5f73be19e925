# SPDX-License-Identifier: Apache-2.0
"""The protocol in which the engine communicates, and the two communicators that send nothing.

`SoloComm` is a group of one rank; `WrappedComm` hands every call on to another communicator.

Every collective is asynchronous: the call returns a `Work`. Its outputs may be read, and its inputs
changed or freed, only after ``wait()``. On CUDA ``wait()`` makes the current stream wait, not the
host. `fullshard.torch.comm.process_group` implements it on torch.distributed, and is the only file
of the engine that calls collectives.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

ReduceOp = Literal["sum", "max", "min"]


class Parts(NamedTuple):
    """A flat tensor with a part for each rank, in rank order; ``numels`` tells how large."""

    flat: Tensor
    numels: list[int]


Full = Tensor | Parts
"""The slices of all ranks, in rank order; as `Parts` if they are unequal."""


def flat_of(full: Full) -> Tensor:
    """Return the tensor that has the slices of all ranks."""
    return full.flat if isinstance(full, Parts) else full


def slices_of(full: Full, size: int) -> Sequence[Tensor]:
    """Return the slices of ``size`` ranks: views."""
    if isinstance(full, Parts):
        return torch.split(full.flat, full.numels)
    return full.chunk(size)


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block (on CUDA: make the current stream wait) until the outputs are there."""

    def is_completed(self) -> bool:
        """True if ``wait()`` would not block."""


@runtime_checkable
class Comm(Protocol):
    """A group of ranks and the collectives that they can call.

    Each method is collective: all ranks of the group call it, in the same order, with tensors of
    the same sizes and dtypes. A method takes a list of tensors (or pairs) that travel in one call.
    ``label`` tells people what the call is for; it must be the same on all ranks, too.
    """

    rank: int
    size: int

    def duplicate(self) -> "Comm":
        """Return a communicator over the same ranks whose calls may overlap with this one's.

        It may be this one if no other can be made: calls then keep one order over both.
        """

    def block(self, size: int) -> "Comm":
        """Return a communicator over the ``size`` consecutive ranks that include this one.

        ``size`` divides this one's. Called by all ranks.
        """

    def all_gather(self, pairs: Sequence[tuple[Full, Tensor]], label: str = "") -> Work:
        """For each (full, shard): write the shards of all ranks into ``full`` in rank order.

        ``full`` has ``size`` times the elements of ``shard``, which may be this rank's slice of
        ``full`` itself. It is contiguous, or on the host a matrix with a contiguous row a rank.
        As `Parts` it has slices of unequal sizes, some of which may be empty.
        """

    def reduce_scatter(self, pairs: Sequence[tuple[Tensor, Full]], label: str = "") -> Work:
        """For each (shard, full): ``shard`` gets the sum over ranks of its slice of ``full``."""

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp = "sum", label: str = "") -> Work:
        """Replace every tensor by its sum, maximum or minimum over the ranks."""

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> Work:
        """Replace every tensor by that of rank ``source`` (counted in this group)."""

    def all_to_all(self, received: Parts, sent: Parts, label: str = "") -> Work:
        """Send the r-th part of ``sent`` to each rank r, receive its part for this rank.

        Sizes may differ; what one rank sends another is what that one expects.
        """

    def reduce_scratch_bytes(self, full: Tensor) -> int:
        """Return the bytes that a `reduce_scatter` of ``full`` holds beside its tensors."""


def rank_order_sum(slices: Sequence[Tensor], out: Tensor) -> None:
    """Write the sum of ``slices``, added in rank order, to ``out``; low precision adds in fp32.

    The fixed order makes a reduce reproducible bit by bit, on threads, processes and in a
    reference.
    """
    total = out
    if out.dtype in (torch.bfloat16, torch.float16):
        total = torch.empty_like(out, dtype=torch.float32)
    first, *others = slices
    if others and first.dtype == total.dtype:
        torch.add(first, others.pop(0), out=total)  # one pass over memory, not two
    else:
        total.copy_(first)
    for piece in others:
        total += piece
    if total is not out:
        out.copy_(total)


class Done:
    """The `Work` of something that was finished when it was issued."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        return True


class Together:
    """Several works as one, then the step that completes them; holds what is ``in_flight``."""

    def __init__(
        self, works: Sequence[Work], finish: Callable[[], None] | None = None, *in_flight: Any
    ):
        self._works = works
        self._finish = finish
        self._in_flight = in_flight

    def wait(self) -> None:
        """Wait for all works, then finish, once."""
        for work in self._works:
            work.wait()
        finish, self._finish, self._works, self._in_flight = self._finish, None, (), ()
        if finish is not None:
            finish()

    def is_completed(self) -> bool:
        """True if no work would block."""
        return all(work.is_completed() for work in self._works)


class SoloComm(Comm):
    """A group of one rank: collectives are copies, or nothing."""

    rank = 0
    size = 1

    def duplicate(self) -> "SoloComm":
        """Return itself: there is no order to keep."""
        return self

    def block(self, size: int) -> "SoloComm":
        """Return itself, the only block."""
        return self

    def all_gather(self, pairs: Sequence[tuple[Full, Tensor]], label: str = "") -> Work:
        """Copy each shard to its full tensor."""
        for full, shard in pairs:
            flat_of(full).copy_(shard)
        return Done()

    def reduce_scatter(self, pairs: Sequence[tuple[Tensor, Full]], label: str = "") -> Work:
        """Copy each full tensor to its shard."""
        for shard, full in pairs:
            shard.copy_(flat_of(full))
        return Done()

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp = "sum", label: str = "") -> Work:
        """Do nothing: the tensors are the sum over one rank."""
        return Done()

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> Work:
        """Do nothing: the source is this rank."""
        return Done()

    def all_to_all(self, received: Parts, sent: Parts, label: str = "") -> Work:
        """Copy the only part, which is this rank's."""
        received.flat.copy_(sent.flat)
        return Done()

    def reduce_scratch_bytes(self, full: Tensor) -> int:
        return 0


class WrappedComm(Comm):
    """A communicator around another one, ``inner``: hands on every call that a subclass leaves."""

    def __init__(self, inner: Comm):
        self.inner = inner
        self.rank: int = inner.rank
        self.size: int = inner.size

    def duplicate(self) -> Comm:
        return self.inner.duplicate()

    def block(self, size: int) -> Comm:
        return self.inner.block(size)

    def all_gather(self, pairs: Sequence[tuple[Full, Tensor]], label: str = "") -> Work:
        return self.inner.all_gather(pairs, label)

    def reduce_scatter(self, pairs: Sequence[tuple[Tensor, Full]], label: str = "") -> Work:
        return self.inner.reduce_scatter(pairs, label)

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp = "sum", label: str = "") -> Work:
        return self.inner.all_reduce(tensors, op, label)

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> Work:
        return self.inner.broadcast(tensors, source)

    def all_to_all(self, received: Parts, sent: Parts, label: str = "") -> Work:
        return self.inner.all_to_all(received, sent, label)

    def reduce_scratch_bytes(self, full: Tensor) -> int:
        return self.inner.reduce_scratch_bytes(full)


def innermost(comm: Comm) -> Comm:
    """Return the communicator that sends, below whatever is wrapped around it."""
    while isinstance(comm, WrappedComm):
        comm = comm.inner
    return comm


def members_of(comm: Comm) -> tuple[int, ...]:
    """Return the ranks of ``comm`` as the world counts them; from 0 where it is not told."""
    return tuple(getattr(innermost(comm), "members", range(comm.size)))
