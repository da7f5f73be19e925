# SPDX-License-Identifier: Apache-2.0
"""Behind `fully_shard` parameters are DTensors, as PyTorch's are, and state dicts their memory."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.models import seeded
from support.threads import on_ranks
from support.world import on_processes
from torch import nn
from torch._library.simple_registry import (
    GenericTorchDispatchRuleHolder,
    find_torch_dispatch_rule,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as theirs
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard.core.errors import (
    ConfigurationError,
    NotSupportedError,
    UnshardedOperationError,
    UsageError,
)
from fullshard.torch import fully_shard as ours
from fullshard.torch.tensor import parameter
from fullshard.torch.tensor.parameter import DerivedDTensor, ShardedDTensor


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 150), nn.Tanh(), nn.LayerNorm(150), nn.Linear(150, 90), nn.Linear(90, 3)
    )


def shard(function, model, mesh, **options):
    for layer in (model[0], model[3], model[4]):
        function(layer, mesh=mesh, **options)
    return function(model, mesh=mesh, **options)


def train(model, rank, optimizer, steps=3):
    losses = []
    for step in range(steps):
        torch.manual_seed(10 * step + rank)
        loss = model(torch.randn(4, 12)).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), norm.full_tensor().item()]
    return losses


def second_dims(param):
    return Shard(1) if param.dim() == 2 and param.shape[1] % 6 == 0 else None


def both(mesh, **options):
    found = []
    for function in (ours, theirs):
        model = shard(function, net(), mesh, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        found.append((model, optimizer, train(model, dist.get_rank(), optimizer)))
    return found


@pytest.mark.parametrize("along", [False, True], ids=["rows", "second dims"])
@pytest.mark.parametrize(("size", "shape"), [(3, (3,)), (4, (2, 2))], ids=["1-D", "2-D"])
@on_processes("size", joined=True)
def test_placements_rows_and_steps_are_pytorchs(size, shape, along):
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    options = {"shard_placement_fn": second_dims} if along else {}
    (mine, optimizer, losses), (other, their_optimizer, their_losses) = both(mesh, **options)
    torch.testing.assert_close(losses, their_losses, rtol=1e-5, atol=1e-6)
    for (name, p), (_, q) in zip(mine.named_parameters(), other.named_parameters(), strict=True):
        same_place(name, p, q)
        torch.testing.assert_close(p.to_local().detach(), q.to_local().detach())
        assert p.to_local().untyped_storage().data_ptr() == p.local.untyped_storage().data_ptr()
        state, theirs_ = optimizer.state[p]["exp_avg"], their_optimizer.state[q]["exp_avg"]
        same_place(name, state, theirs_)
        whole = q.detach().full_tensor()
        torch.testing.assert_close(p.full_tensor().detach(), whole)
        torch.testing.assert_close(state.full_tensor(), theirs_.full_tensor())
        mine_as, theirs_as = (
            each.detach().redistribute(placements=[Replicate()] * mesh.ndim) for each in (p, q)
        )
        assert torch.allclose(mine_as.to_local(), theirs_as.to_local(), atol=1e-6)
        again = DTensor.from_local(p.detach().to_local(), p.device_mesh, p.placements,
                                   shape=p.shape, stride=p.stride())  # fmt: skip
        assert torch.equal(again.full_tensor(), p.detach().full_tensor())


def same_place(name, p, q):
    assert isinstance(p, DTensor), name
    assert p.placements == q.placements, (name, p.placements, q.placements)
    assert p.device_mesh == q.device_mesh
    assert p.to_local().shape == q.to_local().shape, name
    assert (p.shape, p.stride(), p.dtype) == (q.shape, q.stride(), q.dtype)


@on_processes(2, joined=True)
def test_what_is_written_to_a_state_dict_is_in_the_model(tmp_path):
    model = shard(ours, net(), None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rank, ones = dist.get_rank(), torch.ones(2, 12)
    train(model, rank, optimizer)
    kept = copy.deepcopy(get_state_dict(model, optimizer))
    with torch.no_grad():
        before = model(ones)
    ways = {
        "fill_": lambda held: held.fill_(0.25),
        "to_local": lambda held: held.to_local().fill_(0.25),
        "copy_": lambda held: held.copy_(torch.full(held.shape, 0.25)),
        "DTensor": lambda held: held.copy_(held.mul(0) + 0.25),
        "add_": lambda held: held.zero_().add_(0.25),
        "rows": lambda held: held[:].fill_(0.25),
        "data": lambda held: held.data.fill_(0.25),
    }
    wanted = net()
    with torch.no_grad():
        for param in wanted.parameters():
            param.fill_(0.25)
        for way, write in ways.items():
            for value in model.state_dict().values():
                write(value)
            torch.testing.assert_close(model(ones), wanted(ones), msg=way)
            set_model_state_dict(model, kept[0])
            torch.testing.assert_close(model(ones), before, msg=way)
    dcp.save({"model": kept[0], "optim": kept[1]}, checkpoint_id=tmp_path)
    other = shard(ours, net(), None)
    with torch.no_grad():
        other(ones)  # has been gathered once
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    weights, state = get_state_dict(other, other_optimizer)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=tmp_path)
    went_on = train(model, rank, optimizer)
    assert train(other, rank, other_optimizer) == pytest.approx(went_on, rel=1e-6)


@on_processes(2, joined=True)
def test_pickles_hold_pytorchs_own_dtensors():
    model = shard(ours, net(), init_device_mesh("cpu", (2,)))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert {type(value) for value in loaded.values()} == {DTensor}
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name].to_local(), value.to_local())


@on_processes(3, joined=True)
def test_weights_on_the_first_rank_beside_meta():
    """They are loaded together, or all ranks are told."""
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = net()
    full = net().state_dict()
    model = shard(ours, model, None, check_values=False)
    with pytest.raises(UsageError, match="came from the meta device"):
        model(torch.ones(1, 12))
    model.to("cpu") if dist.get_rank() == 0 else model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full if dist.get_rank() == 0 else {}, options=options)
    with torch.no_grad():
        torch.testing.assert_close(model(torch.ones(1, 12)), net()(torch.ones(1, 12)))


METHODS = """
abs acos asin atan bool ceil clone contiguous cos cosh count_nonzero detach double erf exp expm1
flatten float floor frac half isfinite isinf isnan isneginf log1p logical_not logit max mean min
median neg norm numel positive prod reciprocal relu round rsqrt sigmoid sign sin sinh sqrt square
std sum t tan tanh trunc var argmax argmin aminmax any all log log2 log10 sgn signbit deg2rad
digamma erfinv erfc exp2 rad2deg
"""
OPERATIONS = {
    **{name: (lambda p, name=name: getattr(p, name)()) for name in METHODS.split()},
    "matmul": lambda p: p @ p.T,
    "mm with itself": lambda p: torch.mm(p.t(), p),
    "addmm": lambda p: torch.addmm(p, p, p.T @ p),
    "einsum": lambda p: torch.einsum("ij,kj->ik", p, p),
    "mean of rows": lambda p: p.mean(1),
    "mean of columns": lambda p: p.mean(0, keepdim=True),
    "sum of columns": lambda p: p.sum(0),
    "std of rows": lambda p: p.std(1),
    "norm of rows": lambda p: p.norm(dim=1),
    "vector norm": lambda p: torch.linalg.vector_norm(p, dim=0),
    "softmax": lambda p: p.softmax(-1),
    "log softmax": lambda p: p.log_softmax(0),
    "logsumexp": lambda p: p.logsumexp(1),
    "cumsum": lambda p: p.cumsum(0),
    "sort": lambda p: p.sort(dim=1)[0],
    "topk": lambda p: p.topk(2, dim=0)[0],
    "max of rows": lambda p: p.max(dim=1)[0],
    "row": lambda p: p[3],
    "rows": lambda p: p[2:5],
    "columns": lambda p: p[:, 1:4],
    "chunk": lambda p: p.chunk(3, dim=1)[1],
    "cat": lambda p: torch.cat([p, p], dim=1),
    "stack": lambda p: torch.stack([p, p]),
    "where": lambda p: torch.where(p > 0, p, -p),
    "masked": lambda p: p.masked_fill(p > 0, 0.0),
    "equal": lambda p: p == p,
    "greater": lambda p: p > 0.1,
    "torch.equal": lambda p: torch.tensor(torch.equal(p, p.clone())),
    "allclose": lambda p: torch.tensor(torch.allclose(p, p + 1)),
    "view": lambda p: p.view(p.shape[0], 3, -1),
    "reshape": lambda p: p.reshape(1, *p.shape),
    "permute": lambda p: p.permute(1, 0),
    "unsqueeze": lambda p: p.unsqueeze(1),
    "expand": lambda p: p.unsqueeze(0).expand(2, -1, -1),
    "tril": lambda p: p.tril(),
    "clamp": lambda p: p.clamp(-0.1, 0.1),
    "lerp": lambda p: p.lerp(p * 2, 0.3),
    "addcmul": lambda p: torch.addcmul(p, p, p, value=0.5),
    "addcdiv": lambda p: torch.addcdiv(p, p, p.abs() + 1),
    "pow": lambda p: p.pow(3),
    "bf16": lambda p: p.to(torch.bfloat16),
    "zeros_like": lambda p: torch.zeros_like(p),
    "linear": lambda p: nn.functional.linear(p, p),
    "svd": lambda p: torch.linalg.svdvals(p),
    "outer": lambda p: torch.outer(p.sum(1), p.sum(0)),
    "dot": lambda p: (p * p).sum(),
}  # fmt: skip


def _column(mesh):
    return distribute_tensor(torch.arange(1.0, 9.0).view(8, 1), mesh, [Shard(0)])


IN_PLACE = {
    "a column": lambda p, mesh: p.mul_(_column(mesh)),
    "a product": lambda p, mesh: p.add_(p @ p.T @ p),
}
if torch.__version__ >= "2.13":  # before that a DTensor cannot be told where its product goes
    IN_PLACE["out"] = lambda p, mesh: torch.mm(p @ p.T, p.clone(), out=p)


@pytest.mark.parametrize("name", IN_PLACE)
@on_processes(2, joined=True)
def test_operations_in_place_return_and_change_the_parameter(name):
    """They return what they wrote to, with PyTorch's values; the next forward sees it."""
    mesh, found = init_device_mesh("cpu", (2,)), []
    for function in (ours, theirs):
        torch.manual_seed(1)
        model = function(nn.Linear(6, 8, bias=False), mesh=mesh)
        weight = model.weight.detach()
        with torch.no_grad():
            model(torch.eye(6))  # has been gathered once
            changed = IN_PLACE[name](weight, mesh)
            found.append((changed.full_tensor(), model(torch.eye(6)).T))
    (mine, seen), (other, _) = found
    torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)
    assert torch.equal(seen, mine)


