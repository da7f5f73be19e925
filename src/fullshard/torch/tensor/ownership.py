# SPDX-License-Identifier: Apache-2.0
"""The record of which elements of a parameter each rank holds."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from operator import eq
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fullshard.core.layout import Span
from fullshard.torch.comm.protocol import Comm, Parts, ReduceOp, members_of
from fullshard.torch.tensor.placements import Placed
from fullshard.torch.tensor.reslice import Cut, overlaps, reslice, rows_of_ranks
from fullshard.torch.tensor.tensor_parallel import TensorParallel

PADDING_BYTES = 2**24
"""That equal parts may take where few ranks hold nearly all: one gather is worth as much."""

_serials: "WeakKeyDictionary[Comm, count[int]]" = WeakKeyDictionary()


def next_serial(comm: Comm) -> int:
    """The number of a parameter that the ranks of ``comm`` shard now, all together."""
    return next(_serials.setdefault(comm, count()))


@dataclass(frozen=True)
class Ownership:
    """The place of the elements of one parameter: rank r of ``comm`` holds ``spans[r]``.

    ``name`` is the parameter's fully-qualified name, ``shape`` its global shape. The spans tile the
    flattened parameter in rank order; some may be empty. With ``tensor_parallel`` they tile the
    part of it that the ranks of ``comm`` have. Elements are counted with dimension ``dim`` in
    front. If the spans are whole rows, ``placed`` says what DTensor calls that; ``rows_on`` is the
    mesh of a parameter placed so, of which these are some rows. ``whole_on`` is the rank that is
    meant to hold all elements, not one that does by chance. In the shard and in a reduced gradient
    ``room`` elements are this rank's span and zeros behind it.
    """

    name: str
    shape: tuple[int, ...]
    spans: Sequence[Span]
    comm: Comm
    device_mesh: DeviceMesh | None = None
    tensor_parallel: TensorParallel | None = None
    serial: int = 0  # in the order in which the ranks of ``comm`` sharded parameters
    unit: int = -1  # the serial of its unit's first parameter
    dim: int = 0
    placed: Placed | None = None
    rows_on: DeviceMesh | None = None
    whole_on: int | None = None
    room: int = 0
    _specs: dict[torch.dtype, DTensorSpec] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

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
    def owner(self) -> int | None:
        """The rank of ``comm`` that holds all elements in every layout like this one, or None.

        Those of whole matrices, if the parameter is a stack of which ranks of another axis have
        others; None if these have parts of its matrices. A parameter cut by element that falls into
        one rank's slice has no owner: in a longer run of ranks it would be cut.
        """
        cut = self.tensor_parallel
        if self.placed is not None or self.dim or not (cut is None or cut.is_of_stacks):
            return None
        return 0 if self.comm.size == 1 and self.numel else self.whole_on

    @property
    def comms(self) -> tuple[Comm, ...]:
        """The communicators over all of which together the elements are spread."""
        cut = self.tensor_parallel
        return (self.comm,) if cut is None else (self.comm, *cut.comms)

    def combine(self, tensors: Sequence[Tensor], op: ReduceOp = "sum") -> None:
        """Replace ``tensors`` by their sums, maxima or minima over `comms`. Collective."""
        for comm in self.comms:
            comm.all_reduce(tensors, op).wait()

    @property
    def is_interval(self) -> bool:
        """True if spans are intervals of the whole parameter's elements in their own order."""
        return self.tensor_parallel is None and not self.dim

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
            and self.dim == other.dim
            and self.tensor_parallel == other.tensor_parallel
        )

    def cut(self, full: Tensor) -> Tensor:
        """Return this rank's flat span of a whole; collective for a DTensor placed otherwise."""
        cut = self.tensor_parallel
        if isinstance(full, DTensor):
            if self.placed is not None and full.device_mesh == self.placed.mesh:
                if full.placements != self.placed.placements:
                    full = full.redistribute(*self.placed)
                return self.flat(full.to_local().detach())
            if cut is not None and full.device_mesh == cut.mesh:
                return self.cut_part(cut.part_of_dtensor(full))
            if cut is None and not self.dim and self._has_rows(full):
                rows = full.to_local().detach().reshape(-1)
                held = rows_of_ranks(self.shape, self.comm.size)
                if _are_equal(held, self.spans):
                    return rows
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

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of what the ranks of ``comm`` share."""
        return self.shape if self.tensor_parallel is None else self.tensor_parallel.local_shape

    def cut_part(self, part: Tensor) -> Tensor:
        """Return this rank's span of the part that the ranks of ``comm`` share, flattened."""
        if self.dim:  # only these rows are copied
            row = max(1, part.numel() // max(1, part.shape[self.dim]))
            part = part.narrow(self.dim, self.span.start // row, self.span.numel // row)
            return self.flat(part)
        return part.reshape(-1)[self.span.start : self.span.stop]

    def flat(self, rows: Tensor) -> Tensor:
        """Return whole rows of the parameter as the flat elements that they are."""
        return rows.movedim(self.dim, 0).reshape(-1) if self.dim else rows.reshape(-1)

    def rows(self, local: Tensor) -> Tensor:
        """Return the flat elements of a span of whole rows in the shape of these rows: a view."""
        shape = self.part_shape
        row = shape[: self.dim] + shape[self.dim + 1 :]
        count = local.numel() // max(1, math.prod(row))
        if not local.numel():  # rows without elements are rows nevertheless
            held, size, rank = shape[self.dim], self.comm.size, self.comm.rank
            chunk = -(-held // size)
            count = min(max(held - rank * chunk, 0), chunk)
        return local.view(count, *row).movedim(0, self.dim)

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """Return what DTensor calls the cut of a tensor of ``dtype``; needs ``placed``."""
        known = self._specs.get(dtype)
        if known is None:
            assert self.placed is not None
            shape = torch.Size(self.shape)
            stride = torch.empty(shape, device="meta").stride()
            known = DTensorSpec(*self.placed, tensor_meta=TensorMeta(shape, stride, dtype))
            self._specs[dtype] = known
        return known

    def gathered(self, local: Tensor) -> Tensor:
        """Return the whole tensor of which this rank has ``local``, flat. Collective."""
        (whole,) = gathered_together([(self, local)], f"full tensor of parameter {self.name!r}")
        return whole

    def whole(self, flat: Tensor) -> Tensor:
        """Return the whole tensor of a flat part; collective over the tensor axis, if any."""
        shape = self.part_shape
        if self.dim:
            row = shape[: self.dim] + shape[self.dim + 1 :]
            part = flat.view(shape[self.dim], *row).movedim(0, self.dim).contiguous()
        else:
            part = flat.view(shape)
        return part if self.tensor_parallel is None else self.tensor_parallel.whole(part)

    def reshaped(self, shape: Sequence[int]) -> "Ownership":
        """Return where the same elements are in another shape, perhaps as parts of its rows."""
        held = rows_of_ranks(shape, self.comm.size)
        still = self.placed is not None and bool(shape) and _are_equal(held, self.spans)
        return replace(self, shape=tuple(shape), placed=self.placed if still else None)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ownership":
        """Return the same: a copy of a parameter is in the same place."""
        return self

    def __str__(self) -> str:
        span = self.span
        return (
            f"parameter {self.name!r} of shape {tuple(self.shape)}, of which rank {self.comm.rank} "
            f"of {self.comm.size} holds the flat elements [{span.start}, {span.stop})"
        )


def gathered_together(parts: Sequence[tuple[Ownership, Tensor]], label: str) -> Iterator[Tensor]:
    """Yield the whole tensors of which this rank has the flat ``parts``. Collective: one gather.

    All are spread over the ranks of one communicator, and of one dtype.
    """
    comm, numel = parts[0][0].comm, sum(owner.spans[-1].stop for owner, _ in parts)
    held = [0] * comm.size  # elements of each rank
    pieces: list[list[tuple[int, slice]]] = []  # of each tensor: ranks, and where they have them
    for owner, _ in parts:
        pieces.append([])
        for rank, start, stop in overlaps(owner.spans, Span(0, owner.spans[-1].stop)):
            pieces[-1].append((rank, slice(held[rank], held[rank] + stop - start)))
            held[rank] += stop - start
    most = max(held)
    mine = torch.cat([local for _, local in parts])
    # Where a few ranks hold it all, equal parts would be mostly padding.
    if comm.size * most <= max(2 * numel, PADDING_BYTES // mine.element_size()):
        mine = torch.cat((mine, mine.new_zeros(most - mine.numel())))
        gathered = mine.new_empty(comm.size * most)
        comm.all_gather([(gathered, mine)], label=label).wait()
        rows = gathered.chunk(comm.size)
    else:
        gathered = mine.new_empty(numel)
        comm.all_gather([(Parts(gathered, held), mine)], label=label).wait()
        rows = torch.split(gathered, held)
    for (owner, _), places in zip(parts, pieces, strict=True):
        yield owner.whole(torch.cat([rows[rank][place] for rank, place in places] or [mine[:0]]))


def _are_equal(spans: Sequence[Span], others: Sequence[Span]) -> bool:
    if type(spans) is type(others):
        return spans == others
    return len(spans) == len(others) and all(map(eq, spans, others))
