# SPDX-License-Identifier: Apache-2.0
"""Low precision: equal to the same arithmetic without shards, and a scaler that ranks agree on."""

import pytest
import torch
from gpu.stream_world import StreamWorld
from support.models import seeded
from support.stack import LAYERS, WIDTH, Stack
from torch import nn

from fullshard.torch import CPUOffloadPolicy, MixedPrecisionPolicy, ShardedGradScaler, fully_shard
from fullshard.torch.comm.protocol import SoloComm

STEPS = 3


def sharded(where, device, **options):
    model = seeded(lambda: Stack(LAYERS, WIDTH)).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=where, **options)
    return fully_shard(model, mesh=where, **options)


def data(number, device):
    x = torch.linspace(-1, 1, 2 * WIDTH, device=device).view(2, WIDTH) + number / 10
    return x, torch.cos(x)


def reference(device, compute, reduce):
    """fp32 parameters, computed with in ``compute``; gradients go through ``reduce``."""
    model = seeded(lambda: Stack(LAYERS, WIDTH)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(STEPS):
        x, target = data(number, device)
        low = {n: p.detach().to(compute).requires_grad_() for n, p in model.named_parameters()}
        output = torch.func.functional_call(model, low, (x.to(compute),))
        nn.functional.mse_loss(output.float(), target).backward()
        for name, param in model.named_parameters():
            param.grad = low[name].grad.to(reduce).float()
        optimizer.step()
    return {name: param.detach().cpu() for name, param in model.named_parameters()}


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    ("compute", "reduce"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [1, 2])
def test_equal_to_the_same_arithmetic(size, compute, reduce, offload, device):
    """All ranks see the same batch, so that the mean of their gradients is each one's."""
    expected = reference(device, compute, reduce)
    options = {"mp_policy": MixedPrecisionPolicy(compute, reduce, output_dtype=torch.float32)}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy()

    def body(comm):
        model = sharded(comm if size > 1 else SoloComm(), device, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for number in range(STEPS):
            x, target = data(number, device)
            nn.functional.mse_loss(model(x), target).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: p.full_tensor().detach().cpu() for name, p in model.named_parameters()}

    for found in StreamWorld(size, device).run(body):
        for name, value in expected.items():
            # On a GPU a product may be rounded otherwise where its operands lie otherwise.
            atol = 2e-4 if device.type == "cuda" else 0
            torch.testing.assert_close(found[name], value, rtol=0, atol=atol)


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, ShardedGradScaler])
@pytest.mark.parametrize("offload", [False, True])
def test_one_ranks_overflow_stops_all(scaler_class, offload, device):
    options = {"mp_policy": MixedPrecisionPolicy(torch.float16, output_dtype=torch.float32)}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy()

    def body(comm):
        model = sharded(comm, device, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        extra = {"process_group": comm} if scaler_class is ShardedGradScaler else {}
        scaler = scaler_class(device.type, init_scale=1024.0, **extra)
        scales, moved = [], []
        for number in range(STEPS):
            before = [p.local.clone() for p in model.parameters()]
            x, target = data(number, device)
            if number == 1 and comm.rank == 1:
                x = x * float("inf")
            scaler.scale(nn.functional.mse_loss(model(x), target)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after = [p.local for p in model.parameters()]
            moved.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
            scales.append(scaler.get_scale())
        return scales, moved

    for scales, moved in StreamWorld(2, device).run(body):
        assert scales == [1024.0, 512.0, 512.0]
        assert moved == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, device):
    """Autocast's copies of weights do not outlive the weights they were made of."""

    def losses_of(model, optimizer):
        losses = []
        for number in range(STEPS):
            x, target = data(number, device)
            with torch.autocast(device.type, dtype=dtype):
                loss = nn.functional.mse_loss(model(x).float(), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    plain = seeded(lambda: Stack(LAYERS, WIDTH)).to(device)
    expected = losses_of(plain, torch.optim.SGD(plain.parameters(), lr=0.1))

    def body(comm):
        model = sharded(comm, device)
        return losses_of(model, torch.optim.SGD(model.parameters(), lr=0.1))

    for losses in StreamWorld(2, device).run(body):
        assert losses == pytest.approx(expected, rel=1e-2 if device.type == "cuda" else 1e-5)
