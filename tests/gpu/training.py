# SPDX-License-Identifier: Apache-2.0
"""A small GPT trained on a device: sharded by any options, and plain; a world of one rank."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from support.models import GPT, loss_of, make_batches, seeded
from torch import nn

from fullshard.torch import fully_shard

STEPS = 4
TOLERANCE = 1e-9  # of fp64, after steps of AdamW


def cases(*of_a_gpu, also_on_cpu=()):
    """Parameters of tests with ``device`` first: all cases on a GPU, a few on a CPU as well.

    A case is a value, or a tuple of several.
    """
    chosen = [("cuda", each) for each in of_a_gpu] + [("cpu", each) for each in also_on_cpu]
    return [(where, *each) if isinstance(each, tuple) else (where, each) for where, each in chosen]


def build(device, dtype=torch.float64, kind=GPT, **options):
    return seeded(lambda: kind(**{"width": 12, "blocks": 3} | options)).to(device, dtype)


def shard(model, where, **options):
    for block in model.blocks:
        fully_shard(block, mesh=where, **options)
    return fully_shard(model, mesh=where, **options)


def backward_once(model, number, backward):
    backward(1.0)


def train(model, rank, size, device, each_step=backward_once):
    """AdamW on this rank's part of each batch, with clipping; losses stay on the device."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    batches = [(x.to(device), y.to(device)) for x, y in make_batches("gpt", STEPS, 2 * size)]
    for number, (inputs, targets) in enumerate(batches):
        part = slice(2 * rank, 2 * rank + 2)

        def backward(scale, inputs=inputs[part], targets=targets[part]):
            loss = loss_of(model(inputs), targets)
            (loss * scale).backward()
            losses.append(loss.detach())

        each_step(model, number, backward)
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def full_parameters(model):
    return {name: p.full_tensor().detach().cpu() for name, p in model.named_parameters()}


def plain(size, device, dtype=torch.float64, model=None, before=lambda model, number, rank: None):
    """The parameters after the same steps without shards, on the batches of all ranks.

    ``before(model, number, rank)`` is called before the part of each rank in each step.
    """
    model = build(device, dtype) if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number, (inputs, targets) in enumerate(make_batches("gpt", STEPS, 2 * size)):
        for rank in range(size):
            part = slice(2 * rank, 2 * rank + 2)
            before(model, number, rank)
            output = model(inputs[part].to(device))
            (loss_of(output, targets[part].to(device)) / size).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach().cpu() for name, param in model.named_parameters()}


def assert_same(found, expected, atol=TOLERANCE):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=atol, msg=lambda m, n=name: n + m
        )


@contextmanager
def world_of_one(device, folder, backend="nccl"):
    """Within, the default process group has one rank; ``backend`` is that on a GPU, else Gloo."""
    if dist.is_initialized():
        pytest.skip("another test has left a process group behind")
    cuda = device.type == "cuda"
    dist.init_process_group(
        backend if cuda else "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=0,
        world_size=1,
        **({"device_id": device} if cuda else {}),
    )
    yield dist.group.WORLD
    dist.destroy_process_group()
