# SPDX-License-Identifier: Apache-2.0
"""What the engine does when: op sequences, counted collectives, and steps that are not textbook."""

import weakref
from collections import Counter
from contextlib import nullcontext
from functools import partial
from itertools import groupby

import pytest
import torch
from support import beside
from support.beside import DOORS, grads_of, whole
from support.models import GPT, Block, Made, loss_of, make, make_batches, seeded
from support.stack import WIDTH, Stack, shard_stack, step
from support.threads import on_ranks
from support.training import shard
from torch import nn

from fullshard.core.errors import ConfigurationError, UsageError
from fullshard.testing import LocalWorld
from fullshard.torch import (
    FullyShardedDataParallel,
    fully_shard,
    set_prefetch,
    summon_full_params,
    tracing,
)
from fullshard.torch.comm.protocol import WrappedComm
from fullshard.torch.step.managed import managed_unit_of
from fullshard.torch.unit.unit import UnitState

SIGNS = {
    "gather": "G",
    "await_gather": "g",
    "free": "F",
    "fill": "+",
    "reduce": "R",
    "await_reduce": "r",
}


def ops_of(trace):
    """The ops of a trace, with one sign for the gradients that a unit gets one after another."""
    signs = (SIGNS[r.op] + r.unit.removeprefix("blocks.") for r in trace)
    return " ".join(sign for sign, _ in groupby(signs))


# A root without parameters around blocks 0, 1, 2; forward, then backward.
PINNED = {
    0: "G0 g0 F0 G1 g1 F1 G2 g2 F2 G2 g2 +2 F2 R2 G1 g1 +1 F1 R1 r2 G0 g0 +0 F0 R0 r1 r0",
    1: "G0 g0 G1 F0 g1 G2 F1 g2 G1 +2 F2 R2 g1 G0 +1 F1 R1 r2 g0 +0 F0 R0 r1 r0",
    2: "G0 G1 g0 G2 F0 g1 g2 G0 +2 F2 R2 +1 F1 R1 r2 g0 +0 F0 R0 r1 r0",
}


@pytest.mark.parametrize("depth", PINNED)
@on_ranks(2)
def test_ops_of_a_step_are_pinned(comm, depth):
    model = shard_stack(comm, layers=3)
    set_prefetch(model, depth, depth)
    step(model)
    with tracing(model) as trace:
        step(model)
    assert ops_of(trace) == PINNED[depth]


class CountingComm(WrappedComm):
    """A comm that counts the collectives issued through it and its duplicates."""

    def __init__(self, inner, counts):
        super().__init__(inner)
        self.counts = counts

    def duplicate(self):
        return CountingComm(super().duplicate(), self.counts)

    def all_gather(self, *args, **kwargs):
        self.counts["all_gather"] += 1
        return super().all_gather(*args, **kwargs)

    def reduce_scatter(self, *args, **kwargs):
        self.counts["reduce_scatter"] += 1
        return super().reduce_scatter(*args, **kwargs)

    def all_reduce(self, *args, **kwargs):
        if kwargs.get("label") != "what the backward used":  # 2 numbers, and 1 a parameter
            self.counts["all_reduce"] += 1
        return super().all_reduce(*args, **kwargs)


class NamingComm(WrappedComm):
    """A comm that lists the gathers and reduces of steps as `PINNED` does."""

    def __init__(self, inner, names):
        super().__init__(inner)
        self.names = names

    def duplicate(self):
        return NamingComm(super().duplicate(), self.names)

    def all_gather(self, pairs, label=""):
        self.names.append(label.replace("gather of unit 'blocks.", "G").strip("'"))
        return super().all_gather(pairs, label)

    def reduce_scatter(self, pairs, label=""):
        self.names.append(label.replace("reduce of unit 'blocks.", "R").strip("'"))
        return super().reduce_scatter(pairs, label)


def side_by_side(model, x):
    return sum(block(x) for block in model.blocks)  # no block waits for the gradient of an input


def cut_off(model, x):
    for block in model.blocks[:2]:
        x = block(x)
    x.register_hook(lambda _: None)
    return model.blocks[2](x) + model.blocks[1](x.detach())


