# SPDX-License-Identifier: Apache-2.0
"""Conversion of sharded values to true DTensors, for code that knows no other kind.

A `ShardedParameter` holds an interval of the flattened tensor, a DTensor placed as ``Shard(0)``
whole rows. To convert, ranks exchange the elements that lie elsewhere: at most their own share.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fullshard.core.errors import NotSupportedError
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.tensor.ownership import Ownership
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.tensor.reslice import Cut, longest, reslice, rows_of_ranks

__all__ = ["as_dtensors", "without_sharded_tensor"]

BATCH_BYTES = 64 * 2**20  # of spans that are exchanged in one call


@torch.no_grad()
def as_dtensors(values: Sequence[ShardedParameter]) -> list[Tensor]:
    """Return the same values as DTensors with elements of their own. Collective.

    Placed as ``Shard(0)`` over the ranks that share slices and replicated over others; along a
    tensor axis as they were before. Values on the meta device need no communication. A value that
    is there twice (tied) becomes one DTensor. Ranks without process groups (threads) have no
    meshes: values stay what they are.
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
        if value.ownership.device_mesh is not None:
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
    shapes = [_held_shape(each.ownership) for each in batch]
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


def _held_shape(ownership: Ownership) -> tuple[int, ...]:
    """Return the shape of what the ranks that share slices hold together."""
    cut = ownership.tensor_parallel
    return ownership.shape if cut is None else cut.local_shape


def _dtensor(local: Tensor, ownership: Ownership) -> DTensor:
    mesh, placements = _placed(ownership)
    shape = torch.Size(ownership.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _placed(ownership: Ownership) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    mesh, cut = ownership.device_mesh, ownership.tensor_parallel
    assert mesh is not None
    shared: Placement = Shard(0) if ownership.shape else Replicate()
    if cut is not None:
        on_rows = [
            mesh_size
            for mesh_size, placement in zip(cut.mesh.shape, cut.placements, strict=True)
            if placement == Shard(0)
        ]
        if on_rows:  # the rows that a rank of the tensor axis has are cut once more
            shared = _StridedShard(0, split_factor=torch.Size(on_rows).numel())
    if ownership.comm.size == 1 and mesh.size() > 1:
        placements: tuple[Placement, ...] = (Replicate(),) * mesh.ndim
    else:
        placements = (*(Replicate() for _ in range(mesh.ndim - 1)), shared)
    if cut is None:
        return mesh, placements
    return _joined(mesh, cut.mesh, ownership), (*placements, *cut.placements)


def _joined(data: DeviceMesh, tensor: DeviceMesh, ownership: Ownership) -> DeviceMesh:
    """Return one mesh with the dims of both; ``data`` may have been named by its group alone."""
    try:
        root = tensor._get_root_mesh()
        if data._get_root_mesh() != root:
            ranks = dist.get_process_group_ranks(data.get_group())
            data = next(
                root[name]
                for name in root.mesh_dim_names or ()
                if dist.get_process_group_ranks(root.get_group(name)) == ranks
            )
        joined: DeviceMesh = DeviceMesh._concatenate([data, tensor])
    except (AttributeError, RuntimeError, StopIteration) as error:
        raise NotSupportedError(
            f"{ownership.name!r} is cut along a tensor axis, {tensor}, and sharded over ranks that "
            "are no dim of the same mesh; make both dims of one, or take a full state dict"
        ) from error
    return joined


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
