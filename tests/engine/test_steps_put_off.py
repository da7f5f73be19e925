# SPDX-License-Identifier: Apache-2.0
"""Steps beside forward: bit by bit the ordinary ones, whoever looks; made where they are due."""

import copy
import gc
import threading
import weakref
from functools import partial
from importlib import import_module

import pytest
import torch
from support.models import seeded
from support.threads import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from fullshard.core.errors import ConfigurationError, UsageError
from fullshard.testing import LocalWorld
from fullshard.torch import (
    CPUOffloadPolicy,
    ShardedParameter,
    clip_grad_norm_,
    fully_shard,
    load_checkpoint,
    overlap_optimizer,
    save_checkpoint,
    summon_full_params,
)
from fullshard.torch.step.managed import managed_units
from fullshard.torch.unit.full_parameters import FullParameters

LAYERS, WIDTH, STEPS = 4, 24, 4
PLAIN = []
ADAMW = partial(torch.optim.AdamW, lr=0.1, fused=True)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True)


def radam(groups):
    return torch.optim.RAdam(groups, lr=torch.tensor(0.1))  # which schedulers change in place


@pytest.fixture(scope="module", autouse=True)
def plain():
    PLAIN.extend(seeded(layers).state_dict().items())
    yield
    PLAIN.clear()


def layers():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def built(comm, **options):
    model = layers()
    model.load_state_dict(dict(PLAIN))
    for layer in model:
        fully_shard(layer, mesh=comm, **options)
    return fully_shard(model, mesh=comm, **options)


def in_groups(model):
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() > 1]},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]


def backward(model, number):
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number))
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def put_off(model):
    """The units, by number in the model, that are to be stepped."""
    units = [(m.number, m.unit.put_off) for m in managed_units(model)]
    return [number for number, waiting in units if any(each.waits for each in waiting)]


