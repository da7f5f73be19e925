# SPDX-License-Identifier: Apache-2.0
"""State in 8 and 4 bits over owned matrices: which elements share a scale depends on no ranks."""

import copy

import pytest
import torch
from support.owned_matrices import kind_of
from torch import nn

import fullshard.torch as fs
from fullshard.core.errors import NotSupportedError
from fullshard.testing import LocalWorld

TORCHAO = [f"torchao.optim.{name}" for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")]
BITSANDBYTES = [f"bitsandbytes.optim.{name}" for name in ("AdamW8bit", "Lion8bit")]


@pytest.fixture(autouse=True)
def _eager():
    with torch.compiler.set_stance("force_eager"):  # compiling takes longer than the steps
        yield


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 160), nn.Tanh(), nn.Linear(160, 96), nn.Linear(96, 80))


TEMPLATE = net()


def step(model, optimizer, number, factor=1.0):
    generator = torch.Generator().manual_seed(number)
    (model(torch.randn(8, 96, generator=generator)).square().mean() * factor).backward()
    optimizer.step()
    optimizer.zero_grad()


def inner(value):
    """Flat tensors of a value: its bits and its scales."""
    value = getattr(value, "local", value)
    if hasattr(value, "__tensor_flatten__"):
        return [getattr(value, name).flatten() for name in value.__tensor_flatten__()[0]]
    return [value.flatten()]


def states(model, optimizer):
    named = [(n, p) for n, p in model.named_parameters() if p.dim() == 2]
    return {
        (name, key): [each.clone() for each in inner(value)]
        for name, param in named
        for key, value in optimizer.state.get(param, {}).items()
        if isinstance(value, torch.Tensor)
    }


def matrices(model):
    return [param for param in model.parameters() if param.dim() == 2]


def sharded(comm):
    model = copy.deepcopy(TEMPLATE)
    for layer in (model[0], model[2], model[3]):
        fs.fully_shard(layer, mesh=comm, align="matrix")
        layer.set_gradient_divide_factor(1.0)
    return fs.fully_shard(model, mesh=comm)


@pytest.mark.parametrize("path", TORCHAO + BITSANDBYTES)
def test_states_of_all_worlds_are_equal_bit_by_bit(path):
    kind = kind_of(path)
    model = copy.deepcopy(TEMPLATE)
    optimizer = kind(matrices(model), lr=1e-2)
    for number in range(5):
        step(model, optimizer, number)
    expected = states(model, optimizer)
    assert any(len(value) > 1 or value[0].dtype == torch.uint8 for value in expected.values())

    def body(comm):
        ours = sharded(comm)
        optimizer = kind(matrices(ours), lr=1e-2)
        for number in range(5):  # the others' gradients are zeros
            step(ours, optimizer, number, float(comm.rank == 0))
        owned = {n for n, p in ours.named_parameters() if p.dim() == 2 and p.local.numel()}
        values = {n: p.full_tensor() for n, p in ours.named_parameters() if p.dim() == 2}
        return values, {k: v for k, v in states(ours, optimizer).items() if k[0] in owned}

    for world in (1, 2, 3, 4, 5, 8):
        seen = {}
        for values, of_rank in LocalWorld(world).run(body):
            seen.update(of_rank)
            for name, value in values.items():
                assert torch.equal(value, model.get_parameter(name)), (world, name)
        assert seen.keys() == expected.keys()
        for key, value in expected.items():
            assert all(map(torch.equal, seen[key], value)), (world, key)


def test_state_of_torchao_is_refused_in_state_dicts_over_owned_matrices():
    kind = kind_of(TORCHAO[0])

    def body(comm):
        model = sharded(comm)
        optimizer = kind(matrices(model), lr=1e-2)
        step(model, optimizer, 0)
        with pytest.raises(NotSupportedError, match="OptimState8bit"):
            optimizer.state_dict()

    LocalWorld(2).run(body)
