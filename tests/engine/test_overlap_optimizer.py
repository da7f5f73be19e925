# SPDX-License-Identifier: Apache-2.0
"""Steps in backward: bit by bit the ordinary ones, with few gradients alive, or refused."""

import copy
import gc
import threading
import weakref
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from support.beside import grid, shard
from support.limits import PEERS_S
from support.models import GPT, Block, seeded
from support.threads import on_ranks
from torch import nn

from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.testing import LocalWorld
from fullshard.torch import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    ShardedParameter,
    clip_grad_norm_,
    fully_shard,
    resting_bytes,
)
from fullshard.torch.optim import overlap_optimizer
from fullshard.torch.step.managed import managed_units

STEPS = 2


@pytest.fixture(scope="module")
def plain():
    return seeded(lambda: GPT(width=32, blocks=3, tied=True))


def function(comm, model, **options):
    return shard(model, comm, units=[Block], **options)


def wrapper(comm, model, **options):
    return shard(model, comm, "wrapper", [Block], **options)


def copy_of(plain):
    model = GPT(width=32, blocks=3, tied=True)
    model.load_state_dict(plain.state_dict())
    return model


def backward(model, number=0, rank=0):
    generator = torch.Generator().manual_seed(100 * number + rank)
    tokens = torch.randint(17, (2, 9), generator=generator)
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, -2), tokens[:, 1:].flatten()).backward()


def in_groups(model):
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() > 1]},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]


def train(model, optimizer, rank, micro_batches):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(STEPS):
        for number in range(micro_batches):
            last = number == micro_batches - 1
            if isinstance(model, FullyShardedDataParallel):
                with nullcontext() if last else model.no_sync():
                    backward(model, step * micro_batches + number, rank)
            else:
                model.set_requires_gradient_sync(last)
                backward(model, step * micro_batches + number, rank)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [param.full_tensor() for param in model.parameters()]


CASES = {
    "function": (2, function, {}),
    "wrapper": (3, wrapper, {}),
    "one rank": (1, function, {}),
    "resharded late": (2, function, {"reshard_after_forward": False}),
    "offloaded": (2, function, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "hybrid": (4, lambda comm, model: function(grid(comm), model), {}),
}
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=0.1, amsgrad=True),
    "adamw-fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "sgd-foreach": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
}


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("function", "adamw-fused"),
        ("function", "adamw"),
        *((case, "sgd-foreach") for case in CASES),
    ],
)
def test_the_values_are_those_of_ordinary_steps(plain, case, name):
    (world, door, options), make = CASES[case], OPTIMIZERS[name]

    def body(comm):
        results = []
        for overlapped in (False, True):
            model = door(comm, copy_of(plain), **options)
            optimizer = make(in_groups(model))
            if overlapped:
                overlap_optimizer(model, optimizer)
            micro_batches = 2 if make.func is torch.optim.SGD else 1
            results.append(train(model, optimizer, comm.rank, micro_batches))
            state = [optimizer.state[param] for param in model.parameters()]
            results[-1] += [
                value.full_tensor() if isinstance(value, ShardedParameter) else value
                for each in state
                for value in each.values()
            ]
        assert len(results[0]) == len(results[1])
        assert all(map(torch.equal, *results))

    LocalWorld(world).run(body)


