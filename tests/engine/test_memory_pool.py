# SPDX-License-Identifier: Apache-2.0
"""Buffers in a memory pool of their own: the logic, with stand-ins for CUDA's pools and for NCCL.

Real pools are in tests/gpu/test_memory_pool.py.
"""

import threading
import time
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from support.stack import Stack
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.testing import LocalWorld
from fullshard.torch import fully_shard, use_memory_pool
from fullshard.torch.comm.protocol import SoloComm
from fullshard.torch.sharding import memory_pool
from fullshard.torch.step.managed import managed_unit_of
from fullshard.torch.unit.buffers import FlatBuffer, MemorySource

CPU = torch.device("cpu")


class Pool:
    def __init__(self, allocator=None):
        self.allocator = allocator


@pytest.fixture
def entered(monkeypatch):
    """The pools that allocations went to, one entry for each time."""
    found = []

    inside = threading.Lock()

    @contextmanager
    def use_mem_pool(pool, device=None):
        found.append(pool)
        assert inside.acquire(blocking=False), "two threads are in a pool, which CUDA refuses"
        yield
        inside.release()

    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(MemorySource, "_of", {})
    return found


def buffer():
    return FlatBuffer([(8, torch.float32), (4, torch.bfloat16)], CPU)


def test_without_a_pool_nothing_is_entered(entered):
    full = buffer()
    full.release()
    full.allocate()
    assert entered == []


def test_memory_that_comes_and_goes_comes_from_the_pool(entered):
    MemorySource("pool", everything=False).serve(CPU)
    full = buffer()
    assert entered == []  # it may be one that stays
    full.release()
    full.allocate()
    full.allocate()
    assert entered == ["pool"]


def test_threads_take_turns_in_a_pool(entered, monkeypatch):
    """As ranks that are threads do, and whoever trains two models in threads."""
    MemorySource("pool", everything=False).serve(CPU)
    resize = torch.UntypedStorage.resize_

    def slowly(storage, size):
        time.sleep(1e-4 if size else 0)
        return resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", slowly)

    def body(comm):
        full = buffer()
        for _ in range(20):
            full.release()
            full.allocate()

    LocalWorld(3).run(body)
    assert len(entered) == 60


def test_everything_comes_from_a_registered_pool(entered):
    MemorySource("pool", everything=True).serve(CPU)
    full = buffer()
    full.release()
    full.allocate()
    assert entered == ["pool", "pool"]


def test_views_move_with_the_memory(entered):
    shard = buffer()
    view = shard.flats[0].view(2, 4)
    view.copy_(torch.arange(8.0).view(2, 4))
    shard.flats[1].fill_(3)
    MemorySource("pool", everything=True).serve(CPU)
    shard.take_memory_anew()
    assert entered == ["pool"]
    assert view.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert shard.flats[1].tolist() == [3] * 4
    shard.release()
    shard.take_memory_anew()
    assert not shard.allocated


# ---- the door -----------------------------------------------------------------------------------


def sharded(where=None):
    model = Stack(2, 8)
    for block in model.blocks:
        fully_shard(block, mesh=where)
    return fully_shard(model, mesh=where)


def test_what_it_refuses(entered):
    with pytest.raises(UsageError, match="holds no sharded unit"):
        use_memory_pool(torch.nn.Linear(2, 2))
    model = sharded(SoloComm())
    with pytest.raises(NotSupportedError, match="computes on cpu"):
        use_memory_pool(model)
    loss = model(torch.ones(1, 8)).sum()
    with pytest.raises(UsageError, match="between steps"):
        use_memory_pool(model)
    loss.backward()
    assert MemorySource.of(CPU) is None


@pytest.fixture
def fake_world():
    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


class Backend:
    """What NCCL's process group offers here."""

    mem_allocator = "NCCL's allocator"

    def __init__(self, registered):
        self.register_mem_pool = registered.append

    def name(self):
        return "nccl"


def units_of(model):
    return [managed_unit_of(module).unit for module in [model, *model.blocks]]


def test_registering(entered, fake_world, monkeypatch):
    registered = []
    model = sharded()
    units = units_of(model)
    before = [param.local.clone() for param in model.parameters()]
    monkeypatch.setattr(
        dist.ProcessGroup, "_get_backend", lambda group, device: Backend(registered)
    )
    memory_pool._register(units, CPU)
    pool = MemorySource.of(CPU).pool
    assert pool.allocator == "NCCL's allocator"
    # Units share two communicators: one for gathers, one for reduces.
    assert registered == [pool, pool]
    with_shards = [unit for unit in units if unit.shards.buffer.bytes]
    assert entered == [pool] * len(with_shards)
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.local, value)
    memory_pool._register(units, CPU)  # a model sharded later would come here
    assert MemorySource.of(CPU).pool is pool


def test_what_registering_refuses(entered, fake_world, monkeypatch):
    units = units_of(sharded())
    with pytest.raises(NotSupportedError, match=r"process group with the backend '[^']*fake"):
        memory_pool._register(units, CPU)
    with pytest.raises(NotSupportedError, match="one rank alone"):
        memory_pool._register(units_of(sharded(SoloComm())), CPU)
    assert MemorySource.of(CPU) is None
    MemorySource(Pool(), everything=False).serve(CPU)
    monkeypatch.setattr(dist.ProcessGroup, "_get_backend", lambda group, device: Backend([]))
    with pytest.raises(UsageError, match="without register_with_nccl"):
        memory_pool._register(units, CPU)
    assert entered == []
