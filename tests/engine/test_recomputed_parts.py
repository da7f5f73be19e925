# SPDX-License-Identifier: Apache-2.0
"""Units that ranks leave out, in checkpoints of functions and modules: ranks recompute together."""

from functools import partial

import pytest
import torch
from support.optional_parts import (
    Residuals,
    check,
    check_gradients,
    patterns,
    routes,
    sharded,
    texts,
)
from support.recomputed_parts import InFunctions, RandomParts, WrappedInside, as_in_functions
from support.sampling import FULL
from support.threads import on_ranks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fullshard.core.errors import NotSupportedError
from fullshard.testing import LocalWorld
from fullshard.torch import set_prefetch

SEEDS = range(300) if FULL else (2, 3, 12, 16, 33, 40, 71, 107, 175, 227)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_trees_of_parts_and_checkpoints(seed, frozen):
    reference, ranks = RandomParts(seed, frozen), 2 + seed % 2
    batches = 1 + seed // 2 % 2
    steps = [
        [reference.patterns(ranks, 100 * seed + 10 * step + batch) for batch in range(batches)]
        for step in range(2)
    ]

    def ahead(comm):
        model = RandomParts(seed, frozen).shard(comm)
        set_prefetch(model, seed % 3, seed % 3)
        return model

    try:
        check(ranks, steps, ahead, reference, no_sync=seed % 5 == 0)
    except NotSupportedError as refused:
        assert "also runs a unit with optional units inside" in str(refused)  # noqa: PT017
        assert seed not in SEEDS or FULL


SELECTIVE = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])


@pytest.mark.parametrize("options", [{}, {"context_fn": SELECTIVE}], ids=["all", "selective"])
@pytest.mark.parametrize("saves", [False, True])
def test_a_unit_around_a_checkpoint_wrapper_has_experts_inside(saves, options):
    def wrapped(comm):
        model = WrappedInside(saves, together=False)
        model.options = options
        return model.shard(comm)

    check(3, [[routes(3, seed)] for seed in range(3)], wrapped, Residuals(saves, together=False))


@pytest.mark.parametrize("way", ["all", "by part", "blocks"])
def test_functions_of_the_root_run_parts_and_evaluation_comes_between(way):
    used = [patterns(2, seed, most=2) for seed in range(4)]
    reference = InFunctions()
    reference.way = way

    def backward(model, rank):
        for step in range(4):
            loss = model(texts(2, step)[rank], used[step][rank]).square().mean()
            with torch.no_grad():
                model(texts(2, 7)[rank], used[3 - step][rank])
            loss.backward()

    check_gradients(2, backward, lambda comm: as_in_functions(comm, way), reference)


@on_ranks(2)
def test_what_ranks_could_not_recompute_together_is_refused(comm):
    model = sharded(comm, "fully_shard")
    inside, seen = model.eye.forward, texts(2, 0)[comm.rank]
    model.eye.forward = lambda x: checkpoint(inside, x, use_reentrant=False)
    eye = model.eye

    def twice(text, used):
        x = checkpoint(eye, torch.cat([text, text[:, :2]], dim=1), use_reentrant=False)
        return model.embed(text) + x

    model.forward = twice
    with pytest.raises(NotSupportedError, match=r"'eye\.first'.* inside another one, around"):
        model(seen, {"eye": 1})


@pytest.mark.parametrize("seed", [110, 163])
def test_a_function_that_also_runs_a_unit_with_parts_inside_is_refused(seed):
    reference, ranks = RandomParts(seed), 2 + seed % 2
    used = [reference.patterns(ranks, 100 * seed + 10 * step) for step in range(2)]

    def body(comm):
        model = RandomParts(seed).shard(comm)
        for step in range(2):
            model(texts(ranks, step)[comm.rank], used[step][comm.rank]).sum().backward()

    with pytest.raises(NotSupportedError, match="also runs a unit with optional units inside"):
        LocalWorld(ranks).run(body)
