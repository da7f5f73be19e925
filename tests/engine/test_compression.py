# SPDX-License-Identifier: Apache-2.0
"""Compressed gathers and reduces: equal weights on all ranks, exact shards, sums that add up."""

from functools import partial

import pytest
import torch
from support.beside import grid, params_of
from support.models import place_of, seeded
from support.tensor_classes import Halved
from support.threads import on_ranks
from torch import nn

from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.testing import LocalComm, LocalWorld
from fullshard.torch import (
    CommunicationCompression,
    FullyShardedDataParallel,
    ShardedGradScaler,
    ShardingStrategy,
    fully_shard,
    resting_bytes,
    summon_full_params,
)
from fullshard.torch.comm.checked import CheckedComm
from fullshard.torch.comm.codecs import BlockCodec, CastCodec, decode, encode
from fullshard.torch.comm.compressed import CompressedComm
from fullshard.torch.comm.protocol import Comm, members_of, rank_order_sum
from fullshard.torch.inspection.traffic import communication
from fullshard.torch.step.managed import managed_units

WIDTH = 64


def stack():
    return seeded(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))))


def shard_stack(comm, compression, **options):
    model = stack()
    for layer in model:
        fully_shard(layer, mesh=comm, compression=compression, **options)
    return fully_shard(model, mesh=comm, compression=compression, **options)


def inputs_of(rank):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))


