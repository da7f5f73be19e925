# SPDX-License-Identifier: Apache-2.0
"""Gradients kept as autograd makes them: sent from there, or copied when their reduce begins."""

import pytest
import torch
from support.beside import grads_of
from support.models import loss_of, make, make_batches
from support.threads import on_ranks
from support.training import shard
from torch import nn

from fullshard.core import layout
from fullshard.core.layout import PACKED_BYTES
from fullshard.testing import LocalComm, LocalWorld
from fullshard.torch import MixedPrecisionPolicy, fully_shard
from fullshard.torch.step.managed import managed_unit_of
from fullshard.torch.unit import full_gradients
from fullshard.torch.unit.full_gradients import FullGradients


@pytest.fixture
def nothing_packed(monkeypatch):
    """Small parameters travel as large ones do, each by itself."""
    monkeypatch.setattr(layout, "PACKED_BYTES", 0)


def gradients(comm, name, micro_batches=2):
    """Return gradients of a micro-batch that is not reduced and another one after it."""
    model = shard(make(name), name, comm, door="function")
    for number, (inputs, targets) in enumerate(make_batches(name, micro_batches, 2)):
        model.set_requires_gradient_sync(number == micro_batches - 1)
        loss_of(model(inputs), targets).backward()
    return grads_of(model)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["gpt", "twice", "odd", "nested"])
def test_gradients_are_the_same_however_they_travel(name, world, monkeypatch):
    packed = LocalWorld(world).run(lambda comm: gradients(comm, name))[0]
    monkeypatch.setattr(layout, "PACKED_BYTES", 0)
    apart = LocalWorld(world).run(lambda comm: gradients(comm, name))[0]
    plain, batches = make(name), make_batches(name, 2, 2)
    for inputs, targets in batches:
        loss_of(plain(inputs), targets).backward()
    torch.testing.assert_close(packed, apart, rtol=0, atol=0)
    torch.testing.assert_close(apart, grads_of(plain))


def test_what_fits_is_sent_from_where_autograd_made_it(nothing_packed, monkeypatch):
    made, sent = {}, {}
    put, reduce_scatter = FullGradients.put, LocalComm.reduce_scatter

    def noted_put(self, index, grad):
        made.setdefault(self._comm_rank, set()).add(grad.data_ptr())
        put(self, index, grad)

    def noted_reduce(comm, pairs, label=""):
        sent.setdefault(comm.rank, []).extend((full.numel(), full.data_ptr()) for _, full in pairs)
        return reduce_scatter(comm, pairs, label)

    monkeypatch.setattr(FullGradients, "put", noted_put)
    monkeypatch.setattr(LocalComm, "reduce_scatter", noted_reduce)

    def body(comm, dtypes):
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 3, bias=False))
        fully_shard(model, mesh=comm, mp_policy=MixedPrecisionPolicy(*dtypes))
        managed_unit_of(model).unit.gradients.full._comm_rank = comm.rank
        model(torch.ones(1, 4)).sum().backward()

    def as_made(*dtypes):
        made.clear()
        sent.clear()
        LocalWorld(2).run(lambda comm: body(comm, dtypes))
        return [[(n, at in made[rank]) for n, at in sent[rank]] for rank in (0, 1)]

    # 3 rows over 2 ranks are padded to 4.
    assert as_made(None, None) == [[(32, True), (32, False)]] * 2
    low, high = torch.bfloat16, torch.float32
    assert as_made(low, low) == [[(32, True), (32, False)]] * 2
    assert as_made(low, high) == [[(32, False), (32, False)]] * 2
    assert as_made(None, torch.float16) == [[(32, False), (32, False)]] * 2


