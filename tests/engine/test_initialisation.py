# SPDX-License-Identifier: Apache-2.0
"""First values: from the meta device, from the first rank, from state dicts that are assigned."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.beside import params_of, shard
from support.models import GPT, Block, loss_of, make_batches, seeded
from support.threads import on_ranks
from torch import nn
from torch.nn.utils import clip_grad_norm_

from fullshard.core.errors import ConfigurationError, UsageError
from fullshard.testing import LocalWorld
from fullshard.torch import (
    FullyShardedDataParallel,
    ShardedParameter,
    any_rank,
    fully_shard,
    mark_optional,
)

DOCS = Path(__file__).parents[2] / "docs"


def on_meta(build):
    with torch.device("meta"):
        return build()


def by_function(comm, model):
    return shard(model, comm, units=[Block])


def one_step(model, rank, size):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = make_batches("gpt", 1, 2 * size)[0]
    part = slice(2 * rank, 2 * rank + 2) if rank is not None else slice(None)
    loss_of(model(inputs[part]), targets[part]).backward()
    optimizer.step()


def expected(tied, world):
    model = seeded(lambda: GPT(tied=tied))
    one_step(model, None, world)
    return params_of(model)


def assert_equal(found, wanted):
    for each in found:
        torch.testing.assert_close(each, wanted, rtol=1e-4, atol=1e-6)


class ForgetsItsBlocks(nn.Module):
    """Initialises as the model of PyTorch's FSDP2 example does: its own parts, not its blocks."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2))

    def reset_parameters(self):
        self.embedding.reset_parameters()

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.layers:
            x = block(x)
        return x


@on_ranks(2)
def test_the_line_that_makes_torchs_own_example_work(comm):
    model = on_meta(ForgetsItsBlocks)
    for block in model.layers:
        fully_shard(block, mesh=comm)
    fully_shard(model, mesh=comm)
    model.to_empty(device="cpu")
    model.reset_parameters()
    with pytest.raises(UsageError, match=r"unit 'layers.0' came from the meta device"):
        model(torch.tensor([1, 2]))
    (line,) = re.findall(r"`(for block in model.layers: .*?)`", (DOCS / "drop_in.md").read_text())
    exec(line, {"model": model})
    assert model(torch.tensor([1, 2])).isfinite().all()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_meta_then_to_empty_then_values(world, tied):
    state = seeded(lambda: GPT(tied=tied)).state_dict()

    def body(comm):
        model = by_function(comm, on_meta(lambda: GPT(tied=tied)))
        assert all(p.is_meta for p in model.parameters())
        model.to_empty(device="cpu")
        assert all(type(p) is ShardedParameter and not p.is_meta for p in model.parameters())
        model.load_state_dict(state)
        one_step(model, comm.rank, comm.size)
        return params_of(model)

    assert_equal(LocalWorld(world).run(body), expected(tied, world))


@on_ranks(3)
def test_what_nobody_initialised_is_found(comm):
    model = by_function(comm, on_meta(GPT))
    with pytest.raises(UsageError, match=r"unit .* came from the meta device"):
        model(torch.zeros(1, 3, dtype=torch.int64))
    model.to_empty(device="cpu")
    for name, param in model.named_parameters():
        if name != "blocks.1.mlp.0.weight":
            nn.init.ones_(param)
    with pytest.raises(UsageError, match=r"initialised (blocks\.1\.mlp\.0\.weight|\(par)"):
        model(torch.zeros(1, 3, dtype=torch.int64))


@pytest.mark.parametrize("tied", [False, True])
def test_the_wrapper_initialises_unit_by_unit(tied):
    alive = []

    def body(comm):
        model = on_meta(lambda: GPT(blocks=4, tied=tied))

        def initialise(module):
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()
            real = [p for p in model.parameters() if not p.is_meta]
            alive.append(sum(p.numel() for p in real if type(p) is nn.Parameter))

        wrapped = shard(model, comm, "wrapper", [Block], param_init_fn=initialise)
        one_step(wrapped, comm.rank, comm.size)
        return wrapped.module.head.weight.full_tensor()

    head, other = LocalWorld(2).run(body)
    assert torch.isfinite(head).all()
    assert torch.equal(head, other)
    largest = sum(p.numel() for p in GPT().blocks[0].parameters())
    rest = sum(p.numel() for p in GPT(blocks=0, tied=tied).parameters())
    assert max(alive) <= max(largest, rest)


@on_ranks(2)
def test_the_wrapper_calls_reset_parameters_without_a_function(comm):
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    wrapped = FullyShardedDataParallel(model, comm)
    assert wrapped.module[1].running_var.tolist() == [1.0] * 3
    assert wrapped(torch.randn(4, 3)).shape == (4, 3)


@on_ranks(2)
def test_the_wrapper_finds_what_its_function_forgets(comm):
    def forgetful(module):
        module.to_empty(device="cpu", recurse=False)

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    with pytest.raises(ConfigurationError, match="'weight' came from the meta device, and par"):
        FullyShardedDataParallel(on_meta(lambda: nn.Linear(2, 2)), comm, param_init_fn=forgetful)
    with pytest.raises(ConfigurationError, match=r"Bare is on the meta .* reset_parameters\(\)"):
        FullyShardedDataParallel(on_meta(Bare), comm)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_values_of_the_first_rank_with_the_others_on_meta(world, tied):
    def build():
        model = GPT(tied=tied)
        model.register_buffer("steps", torch.full((3,), 7))
        return model

    def body(comm):
        model = seeded(build) if comm.rank == 0 else on_meta(build)
        wrapped = shard(model, comm, "wrapper", [Block], sync_module_states=True)
        assert model.steps.tolist() == [7] * 3
        one_step(wrapped, comm.rank, comm.size)
        return params_of(wrapped)

    assert_equal(LocalWorld(world).run(body), expected(tied, world))


@on_ranks(2)
def test_a_sharded_model_is_not_moved_to_the_meta_device(comm):
    model = by_function(comm, seeded(GPT))
    with pytest.raises(UsageError, match="cannot be moved to the meta device"):
        model.to("meta")
    assert model(torch.zeros(1, 3, dtype=torch.int64)).isfinite().all().item()


def train_with_another_default_device(group, default):
    """Losses of a model whose calls find a default device on which nothing could be computed."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for number, param in enumerate(model.parameters()):
        nn.init.constant_(param, 0.1 * number)
    x, losses = torch.ones(2, 4), []
    with torch.device(default):
        for module in (*model, model):
            fully_shard(module, mesh=group)
        mark_optional(model[1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            loss = model(x).square().mean()
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            assert any_rank(step == dist.get_rank(group), group) == (step < group.size())
        whole = model[0].weight.full_tensor().tolist()
    return losses, whole


def test_users_may_choose_another_default_device(gloo_world):
    """One on which what the engine sends could not be computed."""
    usual, other = (
        gloo_world.run(4, train_with_another_default_device, device) for device in ("cpu", "meta")
    )
    assert other == usual
