# SPDX-License-Identifier: Apache-2.0
"""Optimizers over matrices with one owner each: equal to one process, nothing sent in a step."""

import copy

import pytest
import torch
from support.owned_matrices import (
    DOORS,
    TEMPLATE,
    Counted,
    alone,
    assert_equal,
    batch,
    full,
    loss_of,
    muon_and_adamw,
    sharded,
    train,
)
from support.threads import on_ranks
from torch import nn

import fullshard.torch as fs
from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.core.grouping import muon_work
from fullshard.testing import LocalWorld
from fullshard.torch.tensor.parameter import ShardedParameter

WORLDS = (1, 3, 5)
WRAPPED = "_fsdp_wrapped_module."


@pytest.mark.long
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("world", WORLDS)
def test_muon_is_that_of_one_process_and_sends_nothing(world, door, monkeypatch):
    counted = Counted(monkeypatch)

    def body(comm):
        model = DOORS[door](comm)
        optimizers = muon_and_adamw(model, lambda name: name.replace(WRAPPED, ""))
        train(model, optimizers, comm.rank, step_by=counted.step)
        held = [p for p in optimizers[0].param_groups[0]["params"] if p.local.numel()]
        assert all(p.local.numel() == p.numel() for p in held)
        return full(model), len(held)

    results = LocalWorld(world).run(body)
    expected = alone(world)
    for values, _ in results:
        assert_equal(values, expected)
    assert sum(held for _, held in results) == 9
    assert counted.calls == []


def adafactor_and_adamw(model, name_of=lambda name: name):
    return muon_and_adamw(model, name_of, muon=torch.optim.Adafactor)


@pytest.mark.parametrize("world", [2, 3])
def test_adafactor_is_that_of_one_process_and_sends_nothing(world, monkeypatch):
    counted = Counted(monkeypatch)

    def body(comm):
        model = sharded(comm)
        train(model, adafactor_and_adamw(model), comm.rank, step_by=counted.step)
        return full(model)

    results = LocalWorld(world).run(body)
    expected = alone(world, make=adafactor_and_adamw)
    for values in results:
        assert_equal(values, expected)
    assert counted.calls == []


def test_optimizers_that_look_beyond_a_matrix_are_refused():
    """They clip by one norm, of which each rank would have a part."""

    class Lamb(torch.optim.Muon):
        def step(self, closure=None):
            nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
            return super().step(closure)

    def body(comm):
        model = sharded(comm)
        loss_of(model, batch(0, 0)).backward()
        optimizer = muon_and_adamw(model, muon=Lamb)[0]
        with pytest.raises(NotSupportedError, match=r"alone, and tried on .* in another way"):
            optimizer.step()

    LocalWorld(2).run(body)


def test_a_step_that_fails_leaves_the_optimizer_as_it_was():
    class Failing(torch.optim.Muon):
        def step(self, closure=None):
            raise RuntimeError("no")

    def body(comm):
        model = sharded(comm)
        optimizer = muon_and_adamw(model, muon=Failing)[0]
        loss_of(model, batch(0, 0)).backward()
        with pytest.raises(RuntimeError, match="no"):
            optimizer.step()
        params = optimizer.param_groups[0]["params"]
        assert all(isinstance(p, ShardedParameter) and p.grad is not None for p in params)
        optimizer.zero_grad()
        assert all(p.grad is None for p in params)

    LocalWorld(2).run(body)


def test_a_closure_steps_on_the_gradients_that_it_makes():
    def body(comm):
        model = sharded(comm)
        optimizers = muon_and_adamw(model)

        def closure():
            optimizers[0].zero_grad()
            loss = loss_of(model, batch(0, comm.rank))
            loss.backward()
            return loss

        assert optimizers[0].step(closure) is not None
        optimizers[1].step()
        return full(model)

    expected = alone(2, steps=1)
    for values in LocalWorld(2).run(body):
        assert_equal(values, expected)


def test_norms_are_those_of_all_ranks_outside_of_steps():
    def body(comm):
        model = sharded(comm)
        loss_of(model, batch(0, 0)).backward()
        return float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))

    plain = copy.deepcopy(TEMPLATE)
    loss_of(plain, batch(0, 0)).backward()
    expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    assert LocalWorld(3).run(body) == pytest.approx([expected] * 3, rel=1e-5)