def test_a_unit_that_is_called_in_a_loop_is_not_changed_while_it_is_gathered():
    def body(comm):
        layers = [nn.Linear(8, 8) for _ in range(3)]
        for layer in layers:
            for param in layer.parameters():
                nn.init.constant_(param, 0.1)
        model = nn.Sequential(*(layer for layer in layers for _ in range(3)))
        for layer in layers:
            fully_shard(layer, mesh=comm)
        fully_shard(model, mesh=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        overlap_optimizer(model, optimizer)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        return [param.full_tensor() for param in model.parameters()]

    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    for param in model.parameters():
        nn.init.constant_(param, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.Sequential(*(layer for layer in model for _ in range(3)))(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    for found in LocalWorld(2).run(body):
        for value, param in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(value, param.detach())


@on_ranks(2)
def test_few_gradients_are_alive_together(comm, plain):
    model = function(comm, copy_of(plain))
    optimizer = torch.optim.AdamW(model.parameters())
    alive, most = [], [0]

    def count():
        grads = (param.grad for param in model.parameters())
        alive.extend(weakref.ref(g.local) for g in grads if type(g) is ShardedParameter)
        held = {id(local): local.nbytes for each in alive if (local := each()) is not None}
        most[0] = max(most[0], sum(held.values()))

    def most_alive():
        most[0] = 0
        backward(model)
        return most[0]

    units = list(managed_units(model))
    for managed in units:
        managed.unit.settings.on_delivered.append(count)
    sizes = [sum(param.local.nbytes for param in m.unit.sharded) for m in units]
    assert most_alive() == sum(sizes)
    optimizer.step()
    optimizer.zero_grad()
    overlap_optimizer(model, optimizer)
    assert 0 < most_alive() <= max(sizes)
    assert resting_bytes(model, optimizer).gradients_bytes == 0
    optimizer.step()
    assert all(param.grad is None for param in model.parameters())


def test_what_rests_on_the_host_is_stepped_by_a_thread(plain, monkeypatch):
    """No CPU rank has such units: their place is feigned, and their copies are there."""
    module = import_module("fullshard.torch.optim.overlap_optimizer")
    monkeypatch.setattr(module, "_rests_elsewhere", lambda unit: True)
    make = module.FilledStep.make
    names = []

    def recorded(step):
        names.append(threading.current_thread().name)
        make(step)

    monkeypatch.setattr(module.FilledStep, "make", recorded)

    def body(comm):
        expected = function(comm, copy_of(plain))
        ordinary = torch.optim.AdamW(in_groups(expected), lr=0.1)
        model = function(comm, copy_of(plain))
        optimizer = torch.optim.AdamW(in_groups(model), lr=0.1)
        overlap_optimizer(model, optimizer)
        params, units = list(model.parameters()), [m.unit for m in managed_units(model)]
        # In the root of one rank runs of small spans go on to its only matrix.
        parts = [len(module._halves(unit.sharded)) for unit in units]
        assert parts[1:] == [2] * (len(units) - 1)
        for number in range(4):
            for each in (expected, model):
                backward(each, number, comm.rank)
            assert sum("used in" in repr(param.grad) for param in params) == len(params)
            assert [waiting(unit) for unit in units] == [each * bool(number) for each in parts]
            assert not any(number and "local" in vars(param) for param in params)
            for each in (ordinary, optimizer):
                each.step()
                each.param_groups[0]["lr"] *= 0.5  # not for what waits
                each.zero_grad()
            if number == 2:
                assert torch.equal(*(m.norm.weight.full_tensor() for m in (expected, model)))
        assert all(map(torch.equal, wholes(model), wholes(expected)))
        return sum(parts)

    counts = LocalWorld(2).run(body)
    assert len(names) == 3 * sum(counts)  # after the first step
    assert all(name.startswith("fullshard-updates") for name in names)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_a_thread_rounds_as_ordinary_steps_do_where_spans_end_in_zeros(make, monkeypatch):
    """A run that goes on over the zeros is cut nowhere: its end would be computed otherwise."""
    module = import_module("fullshard.torch.optim.overlap_optimizer")
    monkeypatch.setattr(module, "_rests_elsewhere", lambda unit: True)
    plain = seeded(lambda: nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40)))

    def body(comm, overlapping):
        model = fully_shard(copy.deepcopy(plain), mesh=comm)
        momentum = {"momentum": 0.9, "nesterov": True} if make is torch.optim.SGD else {}
        vectors = [param for param in model.parameters() if param.dim() < 2]
        optimizer = make(vectors, lr=0.05, fused=True, **momentum)
        if overlapping:
            overlap_optimizer(model, optimizer)
        for number in range(9):
            x = torch.randn(3, 40, generator=torch.Generator().manual_seed(number))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        states = [each for param in vectors for each in optimizer.state[param].values()]
        return wholes(model) + [each.full_tensor() for each in states if each.dim()]

    results = [LocalWorld(2).run(partial(body, overlapping=each))[0] for each in (False, True)]
    assert all(map(torch.equal, *results))


def test_an_error_of_the_thread_comes_up_where_the_unit_is_used(plain, monkeypatch):
    module = import_module("fullshard.torch.optim.overlap_optimizer")
    monkeypatch.setattr(module, "_rests_elsewhere", lambda unit: True)

    def body(comm):
        model, optimizer = overlapped(comm, plain)
        backward(model)
        optimizer.step()
        optimizer.param_groups[0]["eps"] = None
        backward(model)
        optimizer.step()
        units = [managed.unit for managed in managed_units(model)]
        for unit in units:
            with pytest.raises(TypeError, match=r"eps|NoneType") as caught:
                unit.catch_up()
            assert any("the step of unit" in note for note in caught.value.__notes__)
        assert not any(waiting(unit) for unit in units)  # both halves of each
        optimizer.param_groups[0]["eps"] = 1e-8
        backward(model)

    LocalWorld(2).run(body)


@pytest.mark.parametrize("look", ["interrupted", "by two threads"])
def test_nobody_sees_what_the_thread_has_not_finished(look, plain, monkeypatch):
    module = import_module("fullshard.torch.optim.overlap_optimizer")
    monkeypatch.setattr(module, "_rests_elsewhere", lambda unit: True)
    make, may_go_on = module.FilledStep.make, threading.Event()

    def late(step):
        assert may_go_on.wait(PEERS_S)
        make(step)

    def body(comm):
        model, optimizer = overlapped(comm, plain)
        backward(model)
        optimizer.step()
        weight = next(model.blocks[0].parameters())
        before = weight.local.clone()
        monkeypatch.setattr(module.FilledStep, "make", late)
        backward(model)
        if look == "interrupted":
            with monkeypatch.context() as patch:
                patch.setattr(Future, "result", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    weight.local.clone()
            assert "local" not in vars(weight)
            may_go_on.set()
        else:
            seen = []
            both = [
                threading.Thread(target=lambda: seen.append(weight.local.clone())) for _ in "ab"
            ]
            for each in both:
                each.start()
            threading.Timer(0.05, may_go_on.set).start()
            for each in both:
                each.join(PEERS_S)
            assert torch.equal(*seen)
        assert not torch.equal(weight.local, before)

    LocalWorld(1).run(body)


def interrupt(*_):
    raise KeyboardInterrupt


def test_the_thread_ends_with_the_optimizer(plain):
    """Without the garbage collector: an idle thread has threads of its own for its kernels."""

    def body(comm):
        _, optimizer = overlapped(comm, plain)
        return weakref.ref(vars(optimizer)["_fullshard_overlap"]._updates)

    gc.disable()
    try:
        assert all(updates() is None for updates in LocalWorld(2).run(body))
    finally:
        gc.enable()


def test_a_rank_that_has_nothing_of_a_parameter_waits_no_longer_than_others(monkeypatch):
    module = import_module("fullshard.torch.optim.overlap_optimizer")
    monkeypatch.setattr(module, "_rests_elsewhere", lambda unit: True)

    def body(comm):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
        for layer in model:
            nn.init.ones_(layer.weight), nn.init.ones_(layer.bias)
            fully_shard(layer, mesh=comm)
        fully_shard(model, mesh=comm)
        optimizer = torch.optim.AdamW(model.parameters())
        overlap_optimizer(model, optimizer)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            waits = [waiting(m.unit) for m in managed_units(model)]
            optimizer.step()
        assert waits == [waiting(m.unit) for m in managed_units(model)]
        return any(param.span.numel == 0 for param in model.parameters()), sum(waits)

    found = LocalWorld(3).run(body)
    assert any(empty for empty, _ in found)
    assert all(waits for _, waits in found)


def waiting(unit):
    return sum(each.waits for each in unit.put_off)


def wholes(model):
    return [param.full_tensor() for param in model.parameters()]


# ---- what is left for step(), and what is refused -----------------------------------------------


def overlapped(comm, plain, **options):
    model = function(comm, copy_of(plain))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    overlap_optimizer(model, optimizer)
    return model, optimizer


@on_ranks(2)
def test_what_no_unit_has_is_stepped_as_ever(comm, plain):
    model = copy_of(plain)
    for block in model.blocks:
        fully_shard(block, mesh=comm)
    fully_shard(model, mesh=comm, ignored_params={model.norm.weight})
    assert not isinstance(model.norm.weight, ShardedParameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    overlap_optimizer(model, optimizer)
    before = model.norm.weight.detach().clone()
    sharded = model.head.weight.full_tensor()
    backward(model)
    assert torch.equal(model.norm.weight, before)
    assert not torch.equal(model.head.weight.full_tensor(), sharded)
    optimizer.step()
    assert not torch.equal(model.norm.weight, before)


@on_ranks(2)
def test_a_group_added_later_is_stepped_in_backward_too(comm, plain):
    model = function(comm, copy_of(plain))
    first, *others = model.parameters()
    optimizer = torch.optim.SGD([first], lr=0.1)
    overlap_optimizer(model, optimizer)
    backward(model)
    assert type(others[0].grad) is ShardedParameter
    optimizer.add_param_group({"params": others})
    optimizer.step()
    optimizer.zero_grad()
    backward(model)
    with pytest.raises(UsageError, match="has been used in backward"):
        others[0].grad.norm()


def clip(model, optimizer):
    clip_grad_norm_(model.parameters(), 1.0)


def clip_by_torch(model, optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)


def clip_values(model, optimizer):
    nn.utils.clip_grad_value_(model.parameters(), 1.0)


def scale(model, optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def go_back_again(model, optimizer):
    backward(model)


class Branches(nn.Module):
    """A unit of which each step runs some branches."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, chosen):
        return sum(self.branches[number](x) for number in chosen)


@pytest.mark.parametrize("options", [{}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}])
@pytest.mark.parametrize("size", [1, 2])
def test_parameters_that_no_rank_uses_are_passed_over(size, options):
    """As by `step`: momentum and weight decay leave them alone, though zeros were reduced."""
    by_rank = [[(0, 1, 2), (0,), (0, 2), (1,)], [(0, 1, 2), (0, 1), (0,), (1,)]]

    def body(comm):
        results = []
        for overlapped in (False, True):
            model = fully_shard(seeded(Branches), mesh=comm, **options)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
            if overlapped:
                overlap_optimizer(model, optimizer)
            for chosen in by_rank[comm.rank]:
                model(torch.ones(2, 8), chosen).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append([param.full_tensor() for param in model.parameters()])
        return results

    for ordinary, beside in LocalWorld(size).run(body):
        assert all(map(torch.equal, ordinary, beside))


@pytest.mark.parametrize(
    ("use", "fused"),
    [
        (clip, False),
        (clip_by_torch, False),
        (clip_values, False),
        (scale, False),
        (scale, True),
        (go_back_again, True),
    ],
)
@on_ranks(2)
def test_what_needs_the_gradients_is_refused(comm, plain, use, fused):
    model, optimizer = overlapped(comm, plain, fused=fused)
    backward(model)
    assert "used in backward" in repr(model.norm.weight.grad)
    with pytest.raises(UsageError, match=r"gradient of '.*' has been used.*Accumulate within"):
        use(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    backward(model)  # and all is well again
    optimizer.step()


@on_ranks(1)
def test_a_closure_is_refused(comm, plain):
    _, optimizer = overlapped(comm, plain)
    for call in (optimizer.step, lambda closure: optimizer.step(closure=closure)):
        with pytest.raises(UsageError, match=r"step\(closure\) of AdamW"):
            call(lambda: 0.0)


@on_ranks(2)
def test_reduces_that_outlive_backward_are_refused(comm, plain):
    model, _ = overlapped(comm, plain)
    model.set_is_last_backward(False)
    params = list(model.parameters())
    before = [param.full_tensor() for param in params]
    with pytest.raises(UsageError, match="set_is_last_backward"):
        backward(model)
    assert all(map(torch.equal, [param.full_tensor() for param in params], before))


@on_ranks(1)
def test_optimizers_that_cannot_go_unit_by_unit_are_refused(comm, plain):
    class Mine(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    model = function(comm, copy_of(plain))
    params = list(model.parameters())
    with pytest.raises(NotSupportedError, match="Mine is none of them"):
        overlap_optimizer(model, Mine(params))
    with pytest.raises(NotSupportedError, match="differentiable"):
        overlap_optimizer(model, torch.optim.AdamW(params, differentiable=True))
    with pytest.raises(UsageError, match="no parameter of the units"):
        overlap_optimizer(model, torch.optim.AdamW([nn.Parameter(torch.ones(1))]))
    with pytest.raises(UsageError, match="no sharded unit"):
        overlap_optimizer(nn.Linear(2, 2), torch.optim.AdamW(params))
    assert not any(managed.unit.settings.on_delivered for managed in managed_units(model))
