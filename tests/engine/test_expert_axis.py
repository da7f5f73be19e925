# SPDX-License-Identifier: Apache-2.0
"""Experts dealt out over one axis of a mesh, everything else in shards over all of its ranks."""

import itertools
import math
from functools import cache

import pytest
import torch
from support.expert_workers import (
    ACTIVE,
    EXPERTS,
    HIDDEN,
    MAX_NORM,
    WIDTH,
    Trained,
    batches,
    example,
    ignore,
    mistakes,
    tensor_mistakes,
    train,
    train_and_save,
    train_beside_tensor_parallelism,
    train_by_parameter,
    train_hybrid,
    whole,
)
from support.world import World
from torch import nn

from fullshard.torch import StackedExperts


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
    """The most elements of a rank, of matrices (rows, columns) that are cut into whole rows."""
    return sum(math.ceil(rows / ranks) * columns for rows, columns in matrices)


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
        for mine, one in ((found.grads, wanted.grads), (found.params, wanted.params)):
            if mine:
                assert mine.keys() == one.keys()
            for name, value in mine.items():
                torch.testing.assert_close(value, one[name], rtol=0, atol=1e-12)
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
        ("stacked", 2, 2, 3, False),
        ("stacked", 2, 2, 3, True),
        ("stacked", 4, 1, 1, False),
        ("stacked", 1, 4, 1, False),
        ("list", 2, 2, 1, False),
    ],
)
def test_steps_are_those_of_one_process(gloo_world, kind, experts, shards, micro_batches, keeps):
    run(gloo_world, kind, experts, shards, micro_batches, keeps=keeps)


def test_the_rest_behind_the_wrapper(gloo_world):
    expected = in_one_process("stacked", 2, 2, 1)
    of_ranks = gloo_world.run_joined(4, train, "stacked", 2, 2, 1, door="wrapper")
    check(of_ranks, expected, bytes_too=False)


@pytest.mark.parametrize("experts", [1, 4])
def test_a_checkpoint_goes_on_with_another_number_of_ranks_for_experts(
    gloo_world, tmp_path, experts
):
    gloo_world.run_joined(4, train_and_save, "stacked", 2, 2, tmp_path / "step", 3)
    of_ranks = gloo_world.run_joined(
        4, train, "stacked", experts, 4 // experts, 1, folder=tmp_path / "step"
    )
    check(of_ranks, in_one_process("stacked", experts, 4 // experts, 1), bytes_too=False)


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


def test_replicas_of_experts(gloo_world):
    """A mesh of two replicas of experts that are dealt out over two ranks."""
    expected = in_one_process("stacked", 2, 2, 1)
    check(gloo_world.run_joined(4, train_hybrid), expected, bytes_too=False)


@pytest.mark.parametrize("door", ["fully_shard", "wrapper"])
def test_experts_beside_tensor_parallelism(gloo_world, door):
    expected = in_one_process("stacked", 2, 1, 1)
    of_ranks = gloo_world.run_joined(4, train_beside_tensor_parallelism, 2, 1, door)
    check(of_ranks[::2], expected, bytes_too=False)
    check(of_ranks[1::2], expected, bytes_too=False)


def test_mistakes_beside_tensor_parallelism_are_refused(gloo_world):
    messages = [
        "'up' is placed as (Shard(dim=0),) over ('tensor',), which cuts experts",
        "'up' is a DTensor already, over dims ('other',)",
        "parameters of experts in a list are DTensors, which StackedExperts cannot stack",
    ]
    for told in gloo_world.run_joined(2, tensor_mistakes):
        for text, message in zip(told, messages, strict=True):
            assert message in text


def test_parameters_on_a_mesh_of_their_own(gloo_world):
    """As ``ShardPlacementResult`` of PyTorch's FSDP2 asks for it; torchtitan's experts do."""
    results = zip(*gloo_world.run_joined(4, train_by_parameter), strict=True)
    of_ranks, kinds, texts, (order, *_) = results
    check(of_ranks, in_one_process("stacked", 2, 2, 1), bytes_too=False)
    assert set(kinds) == {"Sequential"}, "it was refused before anything was changed"
    assert "gives 'other' of Linear another mesh" in texts[0]
    assert order.index(("gather", "mixture.experts")) < order.index(("free", "before")), str(order)


def test_what_is_ignored_is_left_alone(gloo_world):
    shape = (EXPERTS // 2, WIDTH, HIDDEN)
    assert gloo_world.run_joined(2, ignore) == [(True, shape)] * 2


def test_mistakes_are_refused_with_the_way_out(gloo_world):
    messages = [
        "ignored_params names parameters of experts in a list, which are stacked",
        "8 experts cannot be dealt out over the 3 ranks of mesh dim 'expert': choose a dim that",
        "'up' has 8, 'gate' has 4; keep others (a router) in a module beside it",
        "needs a DeviceMesh with a dim named 'ep' and one or two more",
        "experts 0 and 2 differ in their class, or in the name, shape, dtype",
        "expert 0 has buffers",
        "'up' is a DTensor already",
        "experts 'mixture.experts' get the tokens of ranks [0, 1, 2], all of the mesh",
    ]
    for told in gloo_world.run_joined(3, mistakes):
        for text, message in zip(told, messages, strict=True):
            assert message in text


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
