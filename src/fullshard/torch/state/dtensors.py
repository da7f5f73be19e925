# SPDX-License-Identifier: Apache-2.0
"""Conversion of sharded values to true DTensors, for code that knows no other kind.

A `ShardedParameter` holds an interval of the flattened tensor, a DTensor placed as ``Shard(0)``
whole rows. To convert, ranks exchange the elements that lie elsewhere: at most their own share. A
`ShardedDTensor` is one already.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fullshard.core.errors import NotSupportedError
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.tensor.ownership import Ownership
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.tensor.placements import placed
from fullshard.torch.tensor.reslice import Cut, longest, reslice, rows_of_ranks

BATCH_BYTES = 64 * 2**20  # of spans that are exchanged in one call


@torch.no_grad()
def as_dtensors(values: Sequence[ShardedParameter]) -> list[Tensor]:
    """Return the same values as DTensors. Collective, but for `ShardedDTensor`s, which stay.

    Others get elements of their own, placed as ``Shard(0)`` over the ranks that share slices and
    replicated over others; along a tensor axis as they were before. Values on the meta device need
    no communication. A value that is there twice (tied) becomes one DTensor. Ranks without process
    groups (threads) have no meshes: values stay what they are.
    """
    distinct = {id(value.local): value for value in values}
    rows: dict[int, Tensor] = {}
    for batch in _batches(distinct.values()):
        for value, local in zip(batch, _rows(batch), strict=True):
            rows[id(value.local)] = _dtensor(local, value.ownership)
    return [rows.get(id(value.local), value) for value in values]


def _batches(values: Iterable[ShardedParameter]) -> Iterator[list[ShardedParameter]]:
    """Yield values to exchange in one call: alike, of bounded bytes, the same on all ranks."""
    groups: dict[tuple[Comm, torch.dtype, torch.device], list[ShardedParameter]] = {}
    for value in values:
        if value.ownership.device_mesh is not None and not isinstance(value, DTensor):
            kind = (value.ownership.comm, value.dtype, value.device)
            groups.setdefault(kind, []).append(value)
    for group in groups.values():
        batch: list[ShardedParameter] = []
        batch_bytes = 0
        for value in group:
            value_bytes = longest(value.ownership.spans) * value.element_size()
            if batch and batch_bytes + value_bytes > BATCH_BYTES:
                yield batch
                batch, batch_bytes = [], 0
            batch.append(value)
            batch_bytes += value_bytes
        yield batch


def _rows(batch: Sequence[ShardedParameter]) -> list[Tensor]:
    """Return this rank's rows of each value, in their shape."""
    comm = batch[0].ownership.comm
    shapes = [each.ownership.part_shape for each in batch]
    cuts = [
        Cut(each.local, each.ownership.spans, rows_of_ranks(shape, comm.size))
        for each, shape in zip(batch, shapes, strict=True)
    ]
    if batch[0].is_meta:
        flat = [each.local.new_empty(each.wanted[comm.rank].numel) for each in cuts]
    elif comm.size == 1:
        flat = [each.local.clone() for each in cuts]
    else:
        names = batch[0].ownership.name, batch[-1].ownership.name
        flat = reslice(comm, cuts, f"rows of parameters {names[0]!r} to {names[1]!r}")
    return [rows.view(_rows_shape(shape, comm)) for rows, shape in zip(flat, shapes, strict=True)]


def _rows_shape(shape: tuple[int, ...], comm: Comm) -> tuple[int, ...]:
    """Return the shape of this rank's rows of a tensor of ``shape``."""
    if not shape:
        return shape
    chunk = -(-shape[0] // comm.size)
    return (min(max(shape[0] - comm.rank * chunk, 0), chunk), *shape[1:])


def _dtensor(local: Tensor, ownership: Ownership) -> DTensor:
    assert ownership.device_mesh is not None
    mesh, placements = placed(
        ownership.name,
        ownership.shape,
        ownership.device_mesh,
        ownership.comm.size,
        ownership.tensor_parallel,
    )
    shape = torch.Size(ownership.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def without_sharded_tensor(value: Tensor, device: torch.device) -> Tensor:
    """Turn a ShardedTensor into a DTensor that shares its memory; return other values as is.

    ``device`` is that of the empty tensor of a rank without rows.

    Raises `NotSupportedError` if its ranks do not hold whole rows as `torch.chunk` cuts them.
    """
    if not isinstance(value, ShardedTensor):
        return value
    group = value._process_group
    known = value.metadata()  # asked itself, it warns
    shape = known.size
    span = rows_of_ranks(shape, dist.get_world_size(group))[dist.get_rank(group)]
    rows = [shard.tensor for shard in value.local_shards()]
    wanted = (span.numel // max(shape[1:].numel(), 1), *shape[1:])
    if not rows:
        rows = [torch.empty(0, *shape[1:], dtype=known.tensor_properties.dtype, device=device)]
    if len(rows) != 1 or rows[0].shape != wanted:
        raise NotSupportedError(
            f"a ShardedTensor of shape {tuple(shape)} of which this rank has "
            f"{[tuple(each.shape) for each in rows]}: only whole rows, cut as torch.chunk does, "
            "can be taken; load into DTensors instead"
        )
    mesh = DeviceMesh.from_group(group, device.type)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        rows[0], mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
    )
