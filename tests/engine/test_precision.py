# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: equal, bit by bit, to the same arithmetic on one process."""

import pytest
import torch
from support.beside import params_of, shard
from support.models import Block, loss_of, make, make_batches, seeded
from support.threads import on_ranks
from torch import nn
from torch.distributed import fsdp

from fullshard.core.errors import ConfigurationError
from fullshard.testing import LocalWorld
from fullshard.torch import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    tracing,
)
from fullshard.torch.comm.protocol import rank_order_sum
from fullshard.torch.step.managed import managed_units

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 3


def reference(name, world, compute, reduce, *, replicas=1):
    """fp32 parameters, computed with in ``compute``; gradients added in rank order."""
    model = make(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in make_batches(name, STEPS, 2 * world):
        per_rank = []
        for rank in range(world):
            part = slice(2 * rank, 2 * rank + 2)
            low = {n: p.detach().to(compute).requires_grad_() for n, p in model.named_parameters()}
            x = inputs[part].to(compute) if inputs.is_floating_point() else inputs[part]
            loss_of(torch.func.functional_call(model, low, (x,)), targets[part]).backward()
            per_rank.append({n: p.grad.to(reduce) for n, p in low.items() if p.grad is not None})
        for param_name, param in model.named_parameters():
            grads = [
                each.get(param_name, torch.zeros_like(param, dtype=reduce)) for each in per_rank
            ]
            inner = world // replicas
            sums = []
            for first in range(0, world, inner):
                sums.append(torch.empty_like(grads[0]))
                before = 2.0 ** round(torch.log2(torch.tensor(world)).item() / 2)
                group = grads[first : first + inner]
                rank_order_sum([g / before for g in group] if reduce is FP16 else group, sums[-1])
            total = torch.empty_like(grads[0])
            rank_order_sum(sums, total)
            param.grad = total.float() / (world / before if reduce is FP16 else world)
        optimizer.step()
    return params_of(model)


def train(comm, model, name):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in make_batches(name, STEPS, 2 * comm.size):
        part = slice(2 * comm.rank, 2 * comm.rank + 2)
        loss_of(model(inputs[part]), targets[part]).backward()
        assert all(p.grad.dtype is FP32 for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.dtype is FP32 for p in model.parameters())
    return params_of(model)


def by_wrapper(comm, param, reduce, **options):
    options["mixed_precision"] = MixedPrecision(param, reduce)
    return shard(make("gpt"), comm, "wrapper", [Block], **options)


def by_function(comm, param, reduce, **options):
    options["mp_policy"] = MixedPrecisionPolicy(param, reduce)
    return shard(make("gpt"), comm, units=[Block], **options)


def check(world, compute, reduce, door, **options):
    """Bit by bit."""
    expected = reference("gpt", world, compute or FP32, reduce or compute)
    found = LocalWorld(world).run(
        lambda comm: train(comm, door(comm, compute, reduce, **options), "gpt")
    )
    torch.testing.assert_close(found[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize("door", [by_wrapper, by_function])
@pytest.mark.parametrize(
    ("param", "reduce"), [(BF16, None), (BF16, FP32), (None, BF16), (FP16, FP16)], ids=str
)
def test_equal_to_the_same_arithmetic(door, param, reduce):
    for world in (2, 3, 4):
        check(world, param, reduce, door)


@pytest.mark.parametrize(
    "options",
    [
        {"cpu_offload": CPUOffload(offload_params=True)},
        {"cpu_offload": CPUOffload(offload_optimizer=True)},
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
    ],
    ids=str,
)
def test_with_other_options(options):
    check(3, BF16, None, by_wrapper, **options)


def test_reshard_to_a_smaller_group_in_low_precision():
    check(4, BF16, None, by_function, reshard_after_forward=2)


def test_what_is_gathered_and_reduced_has_half_the_bytes():
    def body(comm, policy):
        model = fully_shard(nn.Linear(64, 64, bias=False), mesh=comm, mp_policy=policy)
        with tracing(model) as trace:
            model(torch.ones(1, 64)).float().sum().backward()
        return {record.op: record.bytes for record in trace.records}

    full = LocalWorld(2).run(lambda comm: body(comm, MixedPrecisionPolicy()))[0]
    half = LocalWorld(2).run(lambda comm: body(comm, MixedPrecisionPolicy(BF16)))[0]
    mixed = LocalWorld(2).run(lambda comm: body(comm, MixedPrecisionPolicy(BF16, FP32)))[0]
    assert full["gather"] == 2 * half["gather"] == 2 * mixed["gather"] == 4 * 64 * 64
    assert full["reduce"] == 2 * half["reduce"] == mixed["reduce"]


class Probe(nn.Module):
    """Notes the dtypes it sees."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.ones(4))
        self.seen = None

    def forward(self, x, *, also=None, index=None):
        self.seen = (x.dtype, also["y"].dtype, index.dtype, self.weight.dtype, self.scale.dtype)
        return {"out": x * self.weight, "index": index}


def probe(model, inner):
    y = model(torch.ones(4), also={"y": torch.ones(1)}, index=torch.zeros(1, dtype=torch.int64))
    return inner.seen, y["out"].dtype, y["index"].dtype


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Probe()
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x, **more):
        return self.inner(x.float(), **more)


def test_what_is_cast():
    def body(comm):
        found = {}
        inner = Probe()
        found["function"] = probe(
            fully_shard(inner, mesh=comm, mp_policy=MixedPrecisionPolicy(BF16, output_dtype=FP32)),
            inner,
        )
        inner = Probe()
        policy = MixedPrecisionPolicy(BF16, cast_forward_inputs=False)
        found["no cast"] = probe(fully_shard(inner, mesh=comm, mp_policy=policy), inner)
        inner = Probe()
        precision = MixedPrecision(BF16, buffer_dtype=FP16)
        found["wrapper"] = probe(
            FullyShardedDataParallel(inner, comm, mixed_precision=precision), inner
        )
        for name, cast in (("below the root", False), ("below the root, asked", True)):
            outer = Outer()
            inner = outer.inner
            wrapped = FullyShardedDataParallel(
                outer,
                comm,
                auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, Probe),
                mixed_precision=MixedPrecision(BF16, cast_forward_inputs=cast),
            )
            found[name] = probe(wrapped, inner)[0][0]
        return found

    found = LocalWorld(2).run(body)[0]
    int64 = torch.int64
    assert found["function"] == ((BF16, BF16, int64, BF16, FP32), FP32, int64)
    assert found["no cast"] == ((FP32, FP32, int64, BF16, FP32), FP32, int64)
    assert found["wrapper"] == ((BF16, BF16, int64, BF16, FP16), BF16, int64)
    assert found["below the root"] is FP32
    assert found["below the root, asked"] is BF16


def test_classes_to_ignore_compute_in_full_precision():
    def body(comm):
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)))
        seen = []
        norm = model[1]
        norm.register_forward_hook(
            lambda m, args, out: seen.append((args[0].dtype, m.weight.dtype))
        )
        wrapped = FullyShardedDataParallel(
            model,
            comm,
            auto_wrap_policy=lambda module, recurse, **_: recurse,
            mixed_precision=MixedPrecision(BF16),
        )
        out = wrapped(torch.randn(3, 4))
        out.float().sum().backward()
        return seen, out.dtype, norm.running_mean.dtype, wrapped.module[1].weight.grad.dtype

    assert LocalWorld(2).run(body)[0] == ([(FP32, FP32)], BF16, FP32, FP32)


def test_a_unit_may_have_its_own_policy():
    def body(comm):
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)))
        seen = []
        for layer in model:
            layer.register_forward_hook(
                lambda m, args, out: seen.append((m.weight.dtype, out.dtype))
            )
        low = MixedPrecisionPolicy(BF16)
        fully_shard(model[1], mesh=comm, mp_policy=MixedPrecisionPolicy(FP32, output_dtype=BF16))
        model = fully_shard(model, mesh=comm, mp_policy=low)
        model(torch.randn(2, 4)).float().sum().backward()
        return seen

    # the layer's own hook runs before the unit's, which casts its output
    assert LocalWorld(2).run(body)[0] == [(BF16, BF16), (FP32, FP32), (BF16, BF16)]


@on_ranks(2)
def test_low_precision_gradients_are_kept_if_asked(comm):
    precision = MixedPrecision(BF16, keep_low_precision_grads=True)
    model = FullyShardedDataParallel(make("twice"), comm, mixed_precision=precision)
    for _ in range(2):
        model(torch.ones(2, 5)).float().sum().backward()
    dtypes = {p.grad.dtype for p in model.parameters()}
    for param in model.parameters():
        param.grad = param.grad.to(FP32)
    assert dtypes == {BF16}


@on_ranks(2)
def test_gradients_held_back_add_up_in_the_reduce_dtype(comm):
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model = fully_shard(model, mesh=comm, mp_policy=MixedPrecisionPolicy(BF16, FP32))
    model.set_requires_gradient_sync(False)
    model(torch.full((1, 1), 256.0)).float().sum().backward()
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 1)).float().sum().backward()
    assert model.weight.grad.full_tensor().item() == 257.0  # in bf16 it would be 256


@on_ranks(2)
def test_a_low_precision_model_rests_in_low_precision(comm):
    model = shard(make("gpt", BF16), comm, units=[Block])
    assert {p.dtype for p in model.parameters()} == {BF16}


@on_ranks(1)
def test_pytorchs_own_options_are_taken(comm):
    wrapper = FullyShardedDataParallel(
        nn.Linear(2, 2),
        comm,
        mixed_precision=fsdp.MixedPrecision(BF16),
        cpu_offload=fsdp.CPUOffload(offload_params=True),
    )
    policies = fsdp.MixedPrecisionPolicy(BF16), fsdp.CPUOffloadPolicy(pin_memory=False)
    module = fully_shard(
        nn.Linear(2, 2), mesh=comm, mp_policy=policies[0], offload_policy=policies[1]
    )
    for model in (wrapper, module):
        (managed,) = managed_units(model)
        assert managed.unit.plan.precision.compute == "bfloat16"
        assert managed.unit.plan.offload.params


@on_ranks(1)
def test_dtypes_that_are_none_are_refused(comm):
    for dtype in (torch.int32, "bf16", torch.float8_e4m3fn):
        with pytest.raises(ConfigurationError, match=r"mp_policy\.param_dtype must be a float"):
            fully_shard(nn.Linear(2, 2), mesh=comm, mp_policy=MixedPrecisionPolicy(dtype))
        with pytest.raises(ConfigurationError, match=r"mixed_precision\.reduce_dtype must be"):
            FullyShardedDataParallel(
                nn.Linear(2, 2), comm, mixed_precision=MixedPrecision(reduce_dtype=dtype)
            )
