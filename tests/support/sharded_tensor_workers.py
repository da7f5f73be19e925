# SPDX-License-Identifier: Apache-2.0
"""ShardedTensors on the ranks of a `support.world.World`."""

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

from fullshard.core.errors import NotSupportedError
from fullshard.torch.state.dtensors import without_sharded_tensor

CPU = torch.device("cpu")


def as_dtensor(group, shape):
    """The elements that come out on this rank, and those that went in."""
    full = torch.arange(float(torch.Size(shape).numel())).view(shape)
    rows = -(-shape[0] // dist.get_world_size(group))
    made = _sharded(group, full, dim=0, chunk=rows)
    return without_sharded_tensor(made, CPU).full_tensor().tolist(), full.tolist()


def cut_otherwise(group):
    made = _sharded(group, torch.zeros(4, 6), dim=1, chunk=3)
    try:
        without_sharded_tensor(made, CPU)
    except NotSupportedError as error:
        return str(error)
    return "not refused"


def _sharded(group, full, dim, chunk):
    rank = dist.get_rank(group)
    shards = []
    if rank * chunk < full.shape[dim]:
        piece = full.narrow(dim, rank * chunk, min(chunk, full.shape[dim] - rank * chunk))
        offsets = [0] * full.dim()
        offsets[dim] = rank * chunk
        shards.append(Shard.from_tensor_and_offsets(piece.contiguous(), offsets, rank))
    return init_from_local_shards(shards, *full.shape, process_group=group)
