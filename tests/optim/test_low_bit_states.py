# SPDX-License-Identifier: Apache-2.0
"""State in 8 and 4 bits over owned matrices: which elements share a scale depends on no ranks."""

import copy

import pytest
import torch
from support.owned_matrices import kind_of
from support.tensor_classes import Rows8
from support.threads import on_ranks
from torch import nn

import fullshard.torch as fs
from fullshard.core.errors import CheckpointError, NotSupportedError
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
        parts = [getattr(value, name).flatten() for name in value.__tensor_flatten__()[0]]
        return [part.view(torch.uint8) if part.itemsize == 1 else part for part in parts]
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


def sharded(comm, align="matrix"):
    model = copy.deepcopy(TEMPLATE)
    for layer in (model[0], model[2], model[3]):
        fs.fully_shard(layer, mesh=comm, align=align)
        layer.set_gradient_divide_factor(1.0)
    return fs.fully_shard(model, mesh=comm)


ALIGNED = pytest.mark.parametrize("align", ["matrix", "row", "element"])


def made(comm, kind, align):
    """A sharded model, and an optimizer that steps its matrices whole."""
    model = sharded(comm, align)
    optimizer = kind(matrices(model), lr=1e-2)
    if align != "matrix":
        fs.exchange_matrices(optimizer)
    return model, optimizer


@ALIGNED
@pytest.mark.parametrize("path", [None, *TORCHAO, *BITSANDBYTES])
def test_states_of_all_worlds_are_equal_bit_by_bit(path, align):
    kind = kind_of(path) if path else Momentum8
    model = copy.deepcopy(TEMPLATE)
    optimizer = kind(matrices(model), lr=1e-2)
    for number in range(5):
        step(model, optimizer, number)
    expected = states(model, optimizer)
    assert any(len(value) > 1 or value[0].dtype == torch.uint8 for value in expected.values())

    def body(comm):
        ours, optimizer = made(comm, kind, align)
        for number in range(5):  # the others' gradients are zeros
            step(ours, optimizer, number, float(comm.rank == 0))
        values = {n: p.full_tensor() for n, p in ours.named_parameters() if p.dim() == 2}
        return values, states(ours, optimizer)

    for world in (1, 2, 3, 4, 5, 8):
        seen = {}
        for values, of_rank in LocalWorld(world).run(body):
            seen.update(of_rank)
            for name, value in values.items():
                assert torch.equal(value, model.get_parameter(name)), (world, name)
        assert seen.keys() == expected.keys()
        for key, value in expected.items():
            assert all(map(torch.equal, seen[key], value)), (world, key)


class Momentum8(torch.optim.Optimizer):
    """SGD with momentum in 8 bits."""

    def __init__(self, params, lr, kept=Rows8):
        super().__init__(params, {"lr": lr})
        self.kept = kept

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if state:
                    buffer = state["buffer"].value() * 0.9 + param.grad
                else:
                    buffer = param.grad
                state["buffer"] = self.kept.rounded(buffer)
                param.sub_(group["lr"] * state["buffer"].value())


class Unlisted(Rows8):
    """A class that is not on the list of safe ones."""


@pytest.fixture
def _listed():
    with torch.serialization.safe_globals([Rows8]):
        yield


def numbered(optimizer):
    """All inner tensors by parameter and kind."""
    return {
        (number, key): [each.clone() for each in inner(value)]
        for number, param in enumerate(optimizer.param_groups[0]["params"])
        for key, value in optimizer.state[param].items()
        if isinstance(value, torch.Tensor)
    }


def copied(saved):
    """A state dict with memory of its own: torchao's tensors cannot be cloned."""

    def copy_of(value):
        if not hasattr(value, "__tensor_flatten__"):
            return copy.deepcopy(value)
        names, context = value.__tensor_flatten__()
        parts = {name: getattr(value, name).clone() for name in names}
        return type(value).__tensor_unflatten__(parts, context, value.shape, value.stride())

    state = {n: {k: copy_of(v) for k, v in of.items()} for n, of in saved["state"].items()}
    return {**copy.deepcopy({k: v for k, v in saved.items() if k != "state"}), "state": state}


def go_on(model, optimizer, first=True):
    for number in (7, 8):
        step(model, optimizer, number, float(first))


KINDS = pytest.mark.parametrize("path", [None, *TORCHAO])


def one_process(path):
    """A model and its optimizer behind three steps, and the weights and state behind two more."""
    kind = kind_of(path) if path else Momentum8
    model = copy.deepcopy(TEMPLATE)
    optimizer = kind(matrices(model), lr=1e-2)
    for number in range(3):
        step(model, optimizer, number)
    later = copy.deepcopy(model)
    optimizer_later = kind(matrices(later), lr=1e-2)
    optimizer_later.load_state_dict(copied(optimizer.state_dict()))
    go_on(later, optimizer_later)
    return kind, model, optimizer, later


@KINDS
@ALIGNED
@pytest.mark.usefixtures("_listed")
def test_checkpoints_load_on_other_numbers_of_ranks_and_in_one_process(path, align, tmp_path):
    kind, _, optimizer, later = one_process(path)
    expected = numbered(optimizer)

    def save(comm):
        ours, optimizer = made(comm, kind, align)
        for number in range(3):
            step(ours, optimizer, number, float(comm.rank == 0))
        fs.save_checkpoint(tmp_path, ours, optimizer, step=3)

    def load(comm):
        ours, optimizer = made(comm, kind, align)
        fs.load_checkpoint(tmp_path, ours, optimizer)
        loaded = numbered(optimizer)
        go_on(ours, optimizer, comm.rank == 0)
        return loaded, {name: param.full_tensor() for name, param in ours.named_parameters()}

    LocalWorld(3).run(save)
    for world in (1, 2, 5):
        for loaded, values in LocalWorld(world).run(load):
            for key, parts in expected.items():
                assert all(map(torch.equal, loaded[key], parts)), (world, key)
            for name, value in later.named_parameters():
                if value.dim() == 2:
                    assert torch.equal(values[name], value), (world, name)
    plain = copy.deepcopy(TEMPLATE)
    optimizer = kind(matrices(plain), lr=1e-2)
    fs.load_checkpoint(tmp_path, plain, optimizer)
    loaded = numbered(optimizer)
    assert all(all(map(torch.equal, loaded[key], parts)) for key, parts in expected.items())


@pytest.mark.usefixtures("_listed")
def test_a_checkpoint_of_such_state_is_refused_where_matrices_are_cut(tmp_path):
    _, model, optimizer, _ = one_process(None)
    fs.save_checkpoint(tmp_path, model, optimizer, step=3)

    def load(comm):
        model = fs.fully_shard(copy.deepcopy(TEMPLATE), mesh=comm)
        optimizer = Momentum8(matrices(model), lr=1e-2)
        before = model[0].weight.full_tensor()
        with pytest.raises(CheckpointError, match=r"never cut, and '0.weight' is cut here"):
            fs.load_checkpoint(tmp_path, model, optimizer)
        assert torch.equal(model[0].weight.full_tensor(), before)
        assert not optimizer.state

    LocalWorld(2).run(load)


@pytest.mark.usefixtures("_listed")
@on_ranks(2)
def test_state_of_a_class_that_is_not_listed_is_refused_on_all_ranks(comm):
    model = sharded(comm)
    optimizer = Momentum8(matrices(model), lr=1e-2, kept=Unlisted)
    step(model, optimizer, 0)
    with pytest.raises(NotSupportedError, match=r"is a Unlisted.*add_safe_globals"):
        optimizer.state_dict()