@on_processes(2, joined=True)
def test_adafactor_steps_as_on_one_process():
    """It needs rows and columns; PyTorch's fully_shard cannot run it."""
    sharded, plain = shard(ours, net(), init_device_mesh("cpu", (2,))), net()
    for model in (sharded, plain):
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
        for step in range(3):
            torch.manual_seed(step)
            model(torch.randn(4, 12)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, one in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), one.detach(), rtol=0, atol=1e-6)


@on_processes(3, joined=True)
def test_operations_give_what_dtensor_gives():
    mesh, weights = init_device_mesh("cpu", (3,)), []
    for function in (ours, theirs):
        torch.manual_seed(1)
        model = function(nn.Linear(9, 13, bias=False), mesh=mesh)
        weights.append(model.weight.detach())
    wrong, compared = {}, 0
    for name, operation in OPERATIONS.items():
        mine, other = (_answer(operation, weight) for weight in weights)
        if isinstance(other, str):
            continue  # DTensor has no rule for it
        compared += 1
        if isinstance(mine, str):
            wrong[name] = mine
        elif not torch.allclose(mine.double(), other.double(), equal_nan=True, atol=1e-6):
            wrong[name] = f"{mine} is not {other}"
    assert wrong == {}
    assert compared >= 100


def _whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


