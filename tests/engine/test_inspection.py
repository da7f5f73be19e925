# SPDX-License-Identifier: Apache-2.0
"""What a model is said to hold and send is what it holds and sends."""

import threading

import pytest
import torch
from support import beside
from support.stack import WIDTH, Stack, step
from support.threads import on_ranks
from torch import nn

from fullshard.core.errors import ConfigurationError, UsageError
from fullshard.core.trace import Trace, TraceRecord
from fullshard.testing import LocalWorld
from fullshard.torch import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
    resting_bytes,
    set_prefetch,
    summon_full_params,
    tracing,
)
from fullshard.torch.inspection import describe
from fullshard.torch.inspection.memory import memory_of_rank, memory_of_ranks, memory_summary
from fullshard.torch.inspection.traffic import communication

BF16, FP32 = torch.bfloat16, torch.float32
WORLD = 4


class Model(nn.Module):
    """An embedding and a tied head in the root's unit, two blocks, a frozen weight, a scalar."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.blocks = Stack(2).blocks
        self.blocks[1][0].weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(model, optimizer=None):
    model(torch.arange(6).view(2, 3)).float().square().mean().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def by_wrapper(comm, **options):
    return beside.shard(Model(), comm, "wrapper", [nn.Sequential], **options)


def by_function(comm, **options):
    return beside.shard(Model(), comm, units=[nn.Sequential], **options)


def strategy(name, **options):
    chosen = ShardingStrategy[name]
    hybrid = chosen.sharding.sharded and chosen.sharding.replicated
    return lambda comm: by_wrapper(
        beside.grid(comm) if hybrid else comm, sharding_strategy=chosen, **options
    )


# ---- communication ------------------------------------------------------------------------------


@pytest.fixture
def sent_by(sent):
    """Gives what a rank has sent since it asked last."""

    def take():
        mine = sent.pop(threading.current_thread().name, {})
        return [mine.get(kind, 0) for kind in ("all_gather", "reduce_scatter", "all_reduce")]

    return take


def as_list(foreseen):
    total = foreseen.total
    gathers = total.gather_forward_bytes + total.gather_backward_bytes
    return [gathers, total.reduce_bytes, total.all_reduce_bytes]


SHARDED = {
    "FULL_SHARD": strategy("FULL_SHARD"),
    "SHARD_GRAD_OP": strategy("SHARD_GRAD_OP"),
    "NO_SHARD": strategy("NO_SHARD"),
    "HYBRID_SHARD": strategy("HYBRID_SHARD"),
    "_HYBRID_SHARD_ZERO2": strategy("_HYBRID_SHARD_ZERO2"),
    "bf16, reduced in fp32": strategy("FULL_SHARD", mixed_precision=MixedPrecision(BF16, FP32)),
    "bf16, hybrid": strategy("HYBRID_SHARD", mixed_precision=MixedPrecision(BF16)),
    "bf16, NO_SHARD": strategy("NO_SHARD", mixed_precision=MixedPrecision(BF16)),
    "offloaded": strategy("FULL_SHARD", cpu_offload=CPUOffload(offload_params=True)),
    "bf16 gradients kept": strategy(
        "FULL_SHARD", mixed_precision=MixedPrecision(BF16, keep_low_precision_grads=True)
    ),
    "by function": by_function,
    "root not kept": lambda comm: by_function(comm, reshard_after_forward=True),
    "from two neighbours in backward": lambda comm: by_function(comm, reshard_after_forward=2),
}


@pytest.mark.parametrize("name", SHARDED)
@on_ranks(WORLD)
def test_what_is_foreseen_is_sent(comm, name, sent_by):
    model = SHARDED[name](comm)
    unseen = communication(model)  # before the first forward has told who is the root
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    foreseen = communication(model)
    sent_by()
    with tracing(model) as trace:
        train(model)
    measured = sent_by()
    optimizer.step()
    counted = communication(model, trace).counted
    traced = [counted.gather_bytes, counted.reduce_bytes, counted.all_reduce_bytes]
    peak = memory_summary(model).rank.transient_bytes
    unseen, foreseen, traced_peak = as_list(unseen), as_list(foreseen), trace.peak_bytes
    assert foreseen == measured == unseen
    assert traced == measured
    assert sum(measured) > 0
    # The embedding's gradient, of the unit around all, comes last but is counted first.
    assert peak >= traced_peak > 0


@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
@on_ranks(WORLD)
def test_accumulation_without_sync_gathers_only(comm, name, sent_by):
    model = SHARDED[name](comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    found = []
    with model.no_sync():
        for _ in range(2):
            foreseen = as_list(communication(model))
            sent_by()
            train(model)
            found.append((foreseen, sent_by()))
    foreseen = as_list(communication(model))
    train(model)
    found.append((foreseen, sent_by()))
    within, again, last = found
    # The first one is recorded: nobody knows yet for what the last unit should stay.
    assert within[0] == again[0] == again[1]
    assert within[1][0] >= again[1][0]
    assert within[1][1:] == [0, 0]
    assert last[0] == last[1]
    assert sum(last[1][1:]) > 0


@on_ranks(2)
def test_frozen_units_in_front_have_no_backward(comm, sent_by):
    model = Stack(4)
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    for block in model.blocks:
        fully_shard(block, mesh=comm)
    fully_shard(model, mesh=comm)
    step(model)
    foreseen = communication(model)
    sent_by()
    step(model)
    measured = sent_by()
    assert as_list(foreseen) == measured
    assert foreseen.units["blocks.1"].gather_backward_bytes == 0


def test_who_communicates_by_hand_is_named():
    def body(comm):
        model = by_wrapper(comm)
        model.register_comm_hook(None, lambda state, full, shard: shard.zero_())
        found = communication(model)
        return found.not_counted, found.total.reduce_bytes, str(found)

    names, reduce_bytes, text = LocalWorld(2).run(body)[0]
    assert names == ("(root)", "blocks.0", "blocks.1")
    assert reduce_bytes == 0
    assert "not counted, as functions of yours do it: (root), blocks.0" in text


def test_a_trace_of_another_model_is_refused():
    trace = Trace([TraceRecord("gather", "layers.7", 0.0, 4, 4)])
    with pytest.raises(ConfigurationError, match=r"unit 'layers\.7'.*it is not sharded"):
        communication(nn.Linear(2, 2), trace)


# ---- memory -------------------------------------------------------------------------------------


LOW = "bf16 gradients kept"  # torch's AdamW does not take gradients of another dtype
RESTING = [(name, torch.optim.AdamW) for name in list(SHARDED)[::2] if name != LOW]
RESTING += [(name, torch.optim.SGD) for name in ("FULL_SHARD", LOW)]


@pytest.mark.parametrize(("name", "optimizer_class"), RESTING)
@on_ranks(WORLD)
def test_the_summary_is_what_rests(comm, name, optimizer_class):
    model = SHARDED[name](comm)
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    said = memory_summary(model)
    train(model)
    optimizer.step()
    summary, rest = memory_summary(model, optimizer), resting_bytes(model, optimizer)
    found = summary.rank
    assert (found.parameters_bytes, found.gradients_bytes) == (
        rest.parameters_bytes,
        rest.gradients_bytes,
    )
    assert found.optimizer_bytes == rest.optimizer_bytes
    assert summary.measured
    assert (found.optimizer_bytes == said.rank.optimizer_bytes) == (
        optimizer_class is torch.optim.AdamW
    )
    assert not said.measured
    assert found.at_rest_bytes == rest.total_bytes
    assert summary.unsharded == plain_bytes(optimizer_class)


def plain_bytes(optimizer_class):
    model = Model()
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    train(model)
    optimizer.step()
    found = memory_summary(model, optimizer)
    assert found.rank == found.unsharded
    rest = resting_bytes(model, optimizer)
    held = (found.rank.parameters_bytes, found.rank.gradients_bytes, found.rank.optimizer_bytes)
    assert held == (rest.parameters_bytes, rest.gradients_bytes, rest.optimizer_bytes)
    return found.unsharded


def test_a_plain_model_saves_nothing():
    summary = memory_summary(nn.Linear(3, 3))
    assert summary.savings == summary.peak_savings == 0
    assert summary.times_larger == 1
    assert communication(nn.Linear(3, 3)).total_bytes == 0


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_the_transient_peak_is_the_traces(comm, name, prefetch):
    chosen = ShardingStrategy[name]
    model = beside.shard(Stack(), comm, "wrapper", [nn.Sequential], sharding_strategy=chosen)
    set_prefetch(model, prefetch, prefetch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model, optimizer)
        optimizer.zero_grad()
    with tracing(model) as trace:
        step(model)
    foreseen, measured = memory_summary(model).rank.transient_bytes, trace.peak_bytes
    assert foreseen == measured


def test_savings_by_hand():
    def body(comm):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
        for layer in model:
            fully_shard(layer, mesh=comm)
        return memory_summary(fully_shard(model, mesh=comm))

    summary = LocalWorld(4).run(body)[0]
    total, counters = 8 * 64 * 64 * 4, 8 * 4
    assert summary.unsharded.at_rest_bytes == 4 * total + counters
    assert summary.rank.at_rest_bytes == total + counters
    assert summary.rank.transient_bytes == 4 * total // 8
    assert summary.times_larger == pytest.approx((4 * total + counters) / (total + counters))
    assert summary.savings == pytest.approx(1 - 1 / summary.times_larger)
    text = str(summary)
    assert "Saves 75.0% at rest" in text
    assert "4.00 times larger" in text
    assert "optimizer state (AdamW's)" in text


def test_memory_of_ranks_is_told_to_all():
    found = LocalWorld(3).run(memory_of_ranks)
    for each in found:
        assert [memory.rank for memory in each] == [0, 1, 2]
        for memory in each:
            # Ranks are threads of one process: its memory, within what it grows meanwhile.
            assert 50e6 < memory.host_rss_bytes <= memory.host_peak_rss_bytes
            assert memory.host_peak_rss_bytes < memory.host_total_bytes
        lines = str(each).splitlines()
        assert [line.split()[0] for line in lines[2:]] == ["0", "1", "2", "min", "max", "sum"]
        assert lines[-1].endswith("-")  # one host has no three times its memory
    assert found[0] == found[1] == found[2]


def test_memory_follows_what_is_allocated():
    before = memory_of_rank()
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    after = memory_of_rank()
    assert after.host_rss_bytes - before.host_rss_bytes == pytest.approx(block.nbytes, rel=0.1)
    assert after.host_peak_rss_bytes >= after.host_rss_bytes
    if not torch.cuda.is_available():
        assert after.device_allocated_bytes is None
        assert "no GPU" in str(after)


# ---- describe -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", [by_wrapper, by_function])
def test_describe_lists_everything_once(shard):
    def body(comm):
        before = describe(model := shard(comm))
        train(model)
        after = describe(model)
        assert before == after
        return after, {name: p.local.numel() for name, p in model.named_parameters()}

    plain = dict(Model().named_parameters())
    found = LocalWorld(3).run(body)
    for description, held in found:
        rows = {row.names[0]: row for row in description.parameters}
        assert list(rows) == list(plain)
        for name, row in rows.items():
            assert row.shape == tuple(plain[name].shape)
            assert row.full_bytes == plain[name].nbytes
            assert row.span.numel == held[name]
            assert row.bytes == 4 * held[name]
            assert row.unit == (name[:8] if name.startswith("blocks") else "(root)")
            assert row.trainable == plain[name].requires_grad
        assert rows["embed.weight"].names == ("embed.weight", "head.weight")
        assert description.numel == sum(param.numel() for param in plain.values())
        for unit in description.units:
            rests = sum(row.bytes for row in rows.values() if row.unit == unit.name)
            assert unit.shard_bytes == rests + unit.padding_bytes
            assert (unit.slices, unit.replicas) == (3, 1)
    for name, param in plain.items():
        spans = [{row.names[0]: row.span for row in d.parameters}[name] for d, _ in found]
        assert spans[0].start == 0
        assert spans[-1].stop == param.numel() or spans[-1].numel == 0
        assert sum(span.numel for span in spans) == param.numel()


def test_describe_reads_well():
    def body(comm):
        model = by_wrapper(
            beside.grid(comm),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            mixed_precision=MixedPrecision(BF16),
        )
        return str(describe(model))

    text = LocalWorld(WORLD).run(body)[0]
    lines = [line.split() for line in text.splitlines()]
    row = ["(root)", "embed.weight", "=", "head.weight", "10", "x", "37", "float32"]
    assert [*row, "[0,", "192)", "768"] in lines
    assert any("float32, frozen" in line for line in text.splitlines())
    unit = next(line for line in lines if line[:3] == ["blocks.0", "2", "2"])
    assert unit[-2:] == ["bfloat16", "cpu"]
    assert text.endswith("of padding.")


def test_what_is_not_sharded_is_told_too():
    def body(comm):
        model = Model()
        FullyShardedDataParallel(model.blocks[0], comm)
        return describe(model), memory_summary(model)

    # The block is sharded in place by the other door; the wrapper is not part of the model here.
    description, summary = LocalWorld(2).run(body)[0]
    rows = {row.names[0]: row for row in description.parameters}
    assert rows["embed.weight"].unit is None
    assert rows["embed.weight"].bytes == rows["embed.weight"].full_bytes
    assert "(not sharded)" in str(description)
    assert 1 < summary.times_larger < 2

    plain = describe(Model())
    assert plain.units == ()
    assert plain.bytes == plain.full_bytes


def test_ignored_parameters_are_whole():
    def body(comm):
        model = Model()
        wrapped = FullyShardedDataParallel(model, comm, ignored_modules=[model.blocks[0]])
        return describe(wrapped)

    rows = {row.names[0]: row for row in LocalWorld(2).run(body)[0].parameters}
    assert rows["blocks.0.0.weight"].unit is None
    assert rows["blocks.1.0.weight"].unit == "(root)"


def test_describe_is_for_between_steps():
    def body(comm):
        model = by_wrapper(comm)
        with summon_full_params(model):
            describe(model)

    with pytest.raises(UsageError, match="shows its full parameters"):
        LocalWorld(2).run(body)
