# SPDX-License-Identifier: Apache-2.0
"""Steps on runs of neighbouring spans: bit by bit those on each parameter, whatever users do."""

import copy
import random
import weakref
from functools import partial

import pytest
import torch
from support.optimizers import CASES, FORMS, OPTIMIZERS
from support.sampling import THOROUGH
from support.spans import drawn, set_grads
from support.threads import on_ranks, without_collector
from torch import Tensor, nn

from fullshard.core import layout
from fullshard.core.layout import lay_out
from fullshard.core.spec import ParamSpec
from fullshard.testing import LocalComm, LocalWorld
from fullshard.torch import fully_shard
from fullshard.torch.optim import merged_step
from fullshard.torch.optim.checks import watch_optimizers
from fullshard.torch.optim.merged_step import MergedStep
from fullshard.torch.state.apart import ELEMENTWISE
from fullshard.torch.tensor.ownership import Ownership
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.guards.replaced import mark_replaced

SHAPES = [(4, 32), (32,), (), (64,), (33,), (8, 8), (1,), (7, 32), (32,)]

UNLIKE = {
    # torch's own kernel leaves a part of the first momentum undefined.
    ("sgd-momentum", "fused", torch.bfloat16),
    ("sgd-nesterov", "fused", torch.bfloat16),
    # A 0-dim parameter is computed in the dtype of a 0-dim number, spans are not 0-dim.
    ("asgd", "foreach", torch.bfloat16),
}


@pytest.fixture(autouse=True)
def _optimizers_are_looked_at():
    watch_optimizers()
    mark_replaced(nn.Parameter(torch.ones(1)), "any")


