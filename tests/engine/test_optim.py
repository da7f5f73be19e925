# SPDX-License-Identifier: Apache-2.0
"""Optimizers over sharded parameters do what they do over plain ones, or are refused."""

import copy
import math
import traceback
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.optimizers import CASES, FORMS, OPTIMIZERS
from support.spans import drawn, set_grads, sharded
from support.threads import on_ranks
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.core.errors import (
    ConfigurationError,
    NotSupportedError,
    UnshardedOperationError,
)
from fullshard.testing import LocalComm, LocalWorld
from fullshard.torch import fully_shard
from fullshard.torch.optim.checks import watch_optimizers
from fullshard.torch.state.optimizers import refuse_state_of_another
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.tensor.reductions import GlobalScalar, global_norms, global_sum
from fullshard.torch.unit.guards.replaced import mark_replaced

watch_optimizers()  # as the first sharding does

SHAPES = [(5, 7), (), (33,), (1,), (16, 4), (3, 2, 5), (2, 50)]


def values(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return drawn(SHAPES, seed, dtype)


def rprop_aside(params: list[Tensor], make) -> list[Tensor]:
    """Rprop reads 0-dim tensors as Python numbers, which a sharded parameter refuses."""
    return [param for param in params if param.dim() or make.func is not torch.optim.Rprop]


def train_plain(make, dtype: torch.dtype, steps: int) -> list[Tensor]:
    params = [nn.Parameter(value) for value in values(0, dtype)]
    optimizer = make(rprop_aside(params, make))
    for step in range(steps):
        set_grads(params, values(step + 1, dtype))
        optimizer.step()
    return [param.detach() for param in params]


def train_sharded(make, dtype: torch.dtype, steps: int, world: int) -> list[Tensor]:
    def body(comm: LocalComm) -> list[Tensor]:
        params = sharded(comm, values(0, dtype))
        optimizer = make(rprop_aside(params, make))
        for step in range(steps):
            set_grads(params, values(step + 1, dtype))
            optimizer.step()
        for state in optimizer.state.values():
            for value in state.values():
                assert (
                    not isinstance(value, Tensor)
                    or value.dim() == 0
                    or (type(value) is ShardedParameter)
                )
        return [param.full_tensor() for param in params]

    results = LocalWorld(world).run(body)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    return results[0]


@pytest.mark.parametrize(
    ("world", "dtype"),
    [(2, torch.bfloat16), (3, torch.float64), (5, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize(("name", "form"), CASES)
def test_an_optimizer_steps_as_on_plain_parameters(name, form, world, dtype):
    make = partial(OPTIMIZERS[name], **FORMS[form])
    want = train_plain(make, dtype, steps=3)
    for got, expected in zip(train_sharded(make, dtype, 3, world), want, strict=True):
        assert torch.equal(got, expected), (got - expected).abs().max()


@pytest.mark.parametrize("form", FORMS)
def test_a_mix_of_sharded_and_plain_parameters_steps(form):
    make = partial(torch.optim.AdamW, lr=0.1, **FORMS[form])
    want = train_plain(make, torch.float32, steps=2)

    def body(comm):
        params: list[Tensor] = list(sharded(comm, values(0)))
        params[0::2] = [nn.Parameter(value) for value in values(0)[0::2]]
        optimizer = make(params)
        for step in (1, 2):
            set_grads(params, values(step))
            optimizer.step()
        return [p.full_tensor() if isinstance(p, ShardedParameter) else p for p in params]

    for result in LocalWorld(3).run(body):
        assert all(map(torch.equal, result, want))


def test_the_fast_forms_are_chosen_as_for_plain_parameters():
    def body(comm):
        params = sharded(comm, values(0))
        assert torch.utils._foreach_utils._has_foreach_support(params, torch.device("cpu"))
        return _default_to_fused_or_foreach(params, differentiable=False, use_fused=True)

    assert LocalWorld(1).run(body) == [(True, False)]


@on_ranks(3)
def test_optimizer_state_survives_its_state_dict(comm):
    params = sharded(comm, values(0))
    optimizer = torch.optim.AdamW(params, lr=0.1)
    set_grads(params, values(1))
    optimizer.step()
    twins = copy.deepcopy(params)
    other = torch.optim.AdamW(twins, lr=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, step_of in ((params, optimizer), (twins, other)):
        set_grads(each, values(2))
        step_of.step()
    assert all(torch.equal(p.local, twin.local) for p, twin in zip(params, twins, strict=True))


# ---- clipping -----------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
def test_clip_grad_norm_clips_the_global_norm(order, foreach):
    plain = [nn.Parameter(value) for value in values(0, torch.float64)]
    set_grads(plain, values(1, torch.float64))
    want = nn.utils.clip_grad_norm_(plain, 0.5, order, foreach=foreach)

    def body(comm):
        params = sharded(comm, values(0, torch.float64))
        set_grads(params, values(1, torch.float64))
        norm = nn.utils.clip_grad_norm_(params, 0.5, order, foreach=foreach)
        assert isinstance(norm, GlobalScalar)
        assert type(norm.full_tensor()) is Tensor
        return norm.full_tensor(), [param.grad.full_tensor() for param in params]

    results = LocalWorld(3).run(body)
    for norm, grads in results:
        assert torch.equal(norm, results[0][0]), "the same bits on every rank"
        torch.testing.assert_close(norm, want, rtol=1e-12, atol=0)
        for got, param in zip(grads, plain, strict=True):
            torch.testing.assert_close(got, param.grad, rtol=1e-12, atol=0)


def test_plain_gradients_count_once_beside_sharded_ones():
    grads = values(1, torch.float64)
    want = torch.cat([grad.reshape(-1) for grad in grads]).norm()

    def body(comm):
        params: list[Tensor] = list(sharded(comm, values(0, torch.float64)))
        set_grads(params, grads)
        params[0] = nn.Parameter(values(0, torch.float64)[0])
        params[0].grad = grads[0].clone()
        norm = clip_grad_norm_(iter(params), 0.25)
        after = nn.utils.get_total_norm([param.grad for param in params])
        return norm.full_tensor(), after.item()

    for norm, after in LocalWorld(2).run(body):
        torch.testing.assert_close(norm, want, rtol=1e-12, atol=0)
        assert after == pytest.approx(0.25, rel=1e-5)


def test_who_adds_global_norms_up_over_ranks_is_warned():
    def body(comm):
        params = sharded(comm, values(0))
        set_grads(params, values(1))
        return torch.stack([p.grad.norm() for p in params]) ** 2

    def reduce(each, op):
        with pytest.raises(ValueError, match="process group"):  # ranks are threads here
            dist.all_reduce(each, op)

    squares = LocalWorld(2).run(body)[0]
    with pytest.warns(UserWarning, match="counted once a rank") as caught:
        reduce(squares, dist.ReduceOp.SUM)
    assert caught[0].filename == __file__
    reduce(squares, dist.ReduceOp.MAX)
    reduce(squares.full_tensor(), dist.ReduceOp.SUM)


# ---- refusals -----------------------------------------------------------------------------------


def test_optimizers_that_need_whole_tensors_are_refused_by_name():
    class SOAP(torch.optim.SGD):
        pass

    class Mine(SOAP):
        def step(self, closure=None):
            return super().step(closure)

    def body(comm):
        mark_replaced(nn.Parameter(torch.ones(1)), "any")
        params = sharded(comm, values(0))
        matrices = [param for param in params if param.dim() == 2]
        set_grads(params, values(1))
        for make in (torch.optim.LBFGS, torch.optim.Adafactor, partial(Mine, lr=1.0)):
            optimizer = make(params)
            with pytest.raises(NotSupportedError, match="needs whole tensors"):
                optimizer.step(lambda: 0.0)
        with pytest.raises(NotSupportedError, match="Muon needs whole tensors"):
            torch.optim.Muon(matrices).step()
        return [param.full_tensor() for param in params]

    for result in LocalWorld(2).run(body):
        assert all(map(torch.equal, result, values(0)))


@on_ranks(2)
def test_unknown_optimizers_are_stopped_by_what_they_call(comm):
    class RowWise(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for param in self.param_groups[0]["params"]:
                param.sub_(param.grad / param.grad.mean(dim=-1, keepdim=True))

    params = sharded(comm, values(0))
    set_grads(params, values(1))
    with pytest.raises(UnshardedOperationError, match=r"aten\.mean.*'p0'.*full_tensor"):
        RowWise(params, {}).step()


class Lifted(TorchDispatchMode):
    """Counts tensors made of Python's numbers: on a device each is a copy that the host awaits."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        makers = {Path(frame.filename).name for frame in traceback.extract_stack(limit=5)}
        if func.overloadpacket is torch.ops.aten.lift_fresh and "testing.py" not in makers:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("align", ["row", "element"])
@pytest.mark.parametrize("order", [2.0, math.inf])
@on_ranks(2)
def test_norms_copy_no_numbers_to_the_device(comm, align, order):
    model = fully_shard(nn.Linear(3, 5), mesh=comm, align=align)
    model(torch.ones(2, 3)).sum().backward()
    grads = [param.grad for param in model.parameters()]
    with Lifted() as lifted:
        global_norms([(grad.local, grad.ownership) for grad in grads], order)
        global_sum(grads[0].local, grads[0].ownership)
    assert lifted.count == 0


@pytest.mark.parametrize("steps_before", [0, 1])
@on_ranks(2)
def test_state_of_another_class_is_refused_before_anything_has_changed(comm, steps_before):
    model = fully_shard(nn.Linear(4, 4), mesh=comm)

    def step(optimizer):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    adam = torch.optim.Adam(model.parameters())
    step(adam)
    state = adam.state_dict()
    torch.optim.AdamW(model.parameters()).load_state_dict(state)
    adamax = torch.optim.Adamax(model.parameters())
    for _ in range(steps_before):
        step(adamax)
    before = [param.full_tensor() for param in model.parameters()]

    def load_and_step():
        adamax.load_state_dict(state)
        step(adamax)

    with pytest.raises(ConfigurationError, match=r"no exp_inf, without which Adamax cannot"):
        load_and_step()
    for param, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.full_tensor(), was)


@pytest.mark.parametrize(("name", "form"), CASES)
@on_ranks(1)
def test_no_optimizer_takes_its_own_state_for_that_of_another(comm, name, form):
    model = fully_shard(nn.Linear(4, 4), mesh=comm)
    optimizer = OPTIMIZERS[name](model.parameters(), **FORMS[form])
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    refuse_state_of_another(optimizer, optimizer.state.values())