def train(model, optimizer, look=lambda model, optimizer: None, *, clip=True):
    """Return all that is to be equal; ``look`` is called after each step, before gradients go."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen = []
    for number in range(STEPS):
        seen.append(backward(model, number))
        if clip:
            seen.append(clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        scheduler.step()
        found = look(model, optimizer)
        seen += [each.clone() for each in found or ()]
        optimizer.zero_grad()
    seen += [param.full_tensor() for param in model.parameters()]
    for param in model.parameters():
        for value in optimizer.state[param].values():
            seen.append(value.full_tensor() if isinstance(value, ShardedParameter) else value)
    return seen


def assert_alike(comm, look=lambda model, optimizer: None, make=ADAMW, **options):
    results = []
    for beside in (None, "forward"):
        model = built(comm, **options)
        optimizer = make(in_groups(model))
        if beside is not None:
            overlap_optimizer(model, optimizer, beside=beside)
        results.append(train(model, optimizer, look))
    assert len(results[0]) == len(results[1])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("make", [ADAMW, SGD, radam])
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (2, {"reshard_after_forward": False}),
        (3, {"align": "element"}),
        (2, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    ],
)
def test_the_values_are_those_of_ordinary_steps(make, ranks, options):
    LocalWorld(ranks).run(lambda comm: assert_alike(comm, make=make, **options))


def fresh(optimizer):
    """State dicts hold what goes on changing."""
    found = optimizer.state_dict()["state"].values()
    return [value.full_tensor() if value.dim() else value for s in found for value in s.values()]


def by_torch(model, optimizer):
    found = get_optimizer_state_dict(model, optimizer)["state"].values()
    return [value.full_tensor() if value.dim() else value for s in found for value in s.values()]


def zeroed(model, optimizer):
    optimizer.zero_grad(set_to_none=False)
    return [param.grad.norm() for param in model.parameters()]


def summoned(model, optimizer):
    with summon_full_params(model):
        for param in model.parameters():
            param.data.mul_(0.5)
        return [param.detach().clone() for param in model.parameters()]


def copied(model, optimizer):
    return [copy.deepcopy(param).full_tensor() for param in model.parameters()]


def evaluated(model, optimizer):
    with torch.inference_mode():
        result = model(torch.ones(2, WIDTH))
    return [torch.from_numpy(result.numpy().copy())]


def under_autocast(model, optimizer):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return [model(torch.ones(2, WIDTH)).detach()]


def loaded(model, optimizer):
    """Back to where it was, and on: what was put off belongs to the values of before."""
    state = copy.deepcopy(optimizer.state_dict())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    backward(model, 99)
    optimizer.step()
    optimizer.load_state_dict(state)
    model.load_state_dict(weights)
    return fresh(optimizer)


LOOKS = {
    "parameters": lambda model, _: [param.full_tensor() for param in model.parameters()],
    "one of them": lambda model, _: [model[2].weight.norm()],
    "spans": lambda model, _: [param.to_local() for param in model.parameters()],
    "gradients": lambda model, _: [param.grad.norm() for param in model.parameters()],
    "model.state_dict": lambda model, _: [v.full_tensor() for v in model.state_dict().values()],
    "optimizer.state_dict": lambda _, optimizer: fresh(optimizer),
    "state dict by torch": by_torch,
    "zeroed gradients": zeroed,
    "summoned": summoned,
    "copied": copied,
    "evaluated": evaluated,
    "under autocast": under_autocast,
    "loaded": loaded,
}


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_sees_what_has_been_stepped(look):
    LocalWorld(2).run(lambda comm: assert_alike(comm, LOOKS[look]))


def test_checkpoints_hold_what_has_been_stepped(tmp_path):
    def body(comm, beside):
        model = built(comm)
        optimizer = ADAMW(in_groups(model))
        if beside is not None:
            overlap_optimizer(model, optimizer, beside=beside)
        folder = tmp_path / str(beside)
        for number in range(3):
            backward(model, number)
            optimizer.step()
            optimizer.zero_grad()
        save_checkpoint(folder, model, optimizer, step=3)
        backward(model, 9)
        optimizer.step()
        load_checkpoint(folder, model, optimizer)
        return train(model, optimizer)

    results = [LocalWorld(2).run(partial(body, beside=each))[0] for each in (None, "forward")]
    assert all(map(torch.equal, *results))


def held(model):
    """Collect views of parameters and gradients that somebody may hold for long."""
    state = model.state_dict()
    found = [view for param in model.parameters() for view in (param.data, param.detach()[:2])]
    found += [param.grad.detach() for param in model.parameters() if param.grad is not None]
    return [*found, *state.values()]


@pytest.mark.parametrize("align", ["row", "element"])
def test_views_that_somebody_holds_show_what_has_been_stepped(align):
    def body(comm, beside):
        model = built(comm, align=align)
        optimizer = SGD(model.parameters(), weight_decay=0.1, maximize=True)
        if beside is not None:
            overlap_optimizer(model, optimizer, beside=beside)
        views, seen = held(model), []
        for number in range(3):
            backward(model, number)
            views += held(model)
            optimizer.step()
            seen += [each.full_tensor().detach() for each in views]
        weight = model[1].weight
        backward(model, 3)
        optimizer.step()
        kept = views[0]
        model[0].weight.data = torch.zeros(WIDTH, WIDTH)  # a plain tensor, which looks at nothing
        return [*seen, kept.full_tensor(), weight.full_tensor().detach()]

    results = [LocalWorld(2).run(partial(body, beside=each))[0] for each in (None, "forward")]
    assert all(map(torch.equal, *results))


# ---- when ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_first_step_is_made_at_once_and_others_unit_by_unit(comm):
    model = built(comm)
    optimizer = ADAMW(model.parameters())
    overlap_optimizer(model, optimizer, beside="forward")
    for number in range(3):
        backward(model, number)
        assert put_off(model) == []
        optimizer.step()
        optimizer.zero_grad()
        assert put_off(model) == ([1, 2, 3, 4] if number else [])
    _ = model[1].weight.local
    assert put_off(model) == [1, 3, 4]


def test_a_step_is_made_while_the_gather_before_it_is_under_way(monkeypatch):
    """The first unit is stepped before any gather; for the others, the link works meanwhile."""
    told = {}

    def body(comm):
        model = built(comm)
        optimizer = ADAMW(model.parameters())
        overlap_optimizer(model, optimizer, beside="forward")
        for number in range(3):
            backward(model, number)
            optimizer.step()
        numbers = {id(m.unit.full): m.number for m in managed_units(model)}
        steps = told[comm.rank] = []
        for managed in managed_units(model):
            for each in managed.unit.put_off:
                step = each._change
                each._change = partial(noted, steps, ("step", managed.number), step)
        told[id(comm)] = numbers, steps
        model(torch.ones(2, WIDTH))

    def noted(steps, what, step):
        steps.append(what)
        step()

    gather = FullParameters.gather

    def noting(full, custom):
        for numbers, steps in (each for each in told.values() if isinstance(each, tuple)):
            if id(full) in numbers:
                steps.append(("gather", numbers[id(full)]))
        gather(full, custom)

    monkeypatch.setattr(FullParameters, "gather", noting)
    LocalWorld(2).run(body)
    expected = [("step", 1)]
    for number in range(1, LAYERS + 1):
        expected += [("gather", number), ("step", number + 1)]
    assert told[0][: 2 * LAYERS] == told[1][: 2 * LAYERS] == expected[: 2 * LAYERS]


@on_ranks(2)
def test_an_overflow_skips_the_step_and_a_fused_one_is_made_at_once(comm):
    for fused in (False, True):
        model = built(comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        overlap_optimizer(model, optimizer, beside="forward")
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        before = [param.full_tensor() for param in model.parameters()]
        for factor in (torch.inf, 1.0):
            scaler.scale(model(torch.ones(2, WIDTH)).mean() * factor).backward()
            scaler.step(optimizer)
            assert bool(put_off(model)) == (not fused and factor == 1.0)
            scaler.update()
            optimizer.zero_grad()
            same = map(torch.equal, before, (param.full_tensor() for param in model.parameters()))
            assert all(same) == (factor == torch.inf)
        assert scaler.get_scale() == 2.0


@on_ranks(2)
def test_what_an_optimizer_collects_in_its_own_way_is_stepped(comm):
    """By a method that somebody has set on it; as `overlap_optimizer` itself does."""
    results = []
    for beside in (None, "forward"):
        model = built(comm)
        optimizer = SGD(model.parameters())
        if beside is not None:
            overlap_optimizer(model, optimizer, beside=beside)
        backward(model, 0)
        optimizer.step()
        optimizer._init_group = partial(doubled, optimizer._init_group)
        results.append(train(model, optimizer))
    assert all(map(torch.equal, *results))


def doubled(collect, group, *lists):
    result = collect(group, *lists)
    lists[1][:] = [2 * grad for grad in lists[1]]
    return result


@pytest.mark.parametrize("by_thread", [False, True])
def test_gradients_go_when_the_step_is_made(by_thread, monkeypatch):
    """Without the garbage collector, for which device memory and page-locked memory cannot wait."""
    module = import_module("fullshard.torch.optim.overlap_optimizer")
    monkeypatch.setattr(module, "_rests_elsewhere", lambda unit: by_thread)

    def body(comm):
        model = built(comm)
        optimizer = ADAMW(model.parameters())
        overlap_optimizer(model, optimizer, beside="forward")
        grads = []
        for number in range(4):
            backward(model, number)
            memory = (param.grad.local.untyped_storage() for param in model.parameters())
            grads += map(weakref.ref, memory)
            optimizer.step()
            optimizer.zero_grad()
        model(torch.ones(2, WIDTH))
        return [each() for each in grads]

    gc.disable()
    try:
        for found in LocalWorld(2).run(body):
            assert found
            assert not any(each is not None for each in found)
    finally:
        gc.enable()


@on_ranks(2)
def test_an_error_comes_up_where_the_unit_is_used_and_names_it(comm):
    model = built(comm)
    optimizer = ADAMW(model.parameters())
    overlap_optimizer(model, optimizer, beside="forward")
    backward(model, 0)
    optimizer.step()
    backward(model, 1)
    optimizer.param_groups[0]["eps"] = None
    optimizer.step()
    with pytest.raises(TypeError, match=r"eps|NoneType") as caught:
        model(torch.ones(2, WIDTH))
    assert any("the step of unit '0' by AdamW" in note for note in caught.value.__notes__)
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert all(param.grad is not None for param in model.parameters())


def test_a_captured_graph_has_no_step_of_before(monkeypatch):
    module = import_module("fullshard.torch.optim.overlap_optimizer")

    def body(comm):
        model = built(comm)
        optimizer = ADAMW(model.parameters())
        overlap_optimizer(model, optimizer, beside="forward")
        for number in range(3):
            backward(model, number)
            optimizer.step()
            assert put_off(model) == ([1, 2, 3, 4] if number == 1 else [])
            if number == 1:
                optimizer.state_dict()
                capturing.now = True
        capturing.now = False
        backward(model, 3)
        optimizer.step()
        capturing.now = True
        with pytest.raises(UsageError, match="would repeat a step of before"):
            model(torch.ones(2, WIDTH))

    capturing = threading.local()
    monkeypatch.setattr(module, "is_capturing", lambda _: getattr(capturing, "now", False))
    LocalWorld(2).run(body)


@on_ranks(2)
def test_a_second_optimizer_and_plain_parameters_are_stepped_as_ever(comm):
    model = built(comm)
    plain = nn.Parameter(torch.ones(3))
    first = ADAMW([*model[0].parameters(), *model[1].parameters(), plain])
    second = SGD([*model[1].parameters(), *model[2].parameters()])  # shares a unit
    for optimizer in (first, second):
        overlap_optimizer(model, optimizer, beside="forward")
    other = built(comm)
    ordinary = (
        ADAMW([*other[0].parameters(), *other[1].parameters()]),
        SGD([*other[1].parameters(), *other[2].parameters()]),
    )
    for number in range(3):
        backward(other, number)
        backward(model, number)
        plain.grad = torch.ones(3)
        before = plain.detach().clone()
        for optimizer in (first, second, *ordinary):
            optimizer.step()
            optimizer.zero_grad()
        assert not torch.equal(plain, before)
    assert put_off(model) == [1, 2, 3]
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())


@on_ranks(1)
def test_one_way_for_an_optimizer(comm):
    model = built(comm)
    optimizer = ADAMW(model.parameters())
    with pytest.raises(ConfigurationError, match="'sideways'"):
        overlap_optimizer(model, optimizer, beside="sideways")
    overlap_optimizer(model, optimizer, beside="forward")
    overlap_optimizer(model, optimizer, beside="forward")
    with pytest.raises(ConfigurationError, match="steps beside forward already"):
        overlap_optimizer(model, optimizer)
