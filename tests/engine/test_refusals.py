# SPDX-License-Identifier: Apache-2.0
"""Entries of docs/refused.md that no test of a capability holds."""

import pytest
import torch
import torch.distributed as dist
from support.beside import grid
from support.models import seeded
from support.threads import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard.core.errors import NotSupportedError
from fullshard.torch import (
    DataParallelMeshDims,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from fullshard.torch.checkpoint.tensors import local_part
from fullshard.torch.comm.protocol import SoloComm
from fullshard.torch.tensor.placements import placed
from fullshard.torch.tensor.tensor_parallel import tensor_parallel_of

pytestmark = pytest.mark.usefixtures("checked_values")


@pytest.fixture
def mesh():
    """Of rank 0 among four, the others of which are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    dist.destroy_process_group()


@on_ranks(4)
def test_communication_hooks_do_not_go_with_hybrid_sharding(comm):
    model = FullyShardedDataParallel(
        seeded(lambda: nn.Linear(2, 2)), grid(comm), ShardingStrategy.HYBRID_SHARD
    )
    with pytest.raises(NotSupportedError, match="hybrid"):
        model.register_comm_hook(None, lambda state, full, shard: None)
    model(torch.ones(1, 2)).sum().backward()  # as before


def test_a_mesh_without_a_dim_to_shard_over(mesh):
    layer = nn.Linear(2, 2)
    dims = DataParallelMeshDims(replicate="data")
    with pytest.raises(NotSupportedError, match="NO_SHARD"):
        fully_shard(layer, mesh=mesh, dp_mesh_dims=dims)
    assert type(layer) is nn.Linear


def test_ranks_that_are_no_dim_of_the_tensor_axis_mesh(mesh):
    weight = DTensor.from_local(torch.ones(2, 4), mesh["tensor"], [Shard(0)], run_check=False)
    cut = tensor_parallel_of("weight", nn.Parameter(weight))
    other = DeviceMesh("cpu", [0, 1, 2])
    with pytest.raises(NotSupportedError, match="no dim of the same mesh"):
        placed("weight", (4, 4), other, 3, cut)


@pytest.mark.parametrize("kind", ["dtype", "layout", "sum"])
def test_values_that_checkpoints_cannot_hold(mesh, kind):
    value = torch.ones(2, 2)
    made = {
        "dtype": lambda: value.to(torch.float8_e4m3fnuz),
        "layout": value.to_sparse,
        "sum": lambda: DTensor.from_local(value, mesh["data"], [Partial()], run_check=False),
    }[kind]()
    with pytest.raises(NotSupportedError, match="'x'"):
        local_part("x", made)


def test_full_precision_in_evaluation_is_refused(monkeypatch):
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    FullyShardedDataParallel(nn.Linear(2, 2), SoloComm())
    with pytest.raises(NotSupportedError, match=r"=1 asks for full precision in evaluation"):
        FullyShardedDataParallel(
            nn.Linear(2, 2), SoloComm(), mixed_precision=MixedPrecision(torch.bfloat16)
        )
