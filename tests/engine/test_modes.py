# SPDX-License-Identifier: Apache-2.0
"""Every option by both doors on 3 ranks, each equal to one process that has no shards.

Where ranks are in groups on 4.
"""

from functools import cache
from itertools import count

import pytest
import torch
from support.accumulation import (
    halves_each_reduced,
    halves_overlapping,
    halves_without_communication,
)
from support.beside import grid, params_of, shard
from support.models import GPT, Block, loss_of, make_batches, seeded
from support.threads import on_ranks
from torch import nn

from fullshard.core.errors import ConfigurationError, UsageError
from fullshard.testing import LocalWorld
from fullshard.torch import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
    summon_full_params,
)
from fullshard.wrap import ModuleWrapPolicy

STEPS = 3
GROUPED = ("hybrid", "offload", "reshard")


def build(tied=False, dtype=torch.float64):
    return seeded(lambda: GPT(width=12, blocks=3, tied=tied)).to(dtype)


def wrapper(comm, model, where=None, **options):
    return shard(model, where or comm, "wrapper", [Block], **options)


def function(comm, model, where=None, embed=False, **options):
    units = (Block, "embed", "head") if embed else (Block,)
    return shard(model, where or comm, units=units, **options)


def train(model, rank, size, each_step):
    """Train on this rank's parts of the batches; ``each_step`` runs the backward its own way."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number, (inputs, targets) in enumerate(make_batches("gpt", STEPS, 2 * size)):
        part = slice(2 * rank, 2 * rank + 2)

        def backward(scale=1.0, inputs=inputs[part], targets=targets[part]):
            loss = loss_of(model(inputs), targets)
            (loss * scale).backward()
            losses.append(loss.item())

        each_step(model, number, backward)
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@cache
def plain(world, tied=False):
    model = build(tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for inputs, targets in make_batches("gpt", STEPS, 2 * world):
        loss_of(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad()
    return params_of(model)


def simply(model, number, backward):
    backward()


def check(sharded, world=3, *, tied=False, each_step=simply):
    expected = plain(world, tied)

    def body(comm):
        model = sharded(comm, build(tied))
        train(model, comm.rank, comm.size, each_step)
        return params_of(model)

    for found in LocalWorld(world).run(body):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


STRATEGY = ShardingStrategy

OPTIONS = {
    "hybrid wrapper": lambda c, m: wrapper(c, m, grid(c), sharding_strategy=STRATEGY.HYBRID_SHARD),
    "hybrid zero2 wrapper": lambda c, m: wrapper(
        c, m, grid(c), sharding_strategy=STRATEGY._HYBRID_SHARD_ZERO2
    ),
    "hybrid function": lambda c, m: function(c, m, grid(c)),
    "offload params wrapper": lambda c, m: wrapper(
        c, m, cpu_offload=CPUOffload(offload_params=True)
    ),
    "offload optimizer wrapper": lambda c, m: wrapper(
        c, m, cpu_offload=CPUOffload(offload_optimizer=True)
    ),
    "offload no_shard": lambda c, m: wrapper(
        c,
        m,
        cpu_offload=CPUOffload(offload_params=True),
        sharding_strategy=STRATEGY.NO_SHARD,
    ),
    "offload function": lambda c, m: function(c, m, offload_policy=CPUOffloadPolicy()),
    "forward_prefetch": lambda c, m: wrapper(c, m, forward_prefetch=True),
    "backward_prefetch none": lambda c, m: wrapper(c, m, backward_prefetch=None),
    "reshard False": lambda c, m: function(c, m, reshard_after_forward=False),
    "reshard all": lambda c, m: function(c, m, reshard_after_forward=c.size),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option(option):
    check(OPTIONS[option], 4 if option.startswith(GROUPED) else 3)


def test_reshard_to_a_smaller_group():
    check(lambda c, m: function(c, m, reshard_after_forward=2), 4)


@on_ranks(3)
def test_reshard_to_a_group_that_does_not_divide_is_refused(comm):
    with pytest.raises(ConfigurationError, match="reshard_after_forward=2 must divide the 3"):
        fully_shard(nn.Linear(2, 2), mesh=comm, reshard_after_forward=2)


def layers_wrapped(comm, model):
    """The embedding is a unit by policy; its weight is the head's too, so the root has it."""
    policy = ModuleWrapPolicy({nn.Embedding, nn.Linear})
    return FullyShardedDataParallel(model, comm, auto_wrap_policy=policy)


@pytest.mark.parametrize(
    "door",
    [wrapper, layers_wrapped, function, lambda c, m: function(c, m, embed=True)],
    ids=["wrapper", "layers wrapped", "function", "embeddings apart"],
)
def test_tied_embeddings(door):
    check(door, tied=True)


# ---- gradient accumulation and its kin ----------------------------------------------------------


def halves_kept_full(model, number, backward):
    model.set_reshard_after_backward(False)
    backward(0.5)
    backward(0.5)


def halves_within_the_group(model, number, backward):
    model.set_requires_all_reduce(False)
    backward(0.5)
    assert all(p.grad is None for p in model.parameters())
    model.set_requires_all_reduce(True)
    backward(0.5)


def halves_of_what_has_no_replicas(model, number, backward):
    model.set_requires_all_reduce(False)
    backward(0.5)
    assert all(p.grad is not None for p in model.parameters())
    backward(0.5)


