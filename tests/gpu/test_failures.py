# SPDX-License-Identifier: Apache-2.0
"""Memory that runs out, and errors in the middle of a step: the next step is as if nothing was."""

import gc

import pytest
import torch
from gpu.stream_world import StreamWorld
from support.models import seeded
from support.stack import Stack
from torch import nn

from fullshard.testing import LocalWorld
from fullshard.torch import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, set_prefetch
from fullshard.torch.comm.protocol import SoloComm
from fullshard.torch.step.managed import managed_units
from fullshard.torch.unit.buffers import FlatBuffer

WIDTH, LAYERS = 64, 4
BF16 = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)


class Greedy(nn.Module):
    """Passes on what it gets, and takes memory that no device has where it is told to."""

    def __init__(self):
        super().__init__()
        self.where = None

    def forward(self, x):
        return _Greedy.apply(x, self)


class _Greedy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, owner):
        ctx.owner = owner
        if owner.where == "forward":
            torch.empty(2**50, device=x.device)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.owner.where == "backward":
            torch.empty(2**50, device=grad.device)
        return grad.clone(), None


def sharded(where, device, width=WIDTH, **options):
    model = seeded(lambda: Stack(LAYERS, width))
    for number, block in enumerate(model.blocks):
        model.blocks[number] = nn.Sequential(block[0], Greedy(), block[2])
    model.to(device)
    for block in model.blocks:
        fully_shard(block, mesh=where, **options)
    return fully_shard(model, mesh=where, **options)


def batch(model, number, width=WIDTH, samples=4):
    device = next(managed_units(model)).unit.device
    return torch.linspace(-1, 1, samples * width, device=device).view(samples, width) + number / 10


def train(model, optimizer, numbers, width=WIDTH):
    losses = []
    for number in numbers:
        loss = model(batch(model, number, width)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_out_of_memory_in_a_layer(size, offload, where, device):
    """Both ranks run out of it, as they do with batches of one size."""
    options = {"offload_policy": CPUOffloadPolicy()} if offload else {}

    def body(comm):
        comm = comm if size > 1 else SoloComm()
        models = [sharded(comm, device, mp_policy=BF16, **options) for _ in range(2)]
        adams = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
        expected = train(models[0], adams[0], range(5))
        found = [train(models[1], adams[1], range(2))]
        models[1].blocks[2][1].where = where
        with pytest.raises(RuntimeError, match=r"out of memory|can't allocate|INTERNAL ASSERT"):
            train(models[1], adams[1], [2])
        models[1].blocks[2][1].where = None
        adams[1].zero_grad()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        found.append(train(models[1], adams[1], range(2, 5)))
        assert all(managed.unit.transient_bytes == 0 for managed in managed_units(models[1]))
        return torch.cat(found), expected

    for found, expected in StreamWorld(size, device).run(body):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("offload", [False, True])
def test_a_buffer_that_gets_no_memory(offload, ahead, device, monkeypatch):
    """Each allocation of the engine fails, in steps of its own."""
    options = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    model = sharded(SoloComm(), device, mp_policy=BF16, **options)
    reference = sharded(SoloComm(), device, mp_policy=BF16, **options)
    set_prefetch(model, ahead, ahead)
    adam, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    assert torch.equal(train(model, adam, range(3)), train(reference, other, range(3)))
    allocate, left = FlatBuffer.allocate, [0]

    def failing(buffer):
        if not buffer.allocated:
            left[0] -= 1
            if left[0] == 0:
                raise torch.OutOfMemoryError("CUDA out of memory")
        allocate(buffer)

    monkeypatch.setattr(FlatBuffer, "allocate", failing)
    failed = 0
    for nth in range(1, 100):
        failures = 0
        while failures < 2:  # the second step to fail is in no order that is known
            left[0] = nth
            try:
                found = train(model, adam, [nth])
                break
            except torch.OutOfMemoryError:
                failures += 1
                adam.zero_grad()
        else:
            left[0] = -1
            found = train(model, adam, [nth])
        left[0] = -1
        assert torch.equal(found, train(reference, other, [nth])), nth
        failed += failures > 0
        if not failures:
            break
    assert LAYERS < failed < 99


def test_a_device_that_is_too_small_at_any_moment(gpu):
    """The limit of the process is raised in small steps until a training step fits."""
    width = 2048
    model = sharded(SoloComm(), gpu, width, mp_policy=BF16)
    reference = sharded(SoloComm(), gpu, width, mp_policy=BF16)
    adam, other = (torch.optim.SGD(m.parameters(), lr=1e-3) for m in (model, reference))
    train(model, adam, range(3), width)
    expected = train(reference, other, range(5), width)[3:]
    total = torch.cuda.get_device_properties(gpu).total_memory
    failed, step = 0, 3 * 2**20
    try:
        for nth in range(200):
            gc.collect()
            torch.cuda.empty_cache()
            room = torch.cuda.memory_reserved(gpu) + nth * step
            torch.cuda.set_per_process_memory_fraction(room / total, gpu)
            try:
                found = train(model, adam, [3], width)
                break
            except torch.OutOfMemoryError:
                failed += 1
                adam.zero_grad()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, gpu)
    assert failed > 5
    found = torch.cat([found, train(model, adam, [4], width)])
    assert torch.equal(found, expected)
    assert all(managed.unit.transient_bytes == 0 for managed in managed_units(model))


def test_forwards_whose_backward_never_comes(device):
    """Who leaves a step by an error may begin another at once, also while its loss is alive."""

    def body(comm):
        models = [sharded(comm, device) for _ in range(2)]
        adams = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
        expected = train(models[0], adams[0], range(4))
        found = [train(models[1], adams[1], range(2))]
        left = [models[1](batch(models[1], 7)).sum() for _ in range(2)]
        found.append(train(models[1], adams[1], [2]))
        left.clear()
        found.append(train(models[1], adams[1], [3]))
        return torch.cat(found), expected

    for found, expected in LocalWorld(2).run(body):
        assert torch.equal(found, expected)