PENALTIES = {
    "product": lambda p: p.prod(),
    "box": lambda p: p[2:9, 3:7].square().sum(),
    "box, twice": lambda p: (lambda box: _whole(box).sum() + _whole(box).prod())(p[2:9, 3:7]),
    "element": lambda p: p[3, 4].exp(),
    "whole rows": lambda p: _whole(p[2:7]).square().sum(),
    "outer product": lambda p: torch.outer(p[0], p[0]).square().sum(),
    "row by row": lambda p: (p * p[0]).sum(),
    "row by matrix": lambda p: (p[1] @ p.T).exp().sum(),
}
if torch.__version__ < "2.12":
    del PENALTIES["product"]  # its derivative is made of products that DTensor cannot make there


@on_processes(3, joined=True)
def test_gradients_of_parts_are_those_of_one_process():
    mesh, wrong = init_device_mesh("cpu", (3,)), {}
    for name, penalty in PENALTIES.items():
        found = []
        for sharding in (lambda model: model, lambda model: ours(model, mesh=mesh)):
            torch.manual_seed(1)
            model = sharding(nn.Linear(9, 12, bias=False, dtype=torch.float64))
            loss = _whole(penalty(model.weight))
            loss.backward()
            found.append((loss.detach(), _whole(model.weight.grad)))
        for one, mine in zip(*found, strict=True):
            if not torch.allclose(one, mine, rtol=1e-12):
                wrong[name] = f"{mine} is not {one}"
    assert wrong == {}