@pytest.mark.parametrize("forward", [Stack.forward, side_by_side, cut_off])
@on_ranks(2)
def test_collectives_come_in_the_same_order_when_nobody_looks(comm, forward):
    """Gradients go another way then than in sight of a trace."""
    names = []
    model = shard_stack(NamingComm(comm, names), layers=3)
    model.forward = partial(forward, model)
    orders = []
    for sight in (nullcontext, nullcontext, nullcontext, lambda: tracing(model)):
        names.clear()
        with sight():
            step(model)
        orders.append(names.copy())
    assert orders[2] == orders[3]
    if forward is Stack.forward:
        assert orders[2] == [op for op in PINNED[1].split() if op[0] in "GR"]


@on_ranks(2)
def test_what_came_before_an_exception_counts_for_no_later_backward(comm):
    model = shard_stack(comm, layers=3)
    step(model)
    managed, last = managed_unit_of(model.blocks[1]), model.blocks[1][2]

    def fail(_):
        raise ArithmeticError

    failing = last.register_forward_hook(lambda _, args, __: args[0].register_hook(fail) and None)
    with pytest.raises(ArithmeticError):
        step(model)
    failing.remove()
    assert (len(managed.came), managed.takes_of >= 0) == (2, True)  # of the last layer
    found = []
    model.blocks[0].register_forward_pre_hook(
        lambda *_: found.append((managed.came.copy(), managed.takes_of >= 0))
    )
    step(model)
    assert found == [([], False)]


@pytest.mark.parametrize(
    ("name", "strategy", "gathers", "reduces"),
    [
        # Every unit once in forward, all but the root and the last again in backward, which begins
        # with these.
        ("gpt", "FULL_SHARD", 3 + 1, 3),
        ("gpt", "SHARD_GRAD_OP", 3, 3),
        ("gpt", "NO_SHARD", 0, 3),
        ("conv", "FULL_SHARD", 3 + 1, 3),
        ("twice", "FULL_SHARD", 3 + 0, 2),  # the shared unit for each forward
        ("nested", "FULL_SHARD", 5 + 2, 5),
        ("odd", "FULL_SHARD", 3 + 1, 3),
    ],
)
@on_ranks(2)
def test_collectives_of_a_step_are_counted(comm, name, strategy, gathers, reduces):
    counts = Counter()
    model = shard(make(name), name, CountingComm(comm, counts), strategy=strategy)
    for inputs, targets in make_batches(name, 2, 2):
        counts.clear()
        loss_of(model(inputs), targets).backward()
    assert counts["all_gather"] == gathers
    assert counts["reduce_scatter"] + counts["all_reduce"] == reduces


@on_ranks(2)
def test_modules_show_sharded_parameters_outside_of_forward_and_backward(comm):
    model = shard(make("gpt"), "gpt", comm, door="function")
    shown = [type(p).__name__ for p in model.parameters()]
    inputs, targets = make_batches("gpt", 1, 2)[0]
    inside = []
    model.blocks[0].register_forward_pre_hook(
        lambda m, _: inside.append((type(m.attention.out.weight), m.attention.out.weight.shape))
    )
    loss = loss_of(model(inputs), targets)
    shown += [type(p).__name__ for p in model.parameters()]
    loss.backward()
    shown += [type(p).__name__ for p in model.parameters()]
    shown = set(shown)
    assert shown == {"ShardedParameter"}
    assert inside == [(nn.Parameter, (12, 12))]


def gradients(model):
    return {name: grad for name, grad in grads_of(model).items() if grad is not None}


def plain_gradients(name, forwards):
    """Gradients of one process for the sum of the losses of ``forwards`` batches."""
    model = make(name)
    for inputs, targets in forwards:
        loss_of(model(inputs), targets).backward()
    return gradients(model)


