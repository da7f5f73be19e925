# SPDX-License-Identifier: Apache-2.0
"""The communicator of debug mode: ranks compare every collective before they issue it."""

import os
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fullshard.core.errors import CommunicationError
from fullshard.torch.comm.agreement import by_rank, differing_texts
from fullshard.torch.comm.protocol import Comm, Full, Parts, ReduceOp, Work, WrappedComm


def checked_in_debug_mode(comm: Comm) -> Comm:
    """Wrap ``comm`` in a `CheckedComm` if ``FULLSHARD_DEBUG=1``, as all ranks must set it."""
    debug = os.environ.get("FULLSHARD_DEBUG", "") not in ("", "0")
    return CheckedComm(comm) if debug and comm.size > 1 else comm


class CheckedComm(WrappedComm):
    """A communicator that compares collectives across ranks before it issues them.

    Each costs a further small all-reduce that the host waits for. If ranks are about to call
    different operations, or the same for another unit or with other sizes or dtypes, all of them
    raise `CommunicationError`, which tells who wanted what, and nothing is sent.
    """

    def __init__(self, comm: Comm, checks: Comm | None = None):
        super().__init__(comm)
        # Duplicates compare over one channel: ranks that differ in which they use find out too.
        self._checks = checks or comm

    def duplicate(self) -> "CheckedComm":
        self._check("duplicate", "", ())
        return CheckedComm(self.inner.duplicate(), self._checks)

    def block(self, size: int) -> "CheckedComm":
        self._check(f"block({size})", "", ())
        return CheckedComm(self.inner.block(size))

    def all_gather(self, pairs: Sequence[tuple[Full, Tensor]], label: str = "") -> Work:
        self._check("all_gather", label, _alike_on_all(pairs))
        return super().all_gather(pairs, label)

    def reduce_scatter(self, pairs: Sequence[tuple[Tensor, Full]], label: str = "") -> Work:
        self._check("reduce_scatter", label, _alike_on_all(pairs))
        return super().reduce_scatter(pairs, label)

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp = "sum", label: str = "") -> Work:
        self._check(f"all_reduce {op}", label, tensors)
        return super().all_reduce(tensors, op, label)

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> Work:
        self._check(f"broadcast from {source}", "", tensors)
        return super().broadcast(tensors, source)

    def all_to_all(self, received: Parts, sent: Parts, label: str = "") -> Work:
        self._check(f"all_to_all of {sent.flat.dtype}", label, ())
        return super().all_to_all(received, sent, label)

    def _check(self, operation: str, label: str, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        device = tensors[0].device if tensors else torch.device("cpu")
        sizes = ", ".join(f"{tensor.numel()} {tensor.dtype}" for tensor in tensors)
        wanted = f"{operation} ({label}) of {sizes}" if tensors else operation
        texts = differing_texts(self._checks, wanted, device)
        if texts is not None:
            raise CommunicationError(
                "the ranks want different collectives, so none was issued: "
                f"{by_rank(self.inner, texts)}. Make all ranks use the same units in the same order"
            )


def _alike_on_all(pairs: Iterable[tuple[Full, Full]]) -> list[Tensor]:
    """List the tensors whose sizes are those of the other ranks: not slices that are unequal."""
    tensors: list[Tensor] = []
    for pair in pairs:
        unequal = [each.flat for each in pair if isinstance(each, Parts)]
        tensors += unequal or [each for each in pair if isinstance(each, Tensor)]
    return tensors