def train(comm, choice, steps=3, **options):
    """Losses, and the whole parameters afterwards."""
    model = shard_stack(comm, choice, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank, _ = place_of(comm)
    losses = []
    for _ in range(steps):
        loss = model(inputs_of(rank)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, params_of(model)


GATHERS = ("bf16", "int8", "fp8")
CHOICES = [
    {"gather": "bf16", "reduce": "bf16"},
    {"gather": "int8", "reduce": "int8"},
    {"gather": "fp8", "reduce": "int8", "error_feedback": True, "block_numel": 64},
    {"gather": "int8"},
    {"reduce": "bf16", "error_feedback": True},
]
INT8 = CommunicationCompression("int8", "int8", block_numel=32)


def random(numel, rank, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def rounded(numbers, kind, block=32):
    """What comes out where ``numbers`` went in, as a message of their own."""
    codecs = {"bf16": CastCodec(), "int8": BlockCodec(block), "fp8": BlockCodec(block, FP8)}
    codec, rows = codecs[kind], numbers.float().view(1, -1)
    message = torch.empty(1, codec.message_bytes(numbers.numel()), dtype=torch.uint8)
    encode(codec, rows, message)
    out = torch.empty_like(rows)
    decode(codec, message, out)
    return out.view(-1).to(numbers.dtype)


FP8 = torch.float8_e4m3fn


# ---- the communicator ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GATHERS)
@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_gather_the_same_bits(kind, world):
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.float64)

    def body(comm):
        compressed = CompressedComm(comm, CommunicationCompression(kind, block_numel=32))
        assert isinstance(compressed, Comm)
        shards = [(100 * random(70 + n, comm.rank)).to(d) for n, d in enumerate(dtypes)]
        before = [shard.clone() for shard in shards]
        pairs = [(s.new_zeros(world * s.numel()), s) for s in shards]
        work = compressed.all_gather(pairs, "a gather")
        assert not work.is_completed()
        work.wait()
        work.wait()  # as often as one likes
        assert work.is_completed()
        assert all(torch.equal(a, b) for a, b in zip(shards, before, strict=True))
        return [full for full, _ in pairs], before

    results = LocalWorld(world).run(body)
    for number, dtype in enumerate(dtypes):
        fulls = [result[0][number] for result in results]
        assert all(torch.equal(fulls[0], full) for full in fulls)
        shards = [result[1][number] for result in results]
        travels_small = dtype is torch.float32 or (dtype is torch.bfloat16 and kind != "bf16")
        expected = [rounded(s, kind) if travels_small else s for s in shards]
        assert torch.equal(fulls[0], torch.cat(expected))
        assert travels_small != torch.equal(fulls[0], torch.cat(shards))


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_reduces_add_in_rank_order_and_own_parts_exactly(kind):
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float32)

    def body(comm):
        fulls = [random(3 * (40 + n), comm.rank, d) for n, d in enumerate(dtypes)]
        pairs = [(full.new_zeros(full.numel() // 3), full) for full in fulls]
        compressed = CompressedComm(comm, CommunicationCompression(None, kind, block_numel=32))
        compressed.reduce_scatter(pairs, "a reduce").wait()
        return [shard for shard, _ in pairs], [full.view(3, -1) for full in fulls]

    results = LocalWorld(3).run(body)
    for number, dtype in enumerate(dtypes):
        travels_small = dtype is torch.float32 or (dtype is torch.bfloat16 and kind == "int8")
        for place in range(3):
            parts = [result[1][number][place] for result in results]
            if travels_small:
                parts = [p if r == place else rounded(p.float(), kind) for r, p in enumerate(parts)]
            wide = torch.float64 if dtype is torch.float64 else torch.float32
            expected = torch.empty(parts[0].shape, dtype=wide)
            rank_order_sum([part.to(wide) for part in parts], expected)
            assert torch.equal(results[place][0][number], expected.to(dtype))


@on_ranks(2, eager=True)
def test_works_complete_when_they_are_complete(comm):
    compressed = CompressedComm(comm, INT8)
    full = torch.ones(comm.size * 32)
    work = compressed.reduce_scatter([(torch.empty(32), full)])
    assert compressed.all_gather([(full.clone(), torch.ones(32))]).is_completed()
    assert work.is_completed()


def test_what_is_left_to_the_communicator():
    def body(comm):
        compressed = CompressedComm(comm, INT8)
        total, sent = torch.tensor([0.1]), torch.tensor([float(comm.rank)])
        compressed.all_reduce([total]).wait()
        compressed.broadcast([sent], source=1).wait()
        assert members_of(compressed) == comm.members
        assert isinstance(compressed.duplicate(), CompressedComm)
        pairs = [(torch.empty(2), torch.tensor([1.234]))]
        compressed.block(2).all_gather(pairs).wait()
        return total.item(), sent.item(), pairs[0][0].tolist()

    once = torch.tensor(0.1)
    expected = (once + once).item(), 1.0, [torch.tensor(1.234).item()] * 2
    assert LocalWorld(2).run(body) == [expected] * 2


# ---- error feedback -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_with_feedback_sums_over_steps_add_up(kind):
    """A gradient that stays the same is rounded alike each time, unless the rest is carried on."""
    steps, numel = 50, 96

    def body(comm, feedback):
        choice = CommunicationCompression(None, kind, 32, error_feedback=feedback)
        compressed, total = CompressedComm(comm, choice), torch.zeros(numel, dtype=torch.float64)
        full = torch.cat([random(numel, comm.rank)] * comm.size)
        for _ in range(steps):
            shard = torch.empty(numel)
            compressed.reduce_scatter([(shard, full)]).wait()
            total += shard
        return total

    exact = steps * sum(random(numel, rank).double() for rank in range(3))
    lost = [(t - exact).abs() for t in LocalWorld(3).run(partial(body, feedback=False))]
    kept = [(t - exact).abs() for t in LocalWorld(3).run(partial(body, feedback=True))]
    # Two ranks' parts are rounded; what is left of each after the last step is one rounding.
    largest = max(random(numel, rank).abs().max() for rank in range(3))
    one_rounding = largest * (2.0**-8 if kind == "bf16" else 1 / 254)
    for each in kept:
        assert each.max() < 2 * 1.5 * one_rounding
    assert min(each.max() for each in lost) > 10 * one_rounding


# ---- training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_training_comes_close(choice):
    def run(compression):
        return LocalWorld(3).run(lambda comm: train(comm, compression))

    compressed = run(CommunicationCompression(**choice))
    for (losses, params), (exact_losses, exact) in zip(compressed, run(None), strict=True):
        assert losses != exact_losses
        assert losses == pytest.approx(exact_losses, rel=0.05)
        for name, param in params.items():
            # AdamW moves each number by its rate a step, whichever way.
            assert (param - exact[name]).abs().max() <= 2 * 3 * 1.01e-2
            assert (param - exact[name]).abs().mean() < 2e-3


@pytest.mark.parametrize("gather", GATHERS)
def test_shards_stay_exact_and_forwards_use_rounded_ones(gather):
    plain = stack()

    def body(comm):
        compression = CommunicationCompression(gather, "int8", block_numel=32)
        model = shard_stack(comm, compression)
        with torch.no_grad():
            outputs = [model(inputs_of(0)) for _ in range(5)]
        model(inputs_of(comm.rank)).sum().backward()
        for name, exact in plain.state_dict().items():
            assert torch.equal(model.state_dict()[name].full_tensor(), exact)
            assert torch.equal(model.get_parameter(name).full_tensor(), exact)
        with summon_full_params(model):
            assert all(
                torch.equal(p, exact)
                for p, exact in zip(model.parameters(), plain.parameters(), strict=True)
            )
        assert all(torch.equal(each, outputs[0]) for each in outputs)
        return outputs[0]

    found = LocalWorld(2).run(body)
    assert torch.equal(found[0], found[1])  # equal weights, so equal outputs
    exact = plain(inputs_of(0)).detach()
    assert not torch.equal(found[0], exact)
    torch.testing.assert_close(found[0], exact, rtol=0.05, atol=0.05)


def test_hybrid_sharding_compresses_within_the_group():
    def body(comm, compression):
        return train(grid(comm), compression)

    def train(pair, compression):
        model = shard_stack(pair, compression)
        model(inputs_of(0)).square().sum().backward()
        units = [managed.unit for managed in managed_units(model)]
        assert all(unit.ranks.replicas is not unit.ranks.reduce for unit in units)
        return [p.grad.full_tensor() for p in model.parameters()]

    exact = LocalWorld(4).run(partial(body, compression=None))
    for grads, exact_grads in zip(
        LocalWorld(4).run(partial(body, compression=INT8)), exact, strict=True
    ):
        for grad, other in zip(grads, exact_grads, strict=True):
            assert 0 < (grad - other).abs().max() < 0.05 * other.abs().max()


def test_one_rank_compresses_nothing():
    model = shard_stack(LocalComm(LocalWorld(1), [0], 0), INT8)
    assert torch.equal(model(inputs_of(0)), stack()(inputs_of(0)))


class WithAnEmptyOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 4, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, inputs):
        return inputs * self.scale + self.none.sum()


@on_ranks(2)
def test_parameters_without_elements_have_nothing_to_round(comm):
    model = fully_shard(WithAnEmptyOne(), mesh=comm, compression=INT8)
    model(torch.ones(3)).sum().backward()
    assert model.scale.grad.full_tensor().tolist() == [1.0] * 3


def test_in_debug_mode():
    losses = [
        LocalWorld(2).run(lambda comm, wrap=wrap: train(wrap(comm), INT8)[0])
        for wrap in (lambda comm: comm, CheckedComm)
    ]
    assert losses[0] == losses[1]


# ---- what is not finite -------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("reduce", ["int8", "bf16"])
@on_ranks(3)
def test_a_bad_gradient_is_seen_and_leaves_nothing_behind(comm, bad, reduce):
    choice = CommunicationCompression("int8", reduce, 32, error_feedback=True)
    model = shard_stack(comm, choice)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device="cpu", init_scale=4.0, process_group=comm)
    scales, norms = [], []
    for step in range(3):
        before = [p.full_tensor().clone() for p in model.parameters()]
        inputs = inputs_of(comm.rank)
        if step == 1 and comm.rank == 1:
            inputs[0, 0] = bad
        scaler.scale(model(inputs).square().mean()).backward()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
        after = [p.full_tensor() for p in model.parameters()]
        moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert moved == [step != 1] * len(moved)
    finite = torch.tensor(norms).isfinite().tolist()
    assert scales == [4.0, 2.0, 2.0]
    assert finite == [True, False, True]


# ---- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_foreseen_traffic_is_what_is_sent(choice, sent):
    def body(comm):
        model = shard_stack(comm, CommunicationCompression(**choice))
        for _ in range(3):
            sent.pop(f"rank {comm.rank}", None)
            model(inputs_of(comm.rank)).sum().backward()
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(1e-3)
        return communication(model).total_bytes

    assert LocalWorld(4).run(body)[0] == sent["rank 0"].total()


def test_residuals_rest():
    def body(comm, feedback):
        choice = CommunicationCompression(None, "int8", error_feedback=feedback)
        model = shard_stack(comm, choice)
        model(inputs_of(comm.rank)).sum().backward()
        return resting_bytes(model, torch.optim.SGD(model.parameters())).gradients_bytes

    without, with_it = (LocalWorld(4).run(partial(body, feedback=f))[0] for f in (False, True))
    assert with_it - without == without * 3 / 2  # three slices of bf16 beside one of fp32


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "compresses nothing"),
        ({"gather": "int4"}, "gather must be one of bf16, int8, fp8 or None, got 'int4'"),
        ({"reduce": "fp8"}, "reduce must be one of bf16, int8 or None"),
        ({"gather": "int8", "block_numel": 100}, "multiple of 32 up to 65,536, got 100"),
        ({"gather": "int8", "block_numel": 0}, "block_numel"),
        ({"gather": "int8", "block_numel": 2**17}, "block_numel"),
        ({"gather": "int8", "error_feedback": True}, "name reduce, too"),
    ],
)
def test_choices_that_cannot_be(options, message):
    with pytest.raises(ConfigurationError, match=message):
        CommunicationCompression(**options)


