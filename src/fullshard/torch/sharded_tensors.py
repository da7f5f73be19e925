# SPDX-License-Identifier: Apache-2.0
"""ShardedTensors, the older kind that parts of `torch.distributed.checkpoint` still load into."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fullshard.core.errors import NotSupportedError
from fullshard.torch.recut import rows_of_ranks

__all__ = ["without_sharded_tensor"]


def without_sharded_tensor(value: Tensor, device: torch.device) -> Tensor:
    """A ShardedTensor as a DTensor that shares its memory; another value as it is.

    ``device``: where a rank that has no rows is to have none.

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