@on_processes(2, joined=True)
def test_writes_to_copies_of_parts_are_refused():
    weight = ours(seeded(lambda: nn.Linear(6, 8, bias=False))).weight.detach()
    with pytest.raises(UnshardedOperationError, match="would be lost"):
        weight[1:5, 2:4].zero_()
    with pytest.raises(UnshardedOperationError, match="not cut alike"):
        weight[1:5].mul_(weight[0])
    weight[1:5] = 3.0
    assert weight.full_tensor()[:, 0].eq(3.0).tolist() == [False, *[True] * 4, *[False] * 3]


def test_operations_run_by_the_rules_of_spans():
    """Also in torch 2.11, which takes what derives from DTensor for a DTensor."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        weight = ours(nn.Linear(4, 4)).weight
        assert type(weight.detach().abs()) is ShardedDTensor
        assert type(weight.detach() @ weight.detach()) is DerivedDTensor
    finally:
        dist.destroy_process_group()


def test_dispatch_comes_before_dtensors_own_in_c_plus_plus(monkeypatch):
    monkeypatch.setattr(GenericTorchDispatchRuleHolder, "find", GenericTorchDispatchRuleHolder.find)
    parameter._dispatch_before_dtensor()
    for cls in (ShardedDTensor, DerivedDTensor):
        found = find_torch_dispatch_rule(torch.ops.aten.linalg_vector_norm.default, cls)
        assert found is cls.__torch_dispatch__.__func__
    assert find_torch_dispatch_rule(torch.ops.aten.add.Tensor, DTensor) is None


def _answer(operation, weight):
    try:
        answer = operation(weight)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    answer = answer[0] if isinstance(answer, tuple) else answer
    if isinstance(answer, (int, float, bool)):
        return torch.tensor(float(answer))
    return answer.full_tensor() if hasattr(answer, "full_tensor") else answer


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"align": "column"}, ConfigurationError, r"align must be one of .*'column'"),
        ({"shard_placement_fn": lambda _: Shard(2)}, ConfigurationError, "one of its dimensions"),
        ({"shard_placement_fn": lambda _: Replicate()}, ConfigurationError, "must give Shard"),
        ({"shard_placement_fn": lambda _: Shard(1)}, NotSupportedError, "dealt out evenly to 2"),
        (
            {"shard_placement_fn": lambda _: Shard(1), "align": "element"},
            NotSupportedError,
            'leave align="row"',
        ),
    ],
)
@on_ranks(2)
def test_what_is_no_placement_is_refused(comm, options, error, match):
    layer = nn.Linear(3, 4, bias=False)
    with pytest.raises(error, match=match):
        ours(layer, mesh=comm, **options)
    assert type(layer) is nn.Linear