def values(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return drawn(SHAPES, seed, dtype)


class Flat:
    """Parameters of SHAPES as they lie in a unit's shard, and gradients as a reduce gives them."""

    def __init__(self, comm: LocalComm, fulls: list[Tensor]):
        specs = [ParamSpec(f"p{i}", full.shape, "float32", True) for i, full in enumerate(fulls)]
        (self.segment,) = lay_out(specs, comm.size).segments
        self.comm = comm
        self.shard = torch.zeros(self.segment.slice_numel, dtype=fulls[0].dtype)
        self.params = [
            ShardedParameter.parameter(local, owner) for local, owner in self.cut(self.shard, fulls)
        ]

    def cut(self, flat: Tensor, fulls: list[Tensor]) -> list[tuple[Tensor, Ownership]]:
        pieces = []
        for slot, full in zip(self.segment.slots, fulls, strict=True):
            spec, spans = slot.spec, self.segment.spans(slot)
            owner = Ownership(spec.name, spec.shape, spans, self.comm)
            start = self.segment.offset_in_slice(slot, self.comm.rank)
            local = flat[start : start + owner.span.numel]
            local.copy_(owner.cut(full))
            pieces.append((local, owner))
        return pieces

    def set_grads(self, fulls: list[Tensor]) -> None:
        flat = torch.zeros_like(self.shard)
        for param, (local, _) in zip(self.params, self.cut(flat, fulls), strict=True):
            param.grad = ShardedParameter.value(local, param.ownership)


def collected(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters that a step of Adam works on."""
    lists: list[list[Tensor]] = [[] for _ in range(6)]
    optimizer._init_group(optimizer.param_groups[0], *lists)
    return lists[0]


def state_of(optimizer, params):
    return [
        {
            key: (value.full_tensor() if isinstance(value, ShardedParameter) else value).clone()
            for key, value in optimizer.state[param].items()
            if value is not None
        }
        for param in params
    ]


def assert_same(sharded, optimizer, plain, plain_optimizer):
    for i, (param, other) in enumerate(zip(sharded, plain, strict=True)):
        assert torch.equal(param.full_tensor(), other.detach()), i
    states = state_of(optimizer, sharded), state_of(plain_optimizer, plain)
    for i, (mine, other) in enumerate(zip(*states, strict=True)):
        assert mine.keys() == other.keys()
        for key in mine:
            assert torch.equal(mine[key], other[key]), (i, key)
    assert set(optimizer.state) <= set(sharded)


@pytest.mark.parametrize(("name", "form"), CASES)
@on_ranks(2)
def test_steps_are_those_of_one_process_bit_by_bit(comm, name, form):
    make = partial(OPTIMIZERS[name], **FORMS[form])
    for dtype in (torch.float32, torch.bfloat16):
        if (name, form, dtype) in UNLIKE:
            continue
        plain = [nn.Parameter(value) for value in values(0, dtype)]
        flat = Flat(comm, values(0, dtype))
        reference, optimizer = make(plain), make(flat.params)
        for step in range(1, 4):
            set_grads(plain, values(step, dtype))
            flat.set_grads(values(step, dtype))
            before = flat.shard._version
            reference.step()
            optimizer.step()
            assert flat.shard._version > before
        assert_same(flat.params, optimizer, plain, reference)
        (plan,) = MergedStep.of(optimizer)._plans.values()
        assert len(plan.runs) < len(SHAPES)


@on_ranks(1)
def test_what_lies_together_is_stepped_together(comm):
    flat = Flat(comm, values(0))
    optimizer = torch.optim.AdamW(flat.params)
    flat.set_grads(values(1))
    optimizer.step()
    numels = [tensor.numel() for tensor in collected(optimizer)]
    # Runs end behind 0-dim, 33 and 1: 32-element slots go on behind a gap.
    assert numels == [4 * 32 + 32 + 1, 64 + 33, 8 * 8 + 1, 7 * 32 + 32]
    assert all(type(tensor) is Tensor for tensor in collected(optimizer))
    flat.params[3].grad = ShardedParameter.value(
        flat.params[3].grad.local.clone(), flat.params[3].ownership
    )
    numels = [tensor.numel() for tensor in collected(optimizer)]
    assert numels == [4 * 32 + 32 + 1, 64, 33, 8 * 8 + 1, 7 * 32 + 32]
    flat.params[3].grad = values(1)[3]  # a plain tensor of the global shape
    kinds = [type(tensor) for tensor in collected(optimizer)]
    assert kinds == [Tensor, ShardedParameter, Tensor, Tensor, Tensor]
    optimizer.param_groups[0]["differentiable"] = True
    assert list(map(id, collected(optimizer))) == list(map(id, flat.params))


@pytest.mark.parametrize("form", FORMS)
@on_ranks(1)
def test_an_optimizer_collects_again_only_what_has_changed(comm, form):
    flat, plain = Flat(comm, values(0)), [nn.Parameter(value) for value in values(0)]
    optimizer, reference = (
        torch.optim.AdamW(params, lr=0.1, **FORMS[form]) for params in (flat.params, plain)
    )
    asked = []

    def step(number, left_out=None):
        flat.set_grads(values(number))
        set_grads(plain, values(number))
        if left_out is not None:
            flat.params[left_out].grad = plain[left_out].grad = None
        asked.clear()
        optimizer.step()
        reference.step()
        assert_same(flat.params, optimizer, plain, reference)
        return len(asked)

    step(1)
    merged = MergedStep.of(optimizer)
    collect = merged._collect
    merged._collect = lambda *args: [asked.append(args), collect(*args)][1]
    assert [step(2), step(3)] == [0, 0]
    for each in optimizer, reference:
        each.param_groups[0]["lr"] = 0.01
    assert step(4) == 0
    for each in optimizer, reference:
        each.param_groups[0]["weight_decay"] = 0.5
    assert [step(5), step(6)] == [1, 0]
    assert [step(7, left_out=2), step(8), step(9)] == [1, 1, 0]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [step(10), step(11)] == [1, 0]
    assert optimizer.param_groups[0]["params"].pop() is flat.params[-1]
    assert reference.param_groups[0]["params"].pop() is plain[-1]
    assert [step(12), step(13)] == [1, 0]


# ---- whatever users do --------------------------------------------------------------------------


def random_step(rng: random.Random, sides, step: int) -> None:
    """Do the same, drawn by ``rng``, to the sharded and the plain side, and step."""
    (flat, optimizer), (plain, reference) = sides
    grads = values(step)
    flat.set_grads(grads)
    for param, grad in zip(plain, grads, strict=True):
        param.grad = grad.clone()
    for param, other in zip(flat.params, plain, strict=True):
        what = rng.random()
        if what < 0.1:
            param.grad = other.grad = None
        elif what < 0.2:
            param.grad = ShardedParameter.value(param.grad.local * 2, param.ownership)
            other.grad *= 2
        elif what < 0.25:
            param.grad.add_(param.grad)
            other.grad.add_(other.grad)
        elif what < 0.3 and "step" in optimizer.state[param] and "step" in reference.state[other]:
            optimizer.state[param]["step"].fill_(7.0)
            reference.state[other]["step"].fill_(7.0)
    if rng.random() < 0.2:
        lr = rng.choice([0.1, 0.01])
        optimizer.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = lr
    if rng.random() < 0.2:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if rng.random() < 0.1:
        state = optimizer.state[flat.params[0]]
        for key, value in state.items():
            state[key] = copy.deepcopy(value)
    optimizer.step()
    reference.step()
    optimizer.zero_grad(set_to_none=rng.random() < 0.5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(2))
@on_ranks(2)
def test_any_sequence_of_what_users_do(comm, seed, form):
    rng = random.Random(seed)
    flat = Flat(comm, values(0))
    plain = [nn.Parameter(value) for value in values(0)]
    make = partial(torch.optim.AdamW, lr=0.1, **FORMS[form])
    optimizer, reference = make(flat.params[:6]), make(plain[:6])
    for step in range(1, 13):
        if step == 4:
            optimizer.add_param_group({"params": flat.params[6:], "weight_decay": 0.5})
            reference.add_param_group({"params": plain[6:], "weight_decay": 0.5})
        random_step(rng, ((flat, optimizer), (plain, reference)), step)
    for param, other in zip(flat.params, plain, strict=True):
        assert torch.equal(param.full_tensor(), other.detach())
    assert_same(flat.params, optimizer, plain, reference)


@on_ranks(1)
def test_steps_that_never_repeat_are_left_as_they_are(comm):
    flat = Flat(comm, values(0))
    optimizer = torch.optim.SGD(flat.params, lr=0.1)
    planned = []
    for step in range(20):
        flat.set_grads(values(1))
        flat.params[1 + step % 2].grad = None
        optimizer.step()
        planned.append(bool(MergedStep.of(optimizer)._plans))
    assert [step for step, there in enumerate(planned) if there] == [*range(8), 15]
    for _ in range(9):
        optimizer.step()
    assert MergedStep.of(optimizer)._plans
    assert not MergedStep.of(optimizer)._misses


@on_ranks(1)
def test_a_step_that_fails_leaves_runs_together(comm, monkeypatch):
    flat = Flat(comm, values(0))
    optimizer = torch.optim.AdamW(flat.params, foreach=True)
    flat.set_grads(values(1))
    optimizer.step()

    def fail(*_args, **_kwargs):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_lerp_", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step()
    optimizer.step()
    steps = {float(optimizer.state[param]["step"]) for param in flat.params}
    assert steps == {3.0}, "torch had counted the step that failed"
    assert len(collected(optimizer)) == 4


def test_a_skipped_step_is_counted_for_none():
    def body(comm):
        flat = Flat(comm, values(0))
        optimizer = torch.optim.AdamW(flat.params, fused=True)
        for bad in (False, True, False):
            grads = values(1)
            if bad:
                grads[0][0, 0] = float("inf")
            flat.set_grads([grad * 8 for grad in grads])
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
        assert {float(optimizer.state[param]["step"]) for param in flat.params} == {2.0}
        return [param.full_tensor() for param in flat.params]

    plain = [nn.Parameter(value) for value in values(0)]
    reference = torch.optim.AdamW(plain, fused=True)
    for _ in range(2):
        set_grads(plain, values(1))
        reference.step()
    for result in LocalWorld(2).run(body):
        assert all(map(torch.equal, result, [param.detach() for param in plain]))

    # Lists of parameters compare by identity first, so that == above compares no values.


@on_ranks(2)
def test_a_closure_gives_the_gradients(comm):
    flat = Flat(comm, values(0))
    optimizer = torch.optim.SGD(flat.params, lr=1.0)
    assert optimizer.step(lambda: flat.set_grads(values(0)) or 3.0) == 3.0
    assert not any(param.local.any() for param in flat.params)


# ---- memory, and who is meant -------------------------------------------------------------------


def test_state_that_was_replaced_is_not_kept_alive():
    def body(comm):
        flat = Flat(comm, values(0))
        optimizer = torch.optim.AdamW(flat.params)
        flat.set_grads(values(1))
        optimizer.step()
        storage = weakref.ref(optimizer.state[flat.params[0]]["exp_avg"].local.untyped_storage())
        grads = [weakref.ref(param.grad.local) for param in flat.params]
        optimizer.zero_grad()
        assert not any(grad() is not None for grad in grads)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert not MergedStep.of(optimizer)._plans
        assert storage() is None

    with without_collector():
        LocalWorld(1).run(body)


def test_an_optimizer_goes_without_the_garbage_collector():
    def body(comm):
        flat = Flat(comm, values(0))
        optimizer = torch.optim.AdamW(flat.params)
        flat.set_grads(values(1))
        optimizer.step()
        gone = weakref.ref(optimizer)
        state = weakref.ref(optimizer.state[flat.params[0]]["exp_avg"])
        del optimizer
        assert gone() is None
        assert state() is None

    with without_collector():
        LocalWorld(1).run(body)


@on_ranks(1)
def test_classes_that_nobody_knows_step_as_they_are(comm):
    class Mine(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    flat = Flat(comm, values(0))
    optimizer = Mine(flat.params)
    flat.set_grads(values(1))
    optimizer.step()
    assert MergedStep.of(optimizer) is None
    assert all(type(tensor) is ShardedParameter for tensor in collected(optimizer))


def test_the_classes_are_those_that_collect_lists():
    for kind in ELEMENTWISE:
        assert callable(kind._init_group)


@pytest.mark.parametrize(
    ("width", "turn_bytes", "runs"), [(128, 64, 1), (16, 64, 1), (16, 128, 2), (12, 64, 2)]
)
def test_a_unit_of_rows_is_a_run_though_spans_are_short(monkeypatch, width, turn_bytes, runs):
    """On a CPU a run ends behind a span that has elements of an incomplete turn: of the biases."""
    monkeypatch.setattr(merged_step, "_TURN_BYTES", turn_bytes)

    def body(comm):
        model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        for param in model.parameters():
            nn.init.constant_(param, 0.1)
        model = fully_shard(model, mesh=comm, align="row")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
        (plan,) = MergedStep.of(optimizer)._plans.values()
        assert len(plan.runs) == runs
        if width == 128:  # small parameters lie before large ones
            assert plan.runs[0].members == [1, 3, 0, 2]
        assert sorted(i for run in plan.runs for i in run.members) == [0, 1, 2, 3]
        return [param.full_tensor() for param in model.parameters()]

    assert all(map(torch.equal, *LocalWorld(4).run(body)[:2]))


# ---- zeros between spans ------------------------------------------------------------------------

F32 = torch.float32
SHORT = [(3, 32), (16, 16), (16,), (6, 5), (64,), (2, 32), (64, 512)]
"""Shapes of which a rank of eight has 32 or none, 32, 2, 5 or none, 8, 32 or none, and 4,096
elements, in few runs."""


class Given(nn.Module):
    """Parameters of some shapes, whose gradients are what forward is given."""

    def __init__(self, shapes, dtype=torch.float32):
        super().__init__()
        self.all = nn.ParameterList(map(nn.Parameter, drawn(shapes, 0, dtype)))

    def forward(self, grads):
        return sum((p * grad).sum() for p, grad in zip(self.all, grads, strict=True))


def behind_spans(model, *, of_gradients):
    """Return the elements between each span of a unit and the next."""
    found = []
    for param in model.parameters():
        local, own = (param.grad if of_gradients else param).local, param.ownership
        rest = max(own.room - own.span.numel, 0)
        found.append(local.as_strided((rest,), (1,), local.storage_offset() + local.numel()))
    return torch.cat(found)


@pytest.mark.parametrize(("name", "form"), CASES if THOROUGH else CASES[::4])
@on_ranks(8)
def test_steps_go_on_over_zeros_and_leave_them(comm, name, form):
    """Equal to the steps of one process to the bit, where no element is of an incomplete turn."""
    for dtype in (F32, torch.bfloat16):
        if (name, form, dtype) in UNLIKE:
            continue
        plain, model = Given(SHORT, dtype), Given(SHORT, dtype)
        fully_shard(model, mesh=comm)
        make = partial(OPTIMIZERS[name], **FORMS[form])
        reference, optimizer = make(plain.parameters()), make(model.parameters())
        for step in range(1, 4):
            model(drawn(SHORT, step, dtype)).backward()
            for param, sharded in zip(plain.all, model.all, strict=True):
                param.grad = sharded.grad.full_tensor()  # sums over ranks are rounded
            reference.step()
            optimizer.step()
            assert not behind_spans(model, of_gradients=True).any()
            assert not behind_spans(model, of_gradients=False).any()
            optimizer.zero_grad()
        (plan,) = MergedStep.of(optimizer)._plans.values()
        assert len(plan.runs) < len(SHORT)
        # SGD's first step, which makes momenta, is one on each parameter.
        apart = name in ("sgd-momentum", "sgd-nesterov") and dtype is not F32
        for i in () if apart else (0, 1, 4, 5, 6):
            assert torch.equal(model.all[i].full_tensor(), plain.all[i]), i


@on_ranks(8)
def test_zeros_are_left_out_where_they_would_become_nan(comm):
    model = fully_shard(Given(SHORT), mesh=comm)
    optimizer = torch.optim.AdamW(model.parameters())
    runs = []
    for eps in (1e-8, 0.0, 1e-8):
        optimizer.param_groups[0]["eps"] = eps
        model(drawn(SHORT, 1)).backward()
        optimizer.step()
        (plan,) = MergedStep.of(optimizer)._plans.values()
        runs.append(len(plan.runs))
        assert not behind_spans(model, of_gradients=False).any()
    assert runs[0] == runs[2] < runs[1]


@pytest.mark.parametrize("padded", [True, False])
def test_a_run_does_not_go_on_over_what_its_optimizer_was_not_given(monkeypatch, padded):
    """The optimizer has the outer two of three spans of 16 elements, side by side or padded."""
    monkeypatch.setattr(layout, "_MOST_PADDED_SHARDS", 256 if padded else 0)
    shapes = [(128,)] * 3

    def body(comm):
        model = fully_shard(Given(shapes), mesh=comm)
        optimizer = torch.optim.AdamW(list(model.parameters())[::2], lr=0.1)
        before = [param.full_tensor() for param in model.parameters()]
        model(drawn(shapes, 1)).backward()
        optimizer.step()
        pairs = zip(model.parameters(), before, strict=True)
        assert [torch.equal(p.full_tensor(), old) for p, old in pairs] == [False, True, False]

    LocalWorld(8).run(body)