@pytest.mark.parametrize(
    "each_step",
    [
        halves_without_communication,
        halves_each_reduced,
        halves_overlapping,
        halves_kept_full,
    ],
    ids=lambda step: step.__name__,
)
def test_accumulation(each_step):
    check(lambda c, m: function(c, m, grid(c)), 4, each_step=each_step)


def test_sums_over_replicas_are_held_back_only_where_there_are_some():
    check(function, each_step=halves_of_what_has_no_replicas)


def test_accumulation_within_the_group():
    check(lambda c, m: function(c, m, grid(c)), 4, each_step=halves_within_the_group)


def by_hand(model, number, backward):
    for block in model.blocks:
        block.unshard()
    assert model.blocks[0].mlp[0].weight.sum().isfinite()
    model.blocks[1].reshard()
    handle = model.unshard(async_op=True)
    handle.wait()
    backward()


def twice_the_gradient(model, number, backward):
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(2 * model_ranks(model))
    backward(2.0)


def model_ranks(model):
    return next(iter(model.parameters())).ownership.comm.size


def look_in_between(model, number, backward):
    with summon_full_params(model):
        assert not hasattr(model.blocks[0].mlp[0].weight, "span")
    backward()
    with summon_full_params(model, with_grads=True):
        for param in model.parameters():
            param.grad.mul_(3)
    with summon_full_params(model, with_grads=True, offload_to_cpu=True):
        for param in model.parameters():
            param.grad.div_(3)


@pytest.mark.parametrize(
    "each_step", [by_hand, twice_the_gradient, look_in_between], ids=lambda step: step.__name__
)
def test_by_hand(each_step):
    check(function, each_step=each_step)


def with_lists(comm, model):
    function(comm, model)
    first, second, third = model.blocks
    model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([])
    third.set_modules_to_backward_prefetch([second, first])
    return model


def without_gather_in_backward(comm, model):
    fully_shard(model.embed, mesh=comm)
    model.embed.set_unshard_in_backward(False)
    return function(comm, model)


def with_methods(comm, model):
    function(comm, model)
    model.set_reduce_scatter_max_input_buffers(3)
    model.set_reduce_scatter_unused_params(True)
    model.set_separate_reduce_scatter_group(False)
    model.set_force_sum_reduction_for_comms(True)
    model.set_allocate_memory_from_process_group_for_comm(True)
    for block in model.blocks:
        block.set_all_reduce_hook(lambda reduced: reduced.mul_(1.0))
        block.set_custom_all_gather(
            lambda output_tensor, input_tensor, group, async_op: group.all_gather(
                [(output_tensor, input_tensor)]
            )
        )
        block.set_custom_reduce_scatter(
            lambda output_tensor, input_tensor, group, op, async_op: group.reduce_scatter(
                [(output_tensor, input_tensor)]
            )
        )
    return model


def with_hook(comm, model):
    wrapped = wrapper(comm, model)

    def hook(state, full, shard):
        state.reduce_scatter([(shard, full)]).wait()
        shard.div_(state.size)

    wrapped.register_comm_hook(comm.duplicate(), hook)
    return wrapped


def replicated_with_hook(comm, model):
    wrapped = wrapper(comm, model, sharding_strategy=STRATEGY.NO_SHARD)

    def hook(state, full):
        state.all_reduce([full]).wait()
        full.div_(state.size)

    wrapped.register_comm_hook(comm.duplicate(), hook)
    return wrapped


@pytest.mark.parametrize(
    "sharded",
    [with_lists, without_gather_in_backward, with_methods, with_hook, replicated_with_hook],
    ids=lambda sharded: sharded.__name__,
)
def test_setters(sharded):
    check(sharded)


# ---- requires_grad changed between steps --------------------------------------------------------


@pytest.mark.parametrize(
    "setter", ["set_requires_gradient_sync", "set_requires_all_reduce"], ids=["full", "sums"]
)
@on_ranks(4)
def test_requires_grad_is_not_changed_while_gradients_are_held_back(comm, setter):
    model = function(comm, build(), grid(comm))
    inputs, targets = make_batches("gpt", 1, 2)[0]
    getattr(model, setter)(False)
    loss_of(model(inputs), targets).backward()
    model.head.requires_grad_(False)
    with pytest.raises(UsageError, match="requires_grad was changed while gradients"):
        model(inputs)


@on_ranks(2)
def test_a_custom_gather_that_fails_leaves_nothing_under_way(comm):
    """The engine awaits what it had begun, which would write to memory that is let go."""
    model = build()
    model.head.requires_grad_(False)  # travels apart from the rest
    begun, calls = [], count()

    def gather(output_tensor, input_tensor, group, async_op):
        if next(calls) == 1:
            raise RuntimeError("not twice")
        begun.append(group.all_gather([(output_tensor, input_tensor)]))
        return begun[-1]

    fully_shard(model, mesh=comm, align="element").set_custom_all_gather(gather)
    inputs, _ = make_batches("gpt", 1, 1)[0]
    with pytest.raises(RuntimeError, match="not twice"):
        model(inputs)
    assert begun[0].is_completed()
    torch.testing.assert_close(model(inputs), build()(inputs))
