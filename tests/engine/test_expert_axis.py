# SPDX-License-Identifier: Apache-2.0
"""Experts dealt out over one axis of a mesh, everything else in shards over all of its ranks."""

import itertools
import math
import re
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.expert_workers import (
    ACTIVE,
    EXPERTS,
    HIDDEN,
    MAX_NORM,
    WIDTH,
    Expert,
    Trained,
    batches,
    example,
    steps_of,
    train,
    train_and_save,
    whole,
)
from support.sampling import survey
from support.world import World, on_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor

from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.torch import (
    StackedExperts,
    fully_shard,
    shard_experts,
    tracing,
)


@pytest.fixture(scope="module", autouse=True)
def of_no_other_test(gloo_world):
    """Start processes anew: torch finds meshes of groups that are gone by their ranks and names."""
    gloo_world.close()


@cache
def in_one_process(kind, experts, shards, micro_batches):
    """The same steps on the whole batch, and the bytes that each rank sends, counted on paper."""
    model = whole(kind)
    if kind == "list":
        model.mixture.experts = StackedExperts(list(model.mixture.experts))
    ranks = experts * shards
    chosen = []  # by forward: of each row the places on the experts' axis that it goes to
    model.mixture.router.register_forward_hook(
        lambda _module, _inputs, scores: chosen.append(
            scores.topk(ACTIVE).indices // (EXPERTS // experts)
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    norms, grads, rows = [], {}, []
    for step, data in enumerate(batches(ranks, micro_batches)):
        chosen.clear()
        losses = [model(rows) for micro_batch in data for rows in micro_batch]
        torch.stack(losses).mean().backward()
        if not step:
            grads = {name: param.grad.clone() for name, param in model.named_parameters()}
            rows = rows_sent(chosen, experts, ranks)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    params = {name: param.detach() for name, param in model.named_parameters()}
    of_experts = sum(p.numel() for n, p in params.items() if ".experts." in n) // experts
    router = [(EXPERTS, WIDTH), (EXPERTS, 1)]
    # Forward, backward and the reduce. Experts come last in forward and first in backward, so they
    # stay full in between, like the root's unit.
    sent = {
        "before": bytes_sent(3, rows_of([(WIDTH, WIDTH), (WIDTH, 1)], ranks), ranks),
        "mixture.experts": bytes_sent(2, of_experts // shards, shards),
        "(root)": bytes_sent(2, rows_of([*router, (1, WIDTH), (1, 1)], ranks), ranks),
    }
    return [Trained(norms, grads, params, {**sent, "rows": of_rank}) for of_rank in rows]


def rows_of(matrices, ranks):
    """The most elements of a rank, of small matrices (rows, columns) cut into rows and padded."""
    return sum(-(math.ceil(rows / ranks) * columns // -32) * 32 for rows, columns in matrices)


def bytes_sent(passes, slice_numel, ranks):
    """Bytes of float64 that a rank sends when slices, of 32 elements' multiples, are exchanged."""
    return passes * math.ceil(slice_numel / 32) * 32 * 8 * (ranks - 1)


def rows_sent(chosen, experts, ranks):
    """Bytes that each rank sends: rows and their results there and back, and their gradients."""
    sent = [0] * ranks
    for number, places in enumerate(chosen):
        rank = number % ranks
        neighbours = range(rank - rank % experts, rank - rank % experts + experts)
        for place, other in enumerate(neighbours):
            travel = int((places == place).sum()) * WIDTH * 8
            if other != rank:
                sent[rank] += 2 * travel  # a row leaves, and the gradient of its result
                sent[other] += 2 * travel  # a result leaves, and the gradient of the row
    return sent


def check(of_ranks, expected, *, bytes_too=True):
    for found, wanted in zip(of_ranks, expected, strict=True):
        assert found.norms == pytest.approx(wanted.norms[-len(found.norms) :], abs=1e-12)
        torch.testing.assert_close(found.params, wanted.params, rtol=0, atol=1e-12)
        if found.grads:
            torch.testing.assert_close(found.grads, wanted.grads, rtol=0, atol=1e-12)
        if bytes_too:
            assert found.sent_bytes == wanted.sent_bytes


def run(world, kind, experts, shards, micro_batches, **options):
    expected = in_one_process(kind, experts, shards, micro_batches)
    assert min(expected[0].norms) > MAX_NORM, "clipping must do something"
    unused = expected[0].grads[
        "mixture.experts." + ("up" if kind == "stacked" else "each.up.weight")
    ]
    assert not unused[0].any(), "an expert gets no token"
    check(
        world.run_joined(experts * shards, train, kind, experts, shards, micro_batches, **options),
        expected,
    )


@pytest.mark.parametrize(
    ("kind", "experts", "shards", "micro_batches", "keeps"),
    [
        ("stacked", 2, 2, 2, True),
        survey(("stacked", 4, 1, 1, False)),
        ("list", 2, 2, 1, False),
    ],
)
def test_steps_are_those_of_one_process(gloo_world, kind, experts, shards, micro_batches, keeps):
    run(gloo_world, kind, experts, shards, micro_batches, keeps=keeps)


def test_the_rest_behind_the_wrapper(gloo_world):
    expected = in_one_process("stacked", 2, 2, 1)
    of_ranks = gloo_world.run_joined(4, train, "stacked", 2, 2, 1, door="wrapper")
    check(of_ranks, expected, bytes_too=False)


def test_a_checkpoint_goes_on_with_another_number_of_ranks_for_experts(gloo_world, tmp_path):
    gloo_world.run_joined(4, train_and_save, "stacked", 2, 2, tmp_path / "step", 3)
    of_ranks = gloo_world.run_joined(4, train, "stacked", 4, 1, 1, folder=tmp_path / "step")
    check(of_ranks, in_one_process("stacked", 4, 1, 1), bytes_too=False)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped product")
def test_the_examples_grouped_product_is_the_one_of_each_group():
    torch.manual_seed(0)
    counts = torch.tensor([3, 0, 5, 0])
    both = []
    for dtype in (torch.bfloat16, torch.float32):  # grouped, and one by one
        torch.manual_seed(1)
        rows = torch.randn(8, 16, dtype=torch.bfloat16).to(dtype).requires_grad_()
        weights = torch.randn(4, 16, 8, dtype=torch.bfloat16).to(dtype).requires_grad_()
        result = example()["grouped"](rows, weights, counts)
        result.square().sum().backward()  # a gradient in memory of its own, which it wants
        both.append([each.float() for each in (result, rows.grad, weights.grad)])
    for grouped, one_by_one in zip(*both, strict=True):
        torch.testing.assert_close(grouped, one_by_one, rtol=0.03, atol=0.3)


def train_hybrid():
    """Steps on a mesh of replicas, slices and experts."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "expert"))
    model = whole("stacked", mesh.get_group("expert"))
    shard_experts(model.mixture.experts, mesh=mesh, experts="expert")
    return steps_of(fully_shard(model), mesh, 1)


def test_replicas_of_experts(gloo_world):
    """A mesh of two replicas of experts that are dealt out over two ranks."""
    expected = in_one_process("stacked", 2, 2, 1)
    check(gloo_world.run_joined(4, train_hybrid), expected, bytes_too=False)


class _CopyToTensorRanks(torch.autograd.Function):
    """Pass on the input of a product cut over ``group``; sum its gradient over the ranks."""

    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone(), group=ctx.group)
        return grad, None


class _SumOfTensorRanks(torch.autograd.Function):
    """Sum what comes out of such a product; all ranks have the gradient of the sum."""

    @staticmethod
    def forward(ctx, rows, group):
        dist.all_reduce(rows := rows.clone(), group=group)
        return rows

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def tensor_parallel(experts, tensor):
    """Cut the hidden dimension of stacked ``experts`` over the ranks of the mesh ``tensor``."""
    for name, dim in (("up", 2), ("down", 1)):
        param = experts.get_parameter(name)
        setattr(experts, name, nn.Parameter(distribute_tensor(param.data, tensor, [Shard(dim)])))
    forward, group = experts.forward, tensor.get_group()

    def cut(rows, counts):
        rows = forward(_CopyToTensorRanks.apply(rows, group), counts)
        return _SumOfTensorRanks.apply(rows, group)

    experts.forward = cut


def train_beside_tensor_parallelism(experts, shards, folder=None):
    """Steps with two ranks of tensor parallelism in each place of the mesh of experts and slices.

    With ``folder`` the last two, on what is loaded there.
    """
    names = ("shard", "expert", "tensor")
    mesh = init_device_mesh("cpu", (shards, experts, 2), mesh_dim_names=names)
    model = whole("stacked", mesh.get_group("expert"))
    tensor_parallel(model.mixture.experts, mesh["tensor"])
    shard_experts(model.mixture.experts, mesh=mesh, experts="expert")
    data = mesh["shard", "expert"]._flatten("data")
    fully_shard(model, mesh=data)
    return steps_of(model, data, 1, folder=folder)


def test_experts_beside_tensor_parallelism(gloo_world):
    expected = in_one_process("stacked", 2, 1, 1)
    of_ranks = gloo_world.run_joined(4, train_beside_tensor_parallelism, 2, 1)
    check(of_ranks[::2], expected, bytes_too=False)
    check(of_ranks[1::2], expected, bytes_too=False)


@on_processes(2, joined=True)
def test_mistakes_beside_tensor_parallelism_are_refused():
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("shard", "expert", "tensor"))
    by_experts, elsewhere = whole().mixture.experts, whole().mixture.experts
    by_experts.up = nn.Parameter(distribute_tensor(by_experts.up.data, mesh["tensor"], [Shard(0)]))
    tensor_parallel(elsewhere, init_device_mesh("cpu", (2,), mesh_dim_names=("other",)))
    listed = nn.ModuleList(Expert() for _ in range(2))
    for expert in listed:
        distribute_module(expert, mesh["tensor"])
    for told, experts in (
        ("'up' is placed as (Shard(dim=0),) over ('tensor',), which cuts experts", by_experts),
        ("'up' is a DTensor already, over dims ('other',)", elsewhere),
        ("parameters of experts in a list are DTensors, which StackedExperts cannot", listed),
    ):
        refused(told, shard_experts, experts, mesh=mesh, experts="expert")


def train_by_parameter():
    # torch keeps what it knows of equal meshes, also of those of a world that has ended.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("slices", "places"))
    model = whole("stacked", mesh.get_group("places"))
    experts = model.mixture.experts
    for name, param in list(experts.named_parameters()):
        part = param.data.chunk(2)[mesh.get_local_rank("places")].clone()
        dealt = DTensor.from_local(part, mesh["places"], [Shard(0)], run_check=False)
        setattr(experts, name, nn.Parameter(dealt))
    shared = SimpleNamespace(mesh=mesh["slices"], shard_mesh_dim=0, replicate_mesh_dim=None)
    inside = set(experts.parameters())

    def chosen(param):
        return SimpleNamespace(placement=None, mesh_info=shared) if param in inside else Shard(0)

    fully_shard(model.before)
    fully_shard(model.mixture, shard_placement_fn=chosen)
    model.before.set_modules_to_forward_prefetch([model.mixture])
    zeros = torch.zeros(1, WIDTH, dtype=torch.float64)
    fully_shard(model)(zeros).backward()
    with tracing(model) as trace:
        model(zeros).backward()
    model.zero_grad()
    experts.set_gradient_divide_factor(4.0)  # tokens of all ranks reach them
    torn = nn.Sequential(nn.Linear(4, 4))
    torn[0].other = nn.Parameter(distribute_tensor(torch.ones(4), mesh["places"], [Shard(0)]))
    inside.add(torn[0].other)
    told = "gives 'other' of Linear another mesh"
    refused(told, fully_shard, torn, shard_placement_fn=chosen)
    assert type(torn) is nn.Sequential, "it was refused before anything was changed"
    order = [(record.op, record.unit) for record in trace.records]
    assert order.index(("gather", "mixture.experts")) < order.index(("free", "before")), str(order)
    return steps_of(model, mesh, 1)


def test_parameters_on_a_mesh_of_their_own(gloo_world):
    """As ``ShardPlacementResult`` of PyTorch's FSDP2 asks for it; torchtitan's experts do."""
    of_ranks = gloo_world.run_joined(4, train_by_parameter)
    check(of_ranks, in_one_process("stacked", 2, 2, 1), bytes_too=False)


@on_processes(2, joined=True)
def test_what_is_ignored_is_left_alone():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "expert"))
    model = whole(group=mesh.get_group("expert"))
    experts = model.mixture.experts
    experts.scale = scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
    shard_experts(experts, mesh=mesh, experts="expert", ignored_params={scale})
    fully_shard(model, ignored_params={scale})
    model(batches(2, 1)[0, 0, dist.get_rank()]).backward()
    assert experts.scale is scale
    assert tuple(experts.up.to_local().shape) == (EXPERTS // 2, WIDTH, HIDDEN)


def refused(told, function, *args, **kwargs):
    with pytest.raises((ConfigurationError, NotSupportedError), match=re.escape(told)):
        function(*args, **kwargs)


@on_processes(3, joined=True)
def test_mistakes_are_refused_with_the_way_out():
    mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("shard", "expert"))
    other = init_device_mesh("cpu", (3, 1), mesh_dim_names=("shard", "expert"))

    def experts(**more):
        stacked = whole().mixture.experts
        for name, count in more.items():
            setattr(stacked, name, nn.Parameter(torch.zeros(count, WIDTH)))
        return stacked

    dealt_out = shard_experts(experts(), mesh=other, experts="expert")
    lonely = whole(group=other.get_group("expert"))
    shard_experts(lonely.mixture.experts, mesh=other, experts="expert")
    fully_shard(lonely, mesh=dist.new_subgroups(1)[0])
    listed = nn.ModuleList(Expert() for _ in range(3))
    on_mesh = {"mesh": mesh, "experts": "expert"}
    refused(
        "ignored_params names parameters of experts in a list, which are stacked",
        *(shard_experts, listed), **on_mesh, ignored_params={listed[0].up.weight},
    )  # fmt: skip
    refused(
        "8 experts cannot be dealt out over the 3 ranks of mesh dim 'expert': choose a dim that",
        *(shard_experts, experts()), **on_mesh,
    )  # fmt: skip
    refused(
        "'up' has 8, 'gate' has 4; keep others (a router) in a module beside it",
        *(shard_experts, experts(gate=4)), **on_mesh,
    )  # fmt: skip
    refused(
        "needs a DeviceMesh with a dim named 'ep' and one or two more",
        *(shard_experts, experts()), mesh=mesh, experts="ep",
    )  # fmt: skip
    unlike = nn.ModuleList([Expert(), Expert(), Expert().double()])
    told = "experts 0 and 2 differ in their class, or in the name, shape, dtype"
    refused(told, shard_experts, unlike, **on_mesh)
    normed = nn.ModuleList([nn.BatchNorm1d(2) for _ in range(3)])
    refused("expert 0 has buffers", shard_experts, normed, **on_mesh)
    refused("'up' is a DTensor already", shard_experts, dealt_out, mesh=other, experts="expert")
    told = "experts 'mixture.experts' get the tokens of ranks [0, 1, 2], all of the mesh"
    refused(told, lonely, batches(3, 1)[0, 0, 0])


if __name__ == "__main__":  # all of them: PYTHONPATH=tests python tests/engine/test_expert_axis.py
    world = World(16)
    for kind, experts, shards, micro_batches in itertools.product(
        ("stacked", "list"), (1, 2, 4), (1, 2, 4), (1, 3)
    ):
        for keeps in {False, micro_batches > 1}:
            run(world, kind, experts, shards, micro_batches, keeps=keeps)
            print(f"{kind}: {experts=} {shards=} {micro_batches=} {keeps=}", flush=True)
    for experts, shards in itertools.product((1, 2, 4), (1, 2)):
        of_ranks = world.run_joined(
            2 * experts * shards, train_beside_tensor_parallelism, experts, shards
        )
        check(of_ranks[::2], in_one_process("stacked", experts, shards, 1), bytes_too=False)
        print(f"beside two ranks of tensor parallelism: {experts=} {shards=}", flush=True)
    world.close()