def test_doors_refuse_what_is_no_compression():
    solo = LocalComm(LocalWorld(1), [0], 0)
    with pytest.raises(ConfigurationError, match="must be a CommunicationCompression or None"):
        fully_shard(nn.Linear(2, 2), mesh=solo, compression="int8")
    with pytest.raises(ConfigurationError, match="must be a CommunicationCompression or None"):
        FullyShardedDataParallel(nn.Linear(2, 2), solo, compression="int8")


@on_ranks(2)
def test_sums_over_replicas_alone_cannot_be_compressed(comm):
    hybrid = (comm.subgroup([comm.rank]), comm)
    for where, strategy in ((comm, "NO_SHARD"), (hybrid, "HYBRID_SHARD")):
        model = stack()
        with pytest.raises(ConfigurationError, match="only sum gradients by an all-reduce"):
            FullyShardedDataParallel(model, where, ShardingStrategy[strategy], compression=INT8)
        assert type(model[0].weight) is nn.Parameter


@on_ranks(2)
def test_ranks_that_choose_differently_are_told(comm):
    choice = CommunicationCompression("int8", block_numel=32 * (1 + comm.rank))
    model = stack()
    with pytest.raises(ConfigurationError, match=r"numel=32, .* on rank 0; .*=64, .* on rank 1"):
        fully_shard(model, mesh=comm, compression=choice)
    assert type(model) is nn.Sequential


@on_ranks(2)
def test_what_decides_itself_what_is_gathered_is_not_compressed(comm):
    model = nn.Linear(8, 8, bias=False)
    model.weight = nn.Parameter(Halved(torch.ones(8, 8)))
    with pytest.raises(NotSupportedError, match=r"choose themselves .*\['weight'\]"):
        fully_shard(model, mesh=comm, compression=INT8)
    assert type(model) is nn.Linear
