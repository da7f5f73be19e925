# SPDX-License-Identifier: Apache-2.0
"""What each mode holds and moves, in bytes counted by hand."""

import weakref

import pytest
import torch
from support.beside import grid
from support.models import seeded
from support.stack import LAYERS, WIDTH, Stack, shard_stack, step
from support.threads import on_ranks
from torch import nn

from fullshard.torch import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    resting_bytes,
    tracing,
)
from fullshard.torch.step.managed import managed_unit_of


def traced(model):
    step(model)
    model.zero_grad()
    with tracing(model) as trace:
        step(model)
    return trace


def unit_of(model):
    return managed_unit_of(model.blocks[0]).unit


def count_sent(comm, name):
    """Note the bytes of each call of ``comm.name``."""
    sent, method = [], getattr(comm, name)

    def counting(arguments, *rest, **more):
        if more.get("label") == "what the backward used":
            return method(arguments, *rest, **more)
        tensors = [each[1] if isinstance(each, tuple) else each for each in arguments]
        sent.append(sum(tensor.nbytes for tensor in tensors))
        return method(arguments, *rest, **more)

    setattr(comm, name, counting)
    return sent


@on_ranks(4)
def test_hybrid_sharding_sums_slices_over_the_replicas(comm):
    within, across = grid(comm)
    summed = count_sent(across, "all_reduce")
    model = Stack()
    for block in model.blocks:
        fully_shard(block, mesh=(within, across))
    model = fully_shard(model, mesh=(within, across))
    summed.clear()
    trace = traced(model)
    unit = unit_of(model)
    layout, all_reduces = unit.layout, [r.op for r in trace.records].count("all_reduce")
    assert layout.shards == 2
    assert summed == [layout.grad_shard_bytes] * 2 * LAYERS  # two steps
    assert all_reduces == LAYERS


@on_ranks(4)
def test_a_smaller_group_gathers_in_backward_from_what_its_ranks_kept(comm):
    model = shard_stack(comm, reshard_after_forward=2)
    block = unit_of(model).ranks.block
    apart = unit_of(model).ranks.apart
    from_all, from_block = count_sent(apart, "all_gather"), count_sent(block, "all_gather")
    from_all.clear()
    trace = traced(model)
    layout = unit_of(model).layout
    last = max(i for i, record in enumerate(trace.records) if record.op == "shrink")
    arrived = next(r for r in trace.records[last:] if r.op == "await_gather")
    live = arrived.live_bytes
    assert from_all == [layout.shard_bytes] * 2 * LAYERS
    # In the second step the last unit stays whole for its backward.
    assert from_block == [layout.full_bytes // 2] * (2 * LAYERS - 1)
    assert live == (LAYERS - 1) * layout.full_bytes // 2 + layout.full_bytes


@on_ranks(2)
def test_working_shard_of_an_offloaded_optimizer(comm):
    model = Stack()
    blocks = set(model.blocks)
    wrapped = FullyShardedDataParallel(
        model,
        comm,
        cpu_offload=CPUOffload(offload_optimizer=True),
        auto_wrap_policy=lambda module, recurse, **_: recurse or module in blocks,
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    unit = unit_of(wrapped.module)
    seen = []
    for _ in range(3):
        step(wrapped, optimizer)
        seen.append(
            (unit.full.working.bytes, unit.full.working_version == unit.full.at_rest._version)
        )
        with torch.no_grad():
            wrapped(torch.ones(2, WIDTH))
        seen.append(unit.full.working_version == unit.full.at_rest._version)
    shard_bytes = unit.layout.shard_bytes
    # stale after each optimizer step, brought up to date by the next gather
    assert seen == [(shard_bytes, False), True] * 3


@on_ranks(2)
def test_a_working_shard_whose_fetch_has_failed_is_fetched_again(comm):
    """Else the next forward would compute with values of before the optimizer's step, silently."""
    model, x = seeded(lambda: nn.Linear(4, 4)), torch.ones(2, 4)
    model = FullyShardedDataParallel(model, comm, cpu_offload=CPUOffload(offload_optimizer=True))
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    full = managed_unit_of(model).unit.full

    def out_of_memory():
        raise torch.OutOfMemoryError

    full._fetch_slices, fetch = out_of_memory, full._fetch_slices
    with pytest.raises(torch.OutOfMemoryError):
        model(x)
    full._fetch_slices = fetch
    with torch.no_grad():
        out = model(x)
    weight, bias = (param.full_tensor() for param in model.parameters())
    torch.testing.assert_close(out, x @ weight.T + bias)


@pytest.mark.parametrize("held", ["full", "slices"])
@on_ranks(4)
def test_what_accumulation_holds_between_micro_batches(comm, held):
    within, across = grid(comm)
    model = Stack()
    for block in model.blocks:
        fully_shard(block, mesh=(within, across), mp_policy=MixedPrecisionPolicy())
    model = fully_shard(model, mesh=(within, across))
    if held == "full":
        model.set_requires_gradient_sync(False)
    else:
        model.set_requires_all_reduce(False)
    step(model)
    units = [managed_unit_of(block).unit for block in model.blocks]
    full = sum(unit.transient_bytes for unit in units)
    kept = sum(u.gradients._kept.bytes for u in units if u.gradients._kept is not None)
    rest = resting_bytes(model, torch.optim.SGD(model.parameters())).gradients_bytes
    layout = units[0].layout
    made_bytes = sum(segment.made_bytes(slot) for segment, slot in layout if segment.trainable)
    shard_bytes = layout.grad_shard_bytes
    assert rest == 0
    kept_bytes = 0 if held == "full" else LAYERS * shard_bytes
    assert kept == kept_bytes
    assert full == (LAYERS * made_bytes if held == "full" else kept_bytes)


@on_ranks(2)
def test_weights_put_in_after_sharding_are_given_back(comm):
    layer = fully_shard(nn.Linear(64, 64, bias=False, device="meta"), mesh=comm)
    layer.weight = nn.Parameter(torch.ones(64, 64))
    whole = weakref.ref(layer.weight)
    layer(torch.ones(1, 64)).sum().backward()
    assert whole() is None
