# SPDX-License-Identifier: Apache-2.0
"""Stacks of matrices under Muon: whole on one rank, also of experts on an axis of their own."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from support.expert_workers import (
    MAX_NORM,
    StackedMuon,
    batches,
    muon_for_experts,
    sharded,
    train,
    train_and_save,
    whole,
)
from support.world import on_processes
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import fullshard.torch as fs
from fullshard.testing import LocalWorld
from fullshard.torch import StackedExperts
from fullshard.torch.state.apart import looks_beyond


@pytest.fixture(scope="module", autouse=True)
def of_no_other_test(gloo_world):
    """Start processes anew: torch finds meshes of groups that are gone by their ranks and names."""
    gloo_world.close()


@cache
def in_one_process(kind, ranks, micro_batches=1):
    model = whole(kind)
    if kind == "list":
        model.mixture.experts = StackedExperts(list(model.mixture.experts))
    optimizers = muon_for_experts(model)
    for data in batches(ranks, micro_batches):
        losses = [model(rows) for micro_batch in data for rows in micro_batch]
        torch.stack(losses).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def check(of_ranks, expected):
    for found in of_ranks:
        torch.testing.assert_close(found.params, expected, rtol=0, atol=1e-11)


MUON = {"make": muon_for_experts, "align": "matrix"}


def test_a_checkpoint_goes_on_with_another_number_of_ranks(gloo_world, tmp_path):
    gloo_world.run_joined(4, train_and_save, "stacked", 2, 2, tmp_path / "step", 3, **MUON)
    of_ranks = gloo_world.run_joined(
        4, train, "stacked", 4, 1, 1, folder=tmp_path / "step", **(MUON | {"align": "row"})
    )
    check(of_ranks, in_one_process("stacked", 4))


class NormOfStack(torch.optim.SGD):
    """Looks at all experts of a stack together."""

    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.sub_(param.grad / param.grad.norm())


class Rows(torch.optim.SGD):
    """Keeps a number for each row, as Adafactor."""

    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    rows = self.state[param]["rows"] = param.grad.square().mean(-1, keepdim=True)
                    param.data.sub_(param.grad / rows.sqrt())


@on_processes(4, joined=True)
def test_one_rank_has_a_stack_and_its_state():
    model, _ = sharded("stacked", 2, 2, align="matrix")
    optimizer, _ = muon_for_experts(model)
    model(batches(4, 1)[0, 0, dist.get_rank()]).backward()
    with CommDebugMode() as counted:
        optimizer.step()
    assert counted.get_total_counts() == 0
    stacks = optimizer.param_groups[0]["params"]
    state = [optimizer.state.get(param, {}).get("momentum") for param in stacks]
    owned = torch.tensor([0 if each is None else each.local.numel() for each in state])
    assert all(numel in (0, 4 * 8 * 16) for numel in owned.tolist())
    dist.all_reduce(owned)
    assert owned.tolist() == [8 * 8 * 16] * 2


LOOKING = {
    NormOfStack: "steps each in another way if all are there",
    Rows: "of a stack of matrices (3, 48, 64) it keeps a Tensor (3, 48, 1)",
}


@on_processes(4, joined=True)
def test_what_looks_at_all_experts_of_a_stack_is_refused():
    model, _ = sharded("stacked", 2, 2, align="matrix")
    for kind, told in LOOKING.items():
        assert told in looks_beyond(kind([p for p in model.parameters() if p.dim() == 3], lr=0.1))


@pytest.mark.parametrize("world", [1, 3])
def test_a_stack_on_no_axis_of_its_own(world):
    """An owner has all of it, so that what looks at all of it is right, too."""
    torch.manual_seed(0)
    start = torch.randn(4, 8, 6)

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(start.clone())

        def forward(self, x):
            return (x @ self.weight).square().mean()

    def body(comm):
        model = fs.fully_shard(Stack(), mesh=comm, align="matrix")
        optimizer = StackedMuon(model.parameters())
        assert looks_beyond(optimizer) is None
        for _ in range(3):
            model(torch.ones(4, 2, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
        held = model.weight.local.numel()
        return held, model.weight.full_tensor()

    ranks = LocalWorld(world).run(body)
    alone = Stack()
    optimizer = StackedMuon(alone.parameters())
    for _ in range(3):
        alone(torch.ones(4, 2, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sorted(held for held, _ in ranks) == [0] * (world - 1) + [start.numel()]
    for _, value in ranks:
        torch.testing.assert_close(value, alone.weight.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "experts", "shards", "door"),
    [
        ("stacked", 2, 2, "wrapper"),
        ("list", 1, 3, "fully_shard"),  # last: meshes of 4 ranks are not found again after it
    ],
)
def test_muon_over_experts_is_that_of_one_process(gloo_world, kind, experts, shards, door):
    of_ranks = gloo_world.run_joined(
        experts * shards, train, kind, experts, shards, 1, door=door, **MUON
    )
    check(of_ranks, in_one_process(kind, experts * shards))
