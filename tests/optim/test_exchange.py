# SPDX-License-Identifier: Apache-2.0
"""Whole-matrix optimizers over parameters that stay cut: values go to owners and come back."""

import copy
from functools import partial

import pytest
import torch
from support.owned_matrices import (
    TEMPLATE,
    alone,
    assert_equal,
    assert_equal_in_float64,
    batch,
    full,
    in_float64,
    loss_of,
    muon_and_adamw,
    sharded,
    train,
    wrapped,
)
from support.threads import on_ranks
from torch import nn

import fullshard.torch as fs
from fullshard.core.errors import ConfigurationError, NotSupportedError, UsageError
from fullshard.testing import LocalComm, LocalWorld

DOORS = {"fully_shard": (sharded, "row"), "wrapper": (wrapped, "element")}


def made(comm, door, make=muon_and_adamw):
    shard, align = DOORS[door]
    model = shard(comm, align=align)
    optimizers = make(model, lambda name: name.replace("_fsdp_wrapped_module.", ""))
    fs.exchange_matrices(optimizers[0])
    return model, optimizers


@pytest.fixture
def sent(monkeypatch):
    """Each exchange: the rank, its kind, and how many bytes go to other ranks."""
    calls, call = [], LocalComm.all_to_all

    def counting(comm, received, sent, label=""):
        kind, _, unit = label.partition(" of the unit of ")
        if unit:
            numel = sum(sent.numels) - sent.numels[comm.rank]
            calls.append((comm.rank, kind, numel * sent.flat.element_size()))
        return call(comm, received, sent, label)

    monkeypatch.setattr(LocalComm, "all_to_all", counting)
    return calls


def kinds(sent):
    return [kind for rank, kind, _ in sent if rank == 0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "door"),
    [(2, "fully_shard"), (3, "wrapper")],
)
def test_muon_is_that_of_one_process_by_two_calls_a_unit(world, door, sent):
    def body(comm):
        model, optimizers = made(comm, door)
        train(model, optimizers, comm.rank)
        return full(model)

    for values in LocalWorld(world).run(body):
        assert_equal(values, alone(world))
    calls = {kind: kinds(sent).count(kind) for kind in kinds(sent)}
    assert calls == {"gradients": 15, "values": 3, "new values": 15}


@pytest.mark.parametrize("world", [2, 5])
def test_bytes_of_a_step_are_those_of_gradients_and_new_values(world, sent):
    def body(comm):
        model, optimizers = made(comm, "wrapper")
        train(model, optimizers[:1], comm.rank, steps=range(2))
        return sum(p.numel() * 4 for p in optimizers[0].param_groups[0]["params"])

    matrices = LocalWorld(world).run(body)[0]
    of_ranks = [[size for at, _, size in sent if at == rank][-6:] for rank in range(world)]
    votes = 4 * (world - 1)
    most = 2 * (world - 1) / world * matrices + votes
    assert sum(map(sum, of_ranks)) <= world * most  # some parts stay


@pytest.mark.long
@pytest.mark.parametrize("write", ["in place", "unseen"])
def test_what_is_written_between_steps_is_sent_again(write, sent):
    def body(comm):
        model, optimizers = made(comm, "wrapper")
        train(model, optimizers, comm.rank, steps=range(2))
        matrix = optimizers[0].param_groups[0]["params"][4]
        if write == "in place":
            with torch.no_grad():
                matrix.mul_(0.5)
        elif matrix.span.start <= 300 < matrix.span.stop:  # on one rank, and no counter sees it
            matrix.local.data[300 - matrix.span.start] = 7.0
        train(model, optimizers, comm.rank, steps=range(2))
        return full(model)

    model = copy.deepcopy(TEMPLATE)
    optimizers = muon_and_adamw(model)
    alone(3, model=model, optimizers=optimizers, steps=2)
    with torch.no_grad():
        matrix = optimizers[0].param_groups[0]["params"][4]
        if write == "in place":
            matrix.mul_(0.5)
        else:
            matrix.view(-1)[300] = 7.0
    expected = alone(3, model=model, optimizers=optimizers, steps=2)
    for values in LocalWorld(3).run(body):
        assert_equal(values, expected)
    assert kinds(sent).count("values") == 2 * 3


class Counting(torch.optim.Muon):
    """Counts its steps in three ways."""

    steps, seen = 0, staticmethod(lambda: None)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.param_groups[0].update(in_place=torch.zeros(()), anew=0)

    @torch.no_grad()
    def step(self):
        self.seen()
        self.steps += 1
        self.param_groups[0]["in_place"] += 1
        self.param_groups[0]["anew"] += 1
        super().step()


def test_units_are_stepped_while_gradients_of_the_next_travel_and_counted_once(sent):
    def body(comm):
        model, optimizers = made(comm, "wrapper", partial(muon_and_adamw, muon=Counting))
        optimizers[0].seen = lambda: sent.append((comm.rank, "step", 0))
        train(model, optimizers, comm.rank, steps=range(3))
        group = optimizers[0].param_groups[0]
        assert (optimizers[0].steps, group["anew"], float(group["in_place"])) == (3, 3, 3.0)
        return full(model)

    values = LocalWorld(2).run(body)[0]
    assert_equal(values, alone(2, steps=3))
    assert kinds(sent)[-9:] == [
        *("gradients", "gradients", "step", "new values"),
        *("gradients", "step", "new values", "step", "new values"),
    ]


