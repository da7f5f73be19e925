# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing in, around and across units: values, names, gathers and memory."""

from functools import cache, partial

import pytest
import torch
from support import beside
from support.beside import DOORS, grads_of
from support.models import GPT, Attention, Block, loss_of, make_batches, seeded
from support.training import LEARNING_RATE, MAX_NORM, STEPS, train_split
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fullshard.testing import LocalWorld
from fullshard.torch import FullyShardedDataParallel, fully_shard, tracing

# What torch says of a reentrant checkpoint in another one, which runs it without gradients first.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

PARTS = (Attention, nn.Sequential)
split = cache(train_split)


class CheckpointedGPT(GPT):
    """Runs its blocks by ``run(blocks, x)``."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, tokens):
        return self.head(self.norm(self.run(self.blocks, self.embed(tokens))))


def in_turn(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def each_checkpointed(blocks, x, **options):
    for block in blocks:
        x = checkpoint(block, x, **options)
    return x


def shard(comm, model, door, units=(Block,)):
    return beside.shard(model, comm, door, units)


def checkpoint_modules(model, classes, reentrant):
    impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    apply_activation_checkpointing(
        model,
        partial(checkpoint_wrapper, checkpoint_impl=impl),
        check_fn=lambda module: isinstance(module, classes),
    )


def not_at_all(comm, door, reentrant):
    return shard(comm, seeded(GPT), door)


def around_units(comm, door, reentrant):
    run = partial(each_checkpointed, use_reentrant=reentrant)
    return shard(comm, seeded(lambda: CheckpointedGPT(run)), door)


def around_all_units(comm, door, reentrant):
    def run(blocks, x):
        return checkpoint(lambda x: in_turn(blocks, x), x, use_reentrant=reentrant)

    return shard(comm, seeded(lambda: CheckpointedGPT(run)), door)


def inside_units(comm, door, reentrant):
    model = seeded(GPT)
    checkpoint_modules(model, PARTS, reentrant)
    return shard(comm, model, door)


def wrapped_before(comm, door, reentrant):
    model = seeded(GPT)
    checkpoint_modules(model, (Block,), reentrant)
    return shard(comm, model, door)


def wrappers_are_units(comm, door, reentrant):
    model = seeded(GPT)
    checkpoint_modules(model, (Block,), reentrant)
    return shard(comm, model, door, (CheckpointWrapper,))


def wrappers_and_blocks_are_units(comm, door, reentrant):
    model = seeded(GPT)
    checkpoint_modules(model, (Block,), reentrant)
    return shard(comm, model, door, (CheckpointWrapper, Block))


def wrapped_after(comm, door, reentrant):
    model = shard(comm, seeded(GPT), door)
    checkpoint_modules(model, (Block,), reentrant)
    return model


def units_wrapped_after(comm, door, reentrant):
    model = shard(comm, seeded(GPT), door)
    checkpoint_modules(
        model, (FullyShardedDataParallel,) if door == "wrapper" else (Block,), reentrant
    )
    return model


def inside_and_around(comm, door, reentrant):
    model = seeded(GPT)
    checkpoint_modules(model, PARTS, reentrant)
    model = shard(comm, model, door)
    checkpoint_modules(model, (Block,), reentrant)
    return model


def save_products(context, op, *args, **kwargs):
    products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    policy = torch.utils.checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if op in products else policy.PREFER_RECOMPUTE


def selective(comm, door, reentrant):
    contexts = partial(create_selective_checkpoint_contexts, save_products)
    run = partial(each_checkpointed, use_reentrant=False, context_fn=contexts)
    return shard(comm, seeded(lambda: CheckpointedGPT(run)), door)


WAYS = [
    not_at_all,
    around_units,
    around_all_units,
    inside_units,
    wrapped_before,
    wrappers_are_units,
    wrappers_and_blocks_are_units,
    wrapped_after,
    units_wrapped_after,
    inside_and_around,
    selective,
]


def train(comm, way, door, reentrant):
    """As `support.training.train_sharded`; also the trace of the last step."""
    model = way(comm, door, reentrant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    norms, part = [], slice(2 * comm.rank, 2 * comm.rank + 2)
    for inputs, targets in make_batches("gpt", STEPS, 2 * comm.size):
        with tracing(model) as trace:
            loss_of(model(inputs[part]), targets[part]).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {param.ownership.name: param.full_tensor() for param in model.parameters()}, trace


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_step_is_that_of_one_process(way, door, reentrant, world):
    """Bit by bit; each unit is gathered twice, as without checkpointing.

    The root and the last block are gathered once: their backward follows their forward. Not if
    all of the forward that was recorded is run again, with gradients for the first time.
    Torch has selective checkpointing without reentry only.
    """
    expected = split("gpt", torch.float32, world)
    gathers = 5 if way is around_all_units and reentrant else 4
    for norms, params, trace in LocalWorld(world).run(lambda c: train(c, way, door, reentrant)):
        assert norms == expected.norms
        torch.testing.assert_close(params, expected.params, rtol=0, atol=0)
        assert (trace.count("gather"), trace.count("reduce")) == (gathers, 3)
        assert {record.unit for record in trace} == {"(root)", "blocks.0", "blocks.1"}


class Chain(nn.Module):
    """Equal blocks, each with a part that is a unit too; checkpoints what it is told to."""

    class Part(nn.Module):
        def __init__(self, width=16):
            super().__init__()
            self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x):
            return self.down(torch.tanh(self.up(x)))

    class Link(Part):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.first, self.second = Chain.Part(), Chain.Part()

        def forward(self, x):
            x = x + self.inner(self.first, x)
            return super().forward(x + self.second(x))

    def __init__(self, outer, inner, links=4):
        super().__init__()
        self.outer = outer
        self.links = nn.ModuleList(Chain.Link(inner) for _ in range(links))
        self.entry = nn.Linear(16, 16)

    def forward(self, x):
        x = self.entry(x)
        for link in self.links:
            x = self.outer(link, x)
        return x


def plainly(module, x):
    return module(x)


RUNS = {
    "not": plainly,
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not reentrant": partial(checkpoint, use_reentrant=False),
}


@cache
def chain_without_checkpoints():
    """Gradients of one process, and the peak and ops of two ranks."""
    model = seeded(lambda: Chain(plainly, plainly).double())
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(2, 16)
    for factor in (1, 2):
        (model(x * factor).square().mean() / 2).backward()
    return grads_of(model), *LocalWorld(2).run(lambda comm: chain_step(comm, "not", "not"))[0][1:]


def chain_step(comm, outer, inner):
    model = seeded(lambda: Chain(RUNS[outer], RUNS[inner]).double())
    for link in model.links:
        for module in (link.first, link.second, link):
            fully_shard(module, mesh=comm)
    fully_shard(model, mesh=comm)
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(2, 16)
    for _ in range(3):  # the first step records, the others replay
        model.zero_grad()
        with tracing(model) as trace:
            model(x * (1 + comm.rank)).square().mean().backward()
    grads = grads_of(model)
    ops = [(record.op, record.unit) for record in trace]
    return grads, trace.peak_bytes, ops


@pytest.mark.parametrize("outer", RUNS)
@pytest.mark.parametrize("inner", RUNS)
def test_units_in_units_are_freed_as_without_checkpointing(outer, inner):
    """Recomputed or not: the same ops in the same order but for when a gather is issued."""
    expected, peak, ops = chain_without_checkpoints()
    for grads, found_peak, found in LocalWorld(2).run(lambda c: chain_step(c, outer, inner)):
        torch.testing.assert_close(grads, expected, rtol=0, atol=1e-12)
        reduces = [unit for op, unit in ops if op == "reduce"]
        assert [unit for op, unit in found if op == "reduce"] == reduces
        # The last part stays for its backward, unless the first comes before it once more.
        again = [] if outer == "not" else ["gather", "await_gather", "free"]
        assert sorted(found) == sorted([*ops, *((op, "links.3.second") for op in again)])
        assert found_peak <= peak


class Borrower(nn.Module):
    """Calls a unit that it shares with others, and drops what that gives."""

    def __init__(self, shared):
        super().__init__()
        self.own, self.shared = nn.Linear(4, 4), [shared]

    def forward(self, x):
        self.shared[0](x)
        return self.own(x).sin()


class Lender(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run, self.shared = run, nn.Linear(4, 4)
        self.part = Borrower(self.shared)

    def forward(self, x):
        return self.shared(self.run(self.part, x))


@pytest.mark.parametrize("outer", ["not", "not reentrant"])
@pytest.mark.parametrize("inner", ["not", "not reentrant"])
def test_a_unit_that_is_recomputed_in_vain_is_reduced_once(outer, inner):
    """Its gradients have gone by then; what a checkpoint runs again has no backward of its own."""

    def run(part, x):
        return RUNS[outer](partial(RUNS[inner], part), x)

    def body(comm):
        model = seeded(lambda: Lender(run))
        for module in (model.shared, model.part, model):
            fully_shard(module, mesh=comm)
        with tracing(model) as trace:
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        return [record.unit for record in trace if record.op == "reduce"]

    assert LocalWorld(2).run(body) == 2 * [["shared", "part"]]