@pytest.mark.long
@on_ranks(4)
def test_refused_is_what_needs_equal_slices(comm):
    with pytest.raises(NotSupportedError, match="needs equal slices"):
        sharded(comm, reshard_after_forward=2)
    with pytest.raises(ConfigurationError, match="matrix"):
        fs.fully_shard(copy.deepcopy(TEMPLATE), mesh=comm, align="columns")
    model = sharded(comm)
    with pytest.raises(NotSupportedError, match="sends equal slices"):
        model.blocks[0].set_custom_all_gather(None)
    with pytest.raises(NotSupportedError, match="LBFGS needs whole tensors"):
        torch.optim.LBFGS(model.blocks.parameters()).step(lambda: 0.0)
    cut = fs.fully_shard(copy.deepcopy(TEMPLATE), mesh=comm, align="element")
    optimizer = torch.optim.Muon([p for p in cut.parameters() if p.dim() == 2])
    with pytest.raises(NotSupportedError, match='align="matrix"'):
        optimizer.step()


def test_a_placement_by_hand_keeps_a_matrix_cut_at_rows():
    def body(comm):
        block = copy.deepcopy(TEMPLATE).blocks[0]
        head = block.mix.weight
        fs.fully_shard(
            block, mesh=comm, align="matrix",
            shard_placement_fn=lambda p: torch.distributed.tensor.Shard(0) if p is head else None,
        )  # fmt: skip
        return block.mix.weight.span.numel, block.up.weight.span.numel

    found = LocalWorld(2).run(body)
    assert [rows for rows, _ in found] == [12 * 24] * 2
    assert sorted(held for _, held in found) == [0, 40 * 24]


def test_state_that_cannot_be_told_is_refused_on_all_ranks():
    class Muon(torch.optim.Muon):
        def step(self, closure=None):
            super().step(closure)
            for state in self.state.values():
                state["history"] = [1, {2}]

    def body(comm):
        model = sharded(comm)
        optimizer = muon_and_adamw(model, muon=Muon)[0]
        loss_of(model, batch(0, 0)).backward()
        optimizer.step()
        with pytest.raises(NotSupportedError, match=r"'history'..1. of Muon is a set"):
            optimizer.state_dict()

    LocalWorld(2).run(body)


class Ranks64:
    size = 64


def test_units_of_a_large_model_are_even_if_dealt_out_together():
    with torch.device("meta"):
        wide, kv, hidden = 4096, 1024, 14336  # of Llama 3 8B
        shapes = [(wide, wide)] * 2 + [(wide, kv)] * 2 + [(wide, hidden)] * 2 + [(hidden, wide)]
        blocks = [nn.ModuleList(nn.Linear(*shape) for shape in shapes) for _ in range(32)]
    whole, comm, loads = fs.WholeMatrices(*blocks), Ranks64(), [0.0] * Ranks64.size
    for param in (each for block in blocks for each in block.parameters()):
        owner = whole.owner_of(param, comm)
        assert (owner is None) == (param.dim() == 1)
        if owner is not None:
            loads[owner] += muon_work(param.shape)
    assert max(loads) <= 1.1 * sum(loads) / len(loads)


@pytest.mark.long
def test_matrices_dealt_out_on_the_meta_device_are_stepped_as_by_one_process():
    values = {name: param.detach().clone() for name, param in TEMPLATE.named_parameters()}

    def body(comm):
        model = copy.deepcopy(TEMPLATE).to("meta")
        whole = fs.WholeMatrices(*model.blocks)
        for block in model.blocks:
            fs.fully_shard(block, mesh=comm, align=whole)
        fs.fully_shard(model, mesh=comm).to_empty(device="cpu").load_state_dict(values)
        train(model, muon_and_adamw(model), comm.rank)
        return full(model)

    expected = alone(3)
    for got in LocalWorld(3).run(body):
        assert_equal(got, expected)


def test_what_is_not_among_matrices_dealt_out_together_is_dealt_out_behind_them():
    def body(comm):
        model = copy.deepcopy(TEMPLATE)
        whole = fs.WholeMatrices(model.blocks[0])
        for block in model.blocks:
            fs.fully_shard(block, mesh=comm, align=whole)
        with pytest.raises(ConfigurationError, match="one by one, got a list"):
            fs.WholeMatrices([model])
        return sum(each.weight.ownership.owner is not None for each in (
            model.blocks[1].up, model.blocks[2].down, model.blocks[0].mix
        ))  # fmt: skip

    assert LocalWorld(2).run(body) == [3, 3]


@pytest.mark.parametrize("door", DOORS)
def test_offloaded_matrices_are_stepped_where_they_rest(door):
    options = {"offload_policy": fs.CPUOffloadPolicy(pin_memory=False)}
    if door == "wrapper":
        options = {"cpu_offload": fs.CPUOffload(offload_params=True)}

    def body(comm):
        model = DOORS[door](comm, **options)
        optimizers = muon_and_adamw(model, lambda name: name.replace(WRAPPED, ""))
        train(model, optimizers, comm.rank)
        return full(model)

    expected = alone(2)
    for values in LocalWorld(2).run(body):
        assert_equal(values, expected)
