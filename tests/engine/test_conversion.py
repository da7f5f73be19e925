# SPDX-License-Identifier: Apache-2.0
"""Models are converted after sharding: they train on as one process does, in the other dtype."""

import pytest
import torch
from support.beside import shard
from support.models import seeded
from support.threads import on_ranks
from support.world import on_processes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.core.errors import UsageError
from fullshard.testing import LocalWorld
from fullshard.torch import CPUOffloadPolicy, fully_shard


def net():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def by_function(comm, **options):
    return shard(seeded(net), comm, units=[nn.Linear], **options)


DOORS = {
    "rows": by_function,
    "elements": lambda comm: by_function(comm, align="element"),
    "whole matrices": lambda comm: by_function(comm, align="matrix"),
    "kept full": lambda comm: by_function(comm, reshard_after_forward=False),
    "offload": lambda comm: by_function(comm, offload_policy=CPUOffloadPolicy()),
    "wrapper": lambda comm: shard(seeded(net), comm, "wrapper", [nn.Linear]),
}


def train(model, optimizer, dtype, steps=2):
    losses = []
    for _ in range(steps):
        x = torch.linspace(-1, 1, 24).view(4, 6).to(dtype)
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def convert_and_train(model):
    """Train in three dtypes with one optimizer, the second time with gradients from before."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, before = train(model, optimizer, torch.float32), list(model.parameters())
    model.double()
    losses += train(model, optimizer, torch.float64)
    model(torch.ones(4, 6).double()).sum().backward()
    model.to(torch.float32)
    assert {param.grad.dtype for param in model.parameters()} == {torch.float32}
    losses += train(model, optimizer, torch.float32)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    model.bfloat16()
    floating = [value for value in model.state_dict().values() if value.is_floating_point()]
    assert {value.dtype for value in floating} == {torch.bfloat16}  # buffers, too
    return losses


@pytest.mark.parametrize("door", DOORS)
def test_a_sharded_model_is_converted_as_a_plain_one(door):
    expected = convert_and_train(seeded(net))
    for losses in LocalWorld(2).run(lambda comm: convert_and_train(DOORS[door](comm))):
        assert losses == pytest.approx(expected, rel=1e-6)


@on_processes(2)
def test_dtensors_are_converted_too(group):
    model, losses = by_function(DeviceMesh.from_group(group, "cpu")), []
    for each in (seeded(net), model):
        each.double()
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        losses.append(train(each, optimizer, torch.float64))
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    for param in model.parameters():
        assert isinstance(param, DTensor)
        dtypes = param.dtype, param.to_local().dtype, param._spec.tensor_meta.dtype
        assert set(dtypes) == {torch.float64}


@on_ranks(2)
def test_units_below_a_plain_module_are_converted_with_it(comm):
    model = nn.Sequential(fully_shard(nn.Linear(4, 4), mesh=comm), nn.Linear(4, 4))
    model.to(torch.float64)
    assert model(torch.ones(2, 4).double()).dtype == torch.float64


@on_ranks(2)
def test_nothing_is_converted_while_gradients_wait(comm):
    model = by_function(comm)
    model.set_requires_gradient_sync(False)
    model(torch.ones(4, 6)).sum().backward()
    with pytest.raises(UsageError, match=r"cannot be converted now.*Do it between steps"):
        model.double()
    assert {param.dtype for param in model.parameters()} == {torch.float32}
