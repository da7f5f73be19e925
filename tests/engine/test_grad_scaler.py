# SPDX-License-Identifier: Apache-2.0
"""Scaled losses: an inf or NaN that one rank alone can see is found by all, as in one process."""

import inspect
import itertools
import math

import pytest
import torch
from support.beside import params_of
from support.models import loss_of, make, make_batches, place_of
from support.threads import on_ranks
from support.training import shard
from support.world import on_processes
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchsScaler

from fullshard.testing import LocalWorld
from fullshard.torch import MixedPrecisionPolicy, ShardedGradScaler, fully_shard
from fullshard.torch.tensor.parameter import ShardedParameter

DTYPE = torch.float64
INIT_SCALE = 2.0**10


def train(model, name, batches, *, spoil, scaler, max_norm=None, **options):
    """The scales after steps of AdamW, and the parameters; ``spoil(step, model)`` comes first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    scales = []
    for step, (inputs, targets) in enumerate(batches):
        scaler.scale(loss_of(model(inputs), targets)).backward()
        spoil(step, model)
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, params_of(model)


def train_plain(name, steps, world, **how):
    return train(make(name, DTYPE), name, make_batches(name, steps, 2 * world, DTYPE), **how)


def train_sharded(comm, name, steps, door="function", **how):
    rank, size = place_of(comm)
    model = shard(make(name, DTYPE), name, comm, door=door)
    part = slice(2 * rank, 2 * rank + 2)
    batches = [(x[part], y[part]) for x, y in make_batches(name, steps, 2 * size, DTYPE)]
    return train(model, name, batches, **how)


def spoil_nothing(step, model):
    pass


FORMS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
STEPS = 5


def scaler(kind=torch.amp.GradScaler, **options):
    return kind("cpu", init_scale=INIT_SCALE, growth_interval=2, **options)


def spoil_last_element(bad, step_to_spoil=1):
    """Makes the last element of the last parameter bad, which in a sharded model one rank holds."""

    def spoil(step, model):
        *_, last = model.parameters()
        if step != step_to_spoil:
            return
        if isinstance(last.grad, ShardedParameter):
            span = last.grad.span
            if span.start <= last.numel() - 1 < span.stop:
                last.grad.local[-1] = bad
        else:
            last.grad.view(-1)[-1] = bad

    return spoil


@pytest.mark.parametrize(
    ("bad", "form", "max_norm"),
    [
        (math.inf, "for-loop", None),
        (-math.inf, "foreach", None),
        (math.nan, "fused", None),
        (math.inf, "fused", 0.05),
        (math.nan, "foreach", 0.05),
    ],
)
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ShardedGradScaler])
def test_a_bad_element_of_one_rank_skips_the_step_on_all(kind, bad, form, max_norm):
    how = {"spoil": spoil_last_element(bad), "max_norm": max_norm, **FORMS[form]}
    plain = train_plain("nested", STEPS, 3, scaler=scaler(), **how)
    # bad step 1: halved; steps 2 and 3 are good: doubled
    assert plain[0] == [INIT_SCALE * f for f in (1, 0.5, 0.5, 1, 1)]

    def body(comm):
        group = {"process_group": comm} if kind is ShardedGradScaler else {}
        return train_sharded(comm, "nested", STEPS, scaler=scaler(kind, **group), **how)

    for run in LocalWorld(3).run(body):
        torch.testing.assert_close(run, plain, rtol=0, atol=1e-9)


@pytest.mark.parametrize("door", ["wrapper", "function"])
def test_gloo_processes(gloo_world, door):
    how = {"door": door, "scaler": scaler(), "spoil": spoil_nothing, "max_norm": 0.05}
    plain = train_plain("gpt", 3, 2, scaler=scaler(), spoil=spoil_nothing, max_norm=0.05)
    for run in gloo_world.run(2, train_sharded, "gpt", 3, **how):
        torch.testing.assert_close(run, plain, rtol=0, atol=1e-9)


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_of_two_optimizers_only_the_one_with_a_bad_gradient_skips(comm, fused):
    model = shard(make("twice"), "twice", comm)
    shared, last = list(model.shared.parameters()), list(model.last.parameters())
    before = [p.full_tensor() for p in (*shared, *last)]
    optimizers = [torch.optim.SGD(each, lr=0.1, fused=fused) for each in (shared, last)]
    scale = scaler()
    scale.scale(model(torch.ones(2, 5)).square().sum()).backward()
    if comm.rank == 0:
        shared[0].grad.local[0] = math.inf
    for optimizer in optimizers:
        scale.step(optimizer)
    scale.update()
    after = [p.full_tensor() for p in (*shared, *last)]
    assert scale.get_scale() == INIT_SCALE / 2
    assert list(map(torch.equal, before, after)) == [True, True, False, False]


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=["fp16 sums", "fp32 sums"])
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ShardedGradScaler])
def test_fp16_training_finds_a_scale_that_fits(kind, reduce_dtype):
    """From a scale that overflows on every rank down to one that trains, back up, and again."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=reduce_dtype)
    names = [f"blocks.{i}" for i in range(2)]
    data = make_batches("gpt", 1, 4)

    def body(comm):
        model = make("gpt")
        for path in names:
            fully_shard(model.get_submodule(path), mesh=comm, mp_policy=policy)
        fully_shard(model, mesh=comm, mp_policy=policy)
        group = {"process_group": comm} if kind is ShardedGradScaler else {}
        scale = kind("cpu", init_scale=2.0**24, growth_interval=4, **group)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ((inputs, targets),) = data
        part = slice(2 * comm.rank, 2 * comm.rank + 2)
        scales, losses = [], []
        for _ in range(16):
            loss = loss_of(model(inputs[part]).float(), targets[part])
            scale.scale(loss).backward()
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()
            scales.append(scale.get_scale())
            losses.append(loss.item())
        return scales, losses

    (scales, losses), (others, _) = LocalWorld(2).run(body)
    assert scales == others
    changes = [after / before for before, after in itertools.pairwise(scales)]
    assert set(changes) == {0.5, 1.0, 2.0}
    assert losses[1] == losses[0], "the first step must have been skipped"
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ShardedGradScaler])
def test_ranks_with_parameters_of_their_own(kind, fused):
    """Stages of a pipeline, say: only the sharded scaler keeps back those with good gradients."""

    def body(comm):
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
        scale = scaler(kind, **({"process_group": comm} if kind is ShardedGradScaler else {}))
        scale.scale(weight.sum()).backward()
        if comm.rank == 1:
            weight.grad[0] = math.nan
        scale.step(optimizer)
        scale.update()
        return scale.get_scale(), weight.tolist()

    skipped, stepped = (INIT_SCALE / 2, [1.0, 1.0]), (INIT_SCALE, [0.0, 0.0])
    assert LocalWorld(2).run(body) == [skipped if kind is ShardedGradScaler else stepped, skipped]


@on_processes(4)
def test_the_sharded_scaler_sees_what_ranks_do_not_share(group):
    """By default over all processes, also those that have no gradients: one of them has."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    if group.rank() == 3:
        weight.grad = torch.tensor([1.0, float("inf"), 1.0])
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert weight.tolist() == [1.0] * 3


def test_the_sharded_scaler_has_the_signature_of_torchs():
    ours, theirs = (
        inspect.signature(each).parameters for each in (ShardedGradScaler, TorchsScaler)
    )
    assert [(p.name, p.default) for p in ours.values()] == [
        (p.name, p.default) for p in theirs.values()
    ]
