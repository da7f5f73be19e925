# SPDX-License-Identifier: Apache-2.0
"""The record of which elements of a parameter each rank holds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from operator import eq
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fullshard.core.layout import Span
from fullshard.torch.comm.protocol import Comm, members_of
from fullshard.torch.tensor.reslice import Cut, reslice, rows_of_ranks
from fullshard.torch.tensor.tensor_parallel import TensorParallel

__all__ = ["Ownership", "next_serial"]

_serials: "WeakKeyDictionary[Comm, count[int]]" = WeakKeyDictionary()


def next_serial(comm: Comm) -> int:
    """The number of a parameter that the ranks of ``comm`` shard now, all together."""
    return next(_serials.setdefault(comm, count()))


@dataclass(frozen=True)
class Ownership:
    """The place of the elements of one parameter: rank r of ``comm`` holds ``spans[r]``.

    ``name`` is the parameter's fully-qualified name, ``shape`` its global shape. The spans tile the
    flattened parameter in rank order; some may be empty. With ``tensor_parallel`` they tile the
    part of it that the ranks of ``comm`` have.
    """

    name: str
    shape: tuple[int, ...]
    spans: Sequence[Span]
    comm: Comm
    device_mesh: DeviceMesh | None = None
    tensor_parallel: TensorParallel | None = None
    serial: int = 0  # in the order in which the ranks of ``comm`` sharded parameters

    @property
    def place(self) -> tuple[Any, ...]:
        """Sorts parameters in an order on which the ranks that hold them agree.

        By name, which is the same on all ranks whatever order people built their models in; those
        of several models that share a name in the order in which they were sharded.
        """
        return self.name, getattr(self.comm, "members", ()), self.serial

    @property
    def span(self) -> Span:
        """The elements that this rank holds."""
        return self.spans[self.comm.rank]

    @property
    def comms(self) -> tuple[Comm, ...]:
        """The communicators over all of which together the elements are spread."""
        cut = self.tensor_parallel
        return (self.comm,) if cut is None else (self.comm, *cut.comms)

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    def agrees_with(self, other: "Ownership") -> bool:
        """Return True if both put every element on the same rank; names do not matter."""
        return self is other or (
            _are_equal(self.spans, other.spans)
            and self.comm is other.comm
            and self.shape == other.shape
            and self.tensor_parallel == other.tensor_parallel
        )

    def cut(self, full: Tensor) -> Tensor:
        """Return this rank's span of a tensor of the global shape, flattened.

        Collective if that is a DTensor, unless it is cut along the same tensor axis.
        """
        cut = self.tensor_parallel
        if isinstance(full, DTensor):
            if cut is not None and full.device_mesh == cut.mesh:
                return self.cut_part(cut.part_of_dtensor(full))
            if cut is None and self._has_rows(full):
                rows = full.to_local().detach().reshape(-1)
                held = rows_of_ranks(self.shape, self.comm.size)
                label = f"span of parameter {self.name!r} from rows"
                return reslice(self.comm, [Cut(rows, held, self.spans)], label)[0]
            full = full.full_tensor()
        return self.cut_part(full if cut is None else cut.part_of(full))

    def _has_rows(self, value: DTensor) -> bool:
        """Return True if ``value`` is cut over the ranks of ``comm`` as `rows_of_ranks` says."""
        dims = [dim for dim, each in enumerate(value.placements) if not each.is_replicate()]
        if self.comm.size == 1 or len(dims) != 1 or value.placements[dims[0]] != Shard(0):
            return False
        ranks = dist.get_process_group_ranks(value.device_mesh.get_group(dims[0]))
        return tuple(ranks) == members_of(self.comm)

    def cut_part(self, part: Tensor) -> Tensor:
        """Return this rank's span of the part that the ranks of ``comm`` share, flattened."""
        return part.reshape(-1)[self.span.start : self.span.stop]

    def whole(self, flat: Tensor) -> Tensor:
        """Return the tensor of global shape, given the flat part that the ranks of ``comm`` share.

        Collective over the tensor axis, if there is one.
        """
        if self.tensor_parallel is None:
            return flat.view(self.shape)
        return self.tensor_parallel.whole(flat.view(self.tensor_parallel.local_shape))

    def reshaped(self, shape: Sequence[int]) -> "Ownership":
        """Return the ownership of the same elements, in the same order, in another shape."""
        return replace(self, shape=tuple(shape))

    def __str__(self) -> str:
        span = self.span
        return (
            f"parameter {self.name!r} of shape {tuple(self.shape)}, of which rank {self.comm.rank} "
            f"of {self.comm.size} holds the flat elements [{span.start}, {span.stop})"
        )


def _are_equal(spans: Sequence[Span], others: Sequence[Span]) -> bool:
    if type(spans) is type(others):
        return spans == others
    return len(spans) == len(others) and all(map(eq, spans, others))