class CountingForAll(torch.optim.SGD):
    """Counts steps beside its parameters, as MADGRAD, and in a tensor and a dict, as heavyball."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.counted, self.inner = torch.zeros(()), {}

    @torch.no_grad()
    def step(self, closure=None):
        count = self.state.setdefault("k", torch.zeros(()))
        count += 1
        self.counted += 1
        self.inner["steps"] = self.inner.get("steps", 0) + 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param -= group["lr"] * param.grad / (count + self.counted + self.inner["steps"])


@pytest.mark.parametrize("door", DOORS)
def test_a_step_counts_once_what_is_counted_for_all(door):
    make = partial(muon_and_adamw, muon=CountingForAll)

    def body(comm):
        model, optimizers = made(comm, door, make)
        train(model, optimizers, comm.rank)
        counted = optimizers[0].state["k"], optimizers[0].counted, optimizers[0].inner["steps"]
        return full(model), *counted

    for values, *counts in LocalWorld(3).run(body):
        assert_equal(values, alone(3, make=make))
        assert counts == [5, 5, 5]


@pytest.mark.parametrize("way", ["checkpoint", "state dict"])
@pytest.mark.parametrize("align", ["element", "matrix", "exchanged"])
def test_what_is_counted_for_all_is_saved(align, way, tmp_path):
    def prepared(comm):
        model = wrapped(comm, align="matrix" if align == "matrix" else "element")
        optimizer = CountingForAll(model.parameters(), lr=0.1)
        if align == "exchanged":
            fs.exchange_matrices(optimizer)
        return model, optimizer

    def body(comm):
        model, optimizer = prepared(comm)
        train(model, [optimizer], comm.rank, steps=range(3))
        if way == "checkpoint":
            fs.save_checkpoint(tmp_path / "run", model, optimizer, step=3)
            again, other = prepared(comm)
            fs.load_checkpoint(tmp_path / "run", again, other)
        else:
            again = model
            other = CountingForAll(model.parameters(), lr=0.1)
            if align == "exchanged":
                fs.exchange_matrices(other)
            other.load_state_dict(optimizer.state_dict())
        other.counted.fill_(3)  # attributes, of which no state dict knows
        other.inner["steps"] = 3
        train(again, [other], comm.rank, steps=range(3, 5))
        assert fs.memory_summary(again, other)
        return full(again), other.state["k"]

    def make(model):
        return [CountingForAll(model.parameters(), lr=0.1)]

    for values, count in LocalWorld(2).run(body):
        assert_equal(values, alone(2, make=make))
        assert count == 5


@on_ranks(2)
def test_fsdp1s_state_dicts_do_not_know_what_is_counted_for_all(comm):
    model = wrapped(comm, align="element")
    optimizer = CountingForAll(model.parameters(), lr=0.1)
    train(model, [optimizer], comm.rank, steps=range(1))
    with pytest.raises(NotSupportedError, match="'k' of CountingForAll belongs to no param"):
        fs.FullyShardedDataParallel.optim_state_dict(model, optimizer)


@pytest.mark.long
@pytest.mark.parametrize("door", DOORS)
def test_accumulation_clipping_and_a_matrix_without_a_gradient(door, monkeypatch):
    in_float64(monkeypatch)

    def body(comm):
        model, optimizers = made(comm, door)
        for number in range(3):
            for part in range(2):
                loss_of(model, batch(number, 0, part)).backward()
            fs.clip_grad_norm_(model.parameters(), 0.1)
            if number == 1:
                optimizers[0].param_groups[0]["params"][2].grad = None
                optimizers[0].state_dict()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return full(model)

    expected = LocalWorld(1).run(body)[0]
    for values in LocalWorld(4).run(body):
        assert_equal_in_float64(values, expected)


def test_adafactor_steps_vectors_beside_matrices_on_more_ranks_than_there_are():
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3))

    start = net()
    inputs = torch.randn(4, 6)

    def trained(model, optimizer, factor=1.0):
        for _ in range(3):
            (model(inputs).square().sum() * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    plain = copy.deepcopy(start)
    trained(plain, torch.optim.Adafactor(plain.parameters(), lr=0.1))

    def body(comm):
        model = fs.fully_shard(copy.deepcopy(start), mesh=comm)
        model.set_gradient_divide_factor(1.0)
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
        fs.exchange_matrices(optimizer)
        trained(model, optimizer, float(comm.rank == 0))
        return full(model)

    for world in (2, 8):
        for values in LocalWorld(world).run(body):
            for name, value in plain.named_parameters():
                assert torch.equal(values[name], value), (world, name)


@on_ranks(2)
def test_refused_is_what_owners_cannot_step(comm):
    model = wrapped(comm, align="element")
    params = list(model.parameters())
    with pytest.raises(ConfigurationError, match="needs no whole matrices"):
        fs.exchange_matrices(torch.optim.AdamW(params))
    with pytest.raises(NotSupportedError, match="on their owners: it takes dot products"):
        fs.exchange_matrices(torch.optim.LBFGS(params))
    muon = muon_and_adamw(model, lambda name: name.replace("_fsdp_wrapped_module.", ""))[0]
    with pytest.raises(NotSupportedError, match=r"exchange_matrices\(optimizer\)"):
        muon.step()
    fs.exchange_matrices(muon)
    with pytest.raises(UsageError, match="call backward"):
        muon.step(lambda: None)
    loss_of(model, batch(0, comm.rank)).backward()
    muon.step()


@on_ranks(2)
def test_ranks_that_give_other_parameters_are_refused(comm):
    model = sharded(comm, align="row")
    muon = muon_and_adamw(model)[0]
    if comm.rank:
        del muon.param_groups[0]["params"][3]
    with pytest.raises(ConfigurationError, match="exchange_matrices"):
        fs.exchange_matrices(muon)
