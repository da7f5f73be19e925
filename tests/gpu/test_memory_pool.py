# SPDX-License-Identifier: Apache-2.0
"""Buffers of units in a pool of their own: whose memory it is, and what is registered."""

import pytest
import torch
from gpu.stream_world import LateCopies, StreamWorld, poison_buffers
from gpu.training import assert_same, build, full_parameters, plain, shard, train
from support.stack import Stack
from torch import nn

from fullshard.core.errors import NotSupportedError
from fullshard.torch import MixedPrecisionPolicy, fully_shard, use_memory_pool
from fullshard.torch.comm.protocol import SoloComm
from fullshard.torch.step.managed import managed_unit_of
from fullshard.torch.unit.buffers import FlatBuffer, MemorySource

WIDTH, LAYERS = 2048, 4  # a unit is 16 MiB in bf16, which has segments of its own
BF16 = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)


@pytest.fixture
def no_pool(monkeypatch):
    """Pools of this test are forgotten after it."""
    monkeypatch.setattr(MemorySource, "_of", {})


def pool_of(gpu):
    return MemorySource.of(gpu).pool


def in_pool(gpu, tensor):
    """True if the tensor's memory lies in a segment of the pool."""
    address = tensor.untyped_storage().data_ptr()
    return any(
        segment["address"] <= address < segment["address"] + segment["total_size"]
        for segment in pool_of(gpu).snapshot()
    )


def test_resize_takes_memory_from_the_pool(gpu, no_pool):
    """The premise: a storage that was made elsewhere gets its new memory from the pool."""
    buffer = FlatBuffer([(2**20, torch.float32)], gpu)
    MemorySource(torch.cuda.MemPool(), everything=False).serve(gpu)
    assert not in_pool(gpu, buffer.flats[0])
    buffer.release()
    buffer.allocate()
    assert in_pool(gpu, buffer.flats[0])
    stranger = torch.empty(2**20, device=gpu)
    assert not in_pool(gpu, stranger)
    buffer.release()
    held = pool_of(gpu).snapshot()
    assert sum(segment["active_size"] for segment in held) == 0
    assert sum(segment["total_size"] for segment in held) > 0  # it keeps it for the next one


def sharded(gpu):
    """Bf16 full parameters, so that one rank gathers and frees like many."""
    model = Stack(LAYERS, WIDTH).to(gpu)
    for block in model.blocks:
        fully_shard(block, mesh=SoloComm(), mp_policy=BF16)
    return fully_shard(model, mesh=SoloComm(), mp_policy=BF16)


def step(model, gpu, number):
    """Activations of another size in each step, as of batches of texts."""
    x = torch.ones(64 + 37 * number % 200, WIDTH, dtype=torch.bfloat16, device=gpu)
    model(x).square().mean().backward()
    model.zero_grad()


def test_units_are_in_the_pool_and_little_else(gpu, no_pool):
    model = sharded(gpu)
    step(model, gpu, 0)
    use_memory_pool(model)
    for number in range(4):
        step(model, gpu, number)
    unit = managed_unit_of(model.blocks[0]).unit
    unit_bytes = unit.layout.full_bytes
    total = sum(segment["total_size"] for segment in pool_of(gpu).snapshot())
    # Two units; the allocator rounds segments up to 2 MiB. (With one rank full gradients stay.)
    assert 2 * unit_bytes <= total <= 2 * (unit_bytes + 2 * 2**20)
    seen = []
    handle = model.blocks[1][0].register_forward_hook(
        lambda layer, *_: seen.append(in_pool(gpu, layer.weight))
    )
    step(model, gpu, 0)
    handle.remove()
    assert seen == [True]
    assert not in_pool(gpu, unit.shards.buffer.flats[0])


@pytest.mark.parametrize("size", [2, 3])
def test_late_and_poisoned_steps_equal_one_process(size, gpu, no_pool, monkeypatch):
    """A pool keeps blocks apart by stream too."""
    poison_buffers(monkeypatch)
    LateCopies(monkeypatch, gpu)
    expected = plain(size, gpu)

    def body(comm):
        model = shard(build(gpu), comm)
        use_memory_pool(model)
        train(model, comm.rank, comm.size, gpu)
        return full_parameters(model)

    for found in StreamWorld(size, gpu).run(body):
        assert_same(found, expected)


def test_registered_with_nccl(nccl, gpu, no_pool):
    """One rank's collectives are copies, but memory is NCCL's and is registered."""

    def losses(pool):
        model = shard(
            build(gpu, torch.float32), nccl, mp_policy=MixedPrecisionPolicy(torch.bfloat16)
        )
        if pool:
            use_memory_pool(model, register_with_nccl=True)
            assert all(in_pool(gpu, param.local) for param in model.parameters())
            use_memory_pool(model, register_with_nccl=True)  # what is registered may be again
        return train(model, 0, 1, gpu)

    expected = losses(pool=False)
    try:
        found = losses(pool=True)
    except NotSupportedError as error:
        pytest.skip(str(error))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)


def test_a_layer_without_units_is_refused(gpu, no_pool):
    with pytest.raises(Exception, match="holds no sharded unit"):
        use_memory_pool(nn.Linear(2, 2).to(gpu))
    assert MemorySource.of(gpu) is None


def test_a_root_without_parameters_has_the_pool_of_its_blocks(gpu, no_pool):
    model = Stack(LAYERS, WIDTH).to(gpu)
    for block in model.blocks:
        fully_shard(block, mesh=SoloComm(), mp_policy=BF16)
    fully_shard(model, mesh=SoloComm(), mp_policy=BF16)
    assert managed_unit_of(model).unit.device == gpu
    use_memory_pool(model)
    model(torch.ones(2, WIDTH, dtype=torch.bfloat16, device=gpu))
    assert pool_of(gpu).snapshot()