class Sharing(nn.Module):
    """Autograd gives both parameters' gradients the same memory."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.zeros(4, 2))
        self.other = nn.Parameter(torch.zeros(8, 1))

    def forward(self, x):
        return ((self.one.view(-1) + self.other.view(-1)) * x).sum()


@pytest.mark.parametrize("hooked", [False, True])
@on_ranks(2)
def test_gradients_that_share_memory(comm, nothing_packed, hooked):
    """Neither is changed when the other is added to, or written to by a hook."""
    model = fully_shard(Sharing(), mesh=comm)
    found = []
    full = managed_unit_of(model).unit.gradients.full
    put = full.put
    full.put = lambda index, grad: (found.append(grad.data_ptr()), put(index, grad))
    if hooked:

        def hook(full, shard):
            full.mul_(2)
            shard.copy_(full.chunk(comm.size)[comm.rank])

        managed_unit_of(model).unit.settings.hook = hook
    model.set_requires_gradient_sync(False)
    model(torch.ones(8)).backward()
    model.set_requires_gradient_sync(True)
    model(torch.full((8,), 2.0)).backward()
    assert found[0] == found[1]  # the premise
    grads = [param.grad.to_local() for param in model.parameters()]
    for grad in grads:
        assert torch.equal(grad, torch.full_like(grad, 6.0 if hooked else 3.0))


def test_what_travels_is_conjugated_before(nothing_packed, monkeypatch):
    class Conjugated(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 3, dtype=torch.complex64))

        def forward(self, x):
            return (self.weight.conj() * x).sum().real

    sent, reduce_scatter = [], LocalComm.reduce_scatter

    def noted(comm, pairs, label=""):
        sent.extend(full for _, full in pairs)
        return reduce_scatter(comm, pairs, label)

    monkeypatch.setattr(LocalComm, "reduce_scatter", noted)

    def body(comm):
        model = fully_shard(Conjugated(), mesh=comm)
        model(torch.full((4, 3), 1 + 2j)).backward()
        assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 3), 1 + 2j))

    LocalWorld(2).run(body)
    assert len(sent) == 2
    assert not any(full.is_conj() for full in sent)


class Choosing(nn.Module):
    """Uses its first layer, or its second, or both."""

    def __init__(self, rows):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, rows, bias=False) for _ in range(2))

    def forward(self, x, chosen):
        return sum(self.layers[number](x).sum() for number in chosen)


@pytest.mark.parametrize(
    ("rows", "align"), [(4, "row"), (3, "row"), (4, "element"), (3, "element")]
)
def test_what_a_rank_has_not_used_counts_as_zero_and_not_as_what_lay_there(
    rows, align, monkeypatch
):
    """The buffer in which gradients travel has those of the step before, or of anybody."""
    opened = FullGradients._open

    def dirty(self):
        buffer = opened(self)
        for flat in buffer.flats:
            flat.fill_(float("nan"))
        for padding in self._padding:
            padding.zero_()
        return buffer

    monkeypatch.setattr(FullGradients, "_open", dirty)

    def train(comm):
        torch.manual_seed(0)
        model, grads = fully_shard(Choosing(rows), mesh=comm, align=align), []
        for chosen in ((0, 1), (comm.rank,), (0,)):
            model(torch.ones(2, 4), chosen).backward()
            grads.append(
                [None if p.grad is None else p.grad.full_tensor() for p in model.parameters()]
            )
            model.zero_grad()
        return grads

    both, one_each, first_alone = LocalWorld(2).run(train)[0]
    for grad, half in zip(both, one_each, strict=True):
        torch.testing.assert_close(grad, torch.full((rows, 4), 2.0))
        torch.testing.assert_close(half, torch.full((rows, 4), 1.0))
    torch.testing.assert_close(first_alone[0], torch.full((rows, 4), 2.0))
    assert first_alone[1] is None


def test_elements_that_do_not_lie_as_they_travel():
    plain = torch.arange(6.0).view(2, 3)
    is_plain = full_gradients._is_plain
    assert is_plain(plain, torch.float32)
    assert not is_plain(plain, torch.bfloat16)
    assert not is_plain(plain.t(), torch.float32)
    lazy = torch.ones(2, dtype=torch.complex64).conj()
    assert not is_plain(lazy, torch.complex64)
    assert is_plain(lazy.resolve_conj(), torch.complex64)
    assert not is_plain(lazy.imag, torch.float32)


@pytest.mark.parametrize("kind", ["sharded", "whole"])
def test_bytes_held_before_and_after_a_reduce_begins(kind, monkeypatch):
    """With one slice gradients are copied as they come, on a device small ones together."""
    world = 2 if kind == "sharded" else 1
    width = 96
    assert width * width * 4 > PACKED_BYTES
    matrix, vector = width * width * 2, width * 2  # in bf16

    def body(comm):
        model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        fully_shard(model, mesh=comm, mp_policy=policy)
        full = managed_unit_of(model).unit.gradients.full
        full._most_bytes = 3 * vector
        put, held = full.put, []

        def noted(index, grad):
            put(index, grad)
            held.append(full.bytes)

        full.put = noted
        model(torch.ones(1, width)).sum().backward()
        return held, managed_unit_of(model).unit.layout.grad_full_bytes

    for held, buffer in LocalWorld(world).run(body):
        if kind == "whole":
            # The first waits for others; with the matrix all are too large to wait.
            assert held == [vector, buffer, buffer + vector, buffer]
            continue
        assert held == [vector, vector + matrix, 2 * vector + matrix, 2 * (vector + matrix)]


def test_a_graph_keeps_one_gradient_while_another_is_written_to():
    """Those of a unit lie in one buffer, but each has a version of its own."""

    def body(comm):
        model = fully_shard(nn.Linear(4, 4), mesh=comm)
        model(torch.ones(1, 4)).sum().backward()
        kept, other = (param.grad.local for param in model.parameters())
        factors = torch.ones(kept.numel(), requires_grad=True)
        product = (factors * kept).sum()
        other.mul_(2)
        product.backward()
        return factors.grad.tolist(), other.tolist()

    for weight, bias in LocalWorld(2).run(body):
        assert weight == [1.0] * 8
        assert bias == [2.0] * 2
