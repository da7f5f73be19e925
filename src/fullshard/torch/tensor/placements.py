# SPDX-License-Identifier: Apache-2.0
"""The placement that `torch.distributed.tensor` has for a parameter whose rows ranks share."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fullshard.core.errors import NotSupportedError
from fullshard.torch.tensor.tensor_parallel import TensorParallel


class Placed(NamedTuple):
    """A mesh, and a placement for each of its dims."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]


def placed(
    name: str,
    shape: Sequence[int],
    data: DeviceMesh,
    slices: int,
    cut: TensorParallel | None = None,
    dim: int = 0,
) -> Placed:
    """Place a parameter of global ``shape`` that is cut along ``dim`` into ``slices``.

    The last dim of ``data`` joins the ranks that share slices, those before it ranks with equal
    ones; along a tensor axis (``cut``) it stays as it was. A tensor without dims is replicated.
    Raises `NotSupportedError` if both are no dims of one mesh.
    """
    shared: Placement = Shard(dim) if shape else Replicate()
    if cut is not None:
        on_rows = [
            size
            for size, placement in zip(cut.mesh.shape, cut.placements, strict=True)
            if placement == Shard(dim)
        ]
        if on_rows:  # the rows that a rank of the tensor axis has are cut once more
            shared = _StridedShard(dim, split_factor=torch.Size(on_rows).numel())
    if slices == 1 and data.size(data.ndim - 1) > 1:
        placements: tuple[Placement, ...] = (Replicate(),) * data.ndim
    else:
        placements = (*(Replicate() for _ in range(data.ndim - 1)), shared)
    if cut is None:
        return Placed(data, placements)
    return Placed(_joined(name, data, cut.mesh), (*placements, *cut.placements))


def _joined(name: str, data: DeviceMesh, tensor: DeviceMesh) -> DeviceMesh:
    """Return one mesh with the dims of both.

    ``data`` may have been named by its group alone, and ``tensor`` be a dim of an equal mesh that
    was there before: what torch has worked out for one of them it takes for the other.
    """
    try:
        root, root_of_data = tensor._get_root_mesh(), data._get_root_mesh()
        if root_of_data != root and data.ndim == 1:
            data = _dim_of(root, data)
        elif root_of_data != root:
            tensor = _dim_of(root_of_data, tensor)
        joined: DeviceMesh = DeviceMesh._concatenate([data, tensor])
    except (AttributeError, RuntimeError, StopIteration) as error:
        raise NotSupportedError(
            f"{name!r} is cut along a tensor axis, {tensor}, and sharded over ranks that "
            "are no dim of the same mesh; make both dims of one, or take a full state dict"
        ) from error
    return joined


def _dim_of(root: DeviceMesh, mesh: DeviceMesh) -> DeviceMesh:
    """Return the dim of ``root`` that joins the ranks of ``mesh``."""
    ranks = dist.get_process_group_ranks(mesh.get_group())
    return next(
        root[each]
        for each in root.mesh_dim_names or ()
        if dist.get_process_group_ranks(root.get_group(each)) == ranks
    )