def assert_equal_gradients(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def run_sharded(name, body, world=2, **how):
    """The same data on every rank, so that the average over ranks is one process's gradient."""
    return LocalWorld(world).run(lambda comm: body(shard(make(name), name, comm, **how)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_and_within_steps(mode):
    batches = make_batches("gpt", 2, 2)

    def body(model):
        outputs = []
        for inputs, targets in batches:
            with mode():
                outputs.append(model(inputs).clone())
            loss = loss_of(model(inputs), targets)
            with mode():
                model(inputs)
            loss.backward()
        with mode():
            model(inputs)
        states = {m.unit.state for m in map(managed_unit_of, model.modules()) if m}
        return outputs, gradients(model), states

    for outputs, found, states in run_sharded("gpt", body):
        assert_equal_gradients(found, plain_gradients("gpt", batches))
        assert states == {UnitState.RESTING}
        for output, (inputs, _) in zip(outputs, batches, strict=True):
            torch.testing.assert_close(output, make("gpt")(inputs).detach())


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_forward_without_backward_does_not_leave_stale_parameters(strategy):
    """Parameters kept for a backward that never comes must not survive the optimizer's step."""
    batch = make_batches("gpt", 1, 2)[0]

    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss_of(model(batch[0]), batch[1]).backward()
        model(batch[0])
        optimizer.step()
        return loss_of(model(batch[0]), batch[1]).item()

    expected = train(make("gpt"))
    for found in run_sharded("gpt", train, strategy=strategy):
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("door", ["wrapper", "function"])
def test_a_good_step_after_an_exception_in_the_middle_of_one(where, door):
    batch = make_batches("gpt", 1, 2)[0]

    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if where == "forward":
                raise ZeroDivisionError
            return x.clone()

        @staticmethod
        def backward(ctx, _grad):
            raise ZeroDivisionError

    def body(model):
        loss_of(model(batch[0]), batch[1]).backward()
        model.zero_grad()
        handle = model.blocks[0].register_forward_hook(lambda m, i, output: Boom.apply(output))
        with pytest.raises(ZeroDivisionError):
            loss_of(model(batch[0]), batch[1]).backward()
        handle.remove()
        model.zero_grad()
        loss_of(model(batch[0]), batch[1]).backward()
        return gradients(model)

    for found in run_sharded("gpt", body, door=door):
        assert_equal_gradients(found, plain_gradients("gpt", [batch]))


def test_units_that_one_rank_does_not_use_are_reduced_in_the_order_of_the_other():
    """One lies inside a unit that is used, one before it, one is used by an earlier call."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.aside, self.shared = (nn.Linear(4, 4) for _ in range(3))
            self.last = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.last.forward = self.run_last

        def run_last(self, x, use):
            own, inner = self.last
            return self.joined(own(x), inner, use)

        def joined(self, x, branch, use):
            branch_output = branch(x)
            self.kept.append(branch_output)  # so its backward might come
            return x + branch_output if use else x

        def forward(self, x, use):
            self.kept = []
            x = self.joined(self.shared(self.first(x)), self.aside, use)
            return self.last(self.joined(x, self.shared, use), use)

    torch.manual_seed(0)
    plain = Branches()
    state = plain.state_dict()
    for use in (True, False):
        plain(torch.ones(1, 4), use).sum().backward()
    expected = {name: p.grad / 2 for name, p in plain.named_parameters()}

    def body(comm):
        model = Branches()
        model.load_state_dict(state)
        for part in (model.first, model.aside, model.shared, model.last[1], model.last):
            fully_shard(part, mesh=comm)
        fully_shard(model, mesh=comm)
        for _ in range(3):
            model.zero_grad()
            with tracing(model) as trace:
                model(torch.ones(1, 4), use=comm.rank == 0).sum().backward()
            reduced = [record.unit for record in trace if record.op == "reduce"]
        return gradients(model), reduced

    (first, order), (second, other_order) = LocalWorld(2).run(body)
    assert order == other_order == ["last.1", "last", "aside", "shared", "first"]
    assert_equal_gradients(first, expected)
    assert_equal_gradients(second, expected)


def view(m, x):
    """The output of a unit is a view that is changed in place."""
    y = m.block(m.first(x))
    y += 1.0
    return (y * y).flatten(1)


def recurse(m, x, depth=2):
    """A unit calls itself."""
    return torch.tanh(m.linear(m(x, depth - 1) if depth else x))


def hide(m, x):
    """The output of a unit is an object of a class that nobody knows."""
    result = type("Result", (), {})()
    result.y = m.after(torch.tanh(m.before(x)))
    return result


def hidden_block():
    return Made(hide, before=nn.Linear(4, 4), after=nn.Linear(4, 4))


def in_turn(m, x):
    return m.block(m.first(x))


UNUSUAL = {
    "view": lambda: Made(
        view, first=nn.Linear(4, 4), block=nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2)))
    ),
    "recursive": lambda: Made(
        in_turn, first=nn.Linear(4, 4), block=Made(recurse, linear=nn.Linear(4, 4))
    ),
    "hidden": lambda: Made(
        lambda m, x: in_turn(m, x).y, first=nn.Linear(4, 4), block=hidden_block()
    ),
    # Of the modules of one unit some are not called.
    "grouped": lambda: Made(
        in_turn, first=nn.Linear(4, 4), block=nn.Linear(4, 4), other=nn.Linear(4, 4)
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_calls(name):
    inputs = torch.linspace(0, 1, 12).view(3, 4)
    torch.manual_seed(0)
    plain = UNUSUAL[name]()
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    for _ in range(3):
        plain(inputs).square().sum().backward()
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}

    def body(comm):
        model = UNUSUAL[name]()
        model.load_state_dict(state)
        fully_shard([model.first, model.other] if name == "grouped" else model.first, mesh=comm)
        fully_shard(model.block, mesh=comm)
        fully_shard(model, mesh=comm)
        for number in range(3):
            model.set_requires_gradient_sync(number > 0)
            model(inputs).square().sum().backward()
        with torch.no_grad():
            model(inputs)
        assert {type(p).__name__ for p in model.parameters()} == {"ShardedParameter"}
        found = gradients(model)
        return {name: grad for name, grad in found.items() if name in expected}

    for found in LocalWorld(2).run(body):
        assert_equal_gradients(found, expected)


@pytest.mark.parametrize("backward", [True, False])
@on_ranks(2)
def test_graphs_are_not_kept(comm, backward):
    class Mark(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, mark):
            ctx.mark = mark
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    class Token:
        pass

    model = fully_shard(Made(lambda m, x, y: m.linear(x) + y, linear=nn.Linear(4, 4)), mesh=comm)
    alive = []
    x = torch.ones(2, 4, requires_grad=True)
    for _ in range(3):
        token = Token()
        alive.append(weakref.ref(token))
        output = model(Mark.apply(x, token), Mark.apply(x, token)).sum()
        if backward:
            output.backward()
        del output, token
    assert [reference() for reference in alive] == [None] * 3


@on_ranks(2)
def test_a_root_whose_output_is_unknown_is_reduced(comm):
    model = fully_shard(hidden_block(), mesh=comm)
    model(torch.ones(1, 4)).y.sum().backward()
    assert [p.grad is not None for p in model.parameters()] == [True] * 4


@pytest.mark.long
@on_ranks(2)
def test_forwards_without_backward_do_not_pile_up(comm):
    model = shard_stack(comm)
    for _ in range(200):
        model(torch.ones(1, WIDTH))
    step(model)
    events = managed_unit_of(model).tracker.executor._training._compiled.events
    assert len(events) < 64 * 6


def test_hooks_on_sharded_parameters_see_the_reduced_gradient():
    batch = make_batches("twice", 1, 2)[0]

    def body(model):
        weight = model.shared.weight
        seen = []
        weight.register_hook(lambda grad: grad * 2)
        weight.register_post_accumulate_grad_hook(
            lambda param: seen.append(param.grad.full_tensor())
        )
        for _ in range(2):
            loss_of(model(batch[0]), batch[1]).backward()
        return seen

    expected = plain_gradients("twice", [batch])["shared.weight"]
    for seen in run_sharded("twice", body):
        torch.testing.assert_close(seen, [2 * expected, 4 * expected])


@on_ranks(2)
def test_prefetch_cannot_change_in_the_middle_of_a_step(comm):
    model = shard_stack(comm)
    loss = model(torch.ones(2, WIDTH)).sum()
    with pytest.raises(UsageError, match="only be changed between steps"):
        set_prefetch(model, 2, 2)
    loss.backward()
    with pytest.raises(ConfigurationError, match="forward must be a whole number"):
        set_prefetch(model, -1)
    model.set_reshard_after_forward(False)
    with tracing(model) as trace:
        step(model)
    assert trace.count("gather") == 4


def test_a_sharded_child_used_alone_joins_a_larger_model_later():
    def body(comm):
        stack = shard_stack(comm)
        step(stack)
        larger = FullyShardedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), stack), comm)
        step(larger)
        with tracing(larger) as trace:
            step(larger)
        return {record.unit for record in trace}

    expected = {"(root)", *(f"1.blocks.{i}" for i in range(4))}
    assert LocalWorld(2).run(body) == [expected] * 2


@on_ranks(2)
def test_a_unit_stays_full_while_a_tied_parameter_is_reached_through_it(comm):
    """A path from the loss to a tied weight leads through a unit's frozen scale."""
    weight = nn.Parameter(torch.eye(5))
    inner = Made(
        lambda m, x: (x @ m.weight) * m.scale + m.bias,
        weight=weight,
        scale=nn.Parameter(torch.full((5,), 2.0), requires_grad=False),
        bias=nn.Parameter(torch.zeros(5)),
    )
    model = Made(
        lambda m, x: m.inner(torch.ones_like(x)) + x @ m.weight, weight=weight, inner=inner
    )
    beside.shard(model, comm, units=("inner",))
    model(torch.ones(2, 5)).sum().backward()
    grad = model.weight.grad.full_tensor()
    assert torch.equal(grad, torch.full((5, 5), 6.0))


def test_units_that_share_an_input_are_freed_one_by_one():
    """A decoder's layers all read the encoder's output, whose gradient is complete at the end."""

    def layer(m, x, memory, extra=None):
        assert extra["again"] is memory
        return torch.tanh(m.mix(x + memory))

    def decode(m, x):
        memory = m.encode(x)
        for each in m.layers:
            x = each(x, memory, extra={"again": memory})
        return x

    def body(comm):
        layers = nn.ModuleList(Made(layer, mix=nn.Linear(WIDTH, WIDTH)) for _ in range(8))
        model = Made(decode, encode=nn.Linear(WIDTH, WIDTH), layers=layers)
        for each in layers:
            fully_shard(each, mesh=comm)
        model = fully_shard(model, mesh=comm)
        set_prefetch(model, 0, 0)
        for _ in range(2):
            model.zero_grad()
            with tracing(model) as trace:
                model(torch.ones(2, WIDTH)).sum().backward()
        one = managed_unit_of(model.layers[0]).unit.layout.full_bytes
        return max(record.live_bytes for record in trace.records) / one

    for units in LocalWorld(2, eager=True).run(body):
        assert units <= 4  # the root's one kept, one full, its gradients, what a reduce awaits


@on_ranks(2)
def test_gradients_held_back_are_reduced_though_the_last_micro_batch_does_not_use_their_unit(comm):
    def run(m, x, use):
        return m.sometimes(m.always(x)) if use else m.always(x)

    model = Made(run, always=nn.Linear(3, 3), sometimes=nn.Linear(3, 3))
    beside.shard(model, comm, units=[nn.Linear])
    found = []
    for _ in range(2):
        model.set_requires_gradient_sync(False)
        model(torch.ones(1, 3), use=True).sum().backward()
        assert model.sometimes.bias.grad is None
        model.set_requires_gradient_sync(True)
        model(torch.ones(1, 3), use=False).sum().backward()
        found.append(model.sometimes.bias.grad.full_tensor().tolist())
        model.zero_grad()
    model(torch.ones(1, 3), use=False).sum().backward()
    assert (found, model.sometimes.bias.grad) == ([[1.0] * 3] * 2, None)


@on_ranks(2)
def test_hooks_on_a_leaf_go_with_the_graph(comm):
    """An input that is trained, too, lives from step to step."""
    model = shard_stack(comm)
    inputs = torch.ones(2, WIDTH, requires_grad=True)
    for _ in range(3):
        model(inputs).sum().backward()
        assert not inputs._backward_hooks


@pytest.mark.parametrize("then", ["state_dict", "summon_full_params", "forward"])
@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_a_forward_that_the_keyboard_has_ended_is_forgotten(comm, door, then):
    """Torch calls hooks behind every `Exception` only, so that nothing has told the engine."""
    model, plain = beside.shard(seeded(GPT), comm, door, [Block]), seeded(GPT)
    inputs, targets = make_batches("gpt", 1, 2)[0]

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.blocks[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(inputs)
    handle.remove()
    if then == "state_dict":
        values = {name: whole(value) for name, value in model.state_dict().items()}
        torch.testing.assert_close(values, plain.state_dict())
    elif then == "summon_full_params":
        with summon_full_params(model, writeback=False):
            torch.testing.assert_close(model.head.weight, plain.head.weight)
    for each in (model, model, plain, plain):
        loss_of(each(inputs), targets).backward()
    torch.testing.assert_close(grads_of(model), grads_of(plain))
