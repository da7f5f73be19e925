# SPDX-License-Identifier: Apache-2.0
"""`torch.compile` of blocks, before and after sharding, and of a sharded model."""

import pytest
import torch
from support.compile_workers import (
    compiled_after,
    compiled_before,
    compiled_in_part,
    compiled_whole,
    compiled_wrapper_is_unit,
    eager,
    train,
)
from support.sampling import pairwise

DOORS = ("wrapper", "function")
HOWS = ("method", "function")


@pytest.fixture(scope="module")
def in_eager(gloo_world):
    return {door: gloo_world.run(2, train, eager, door) for door in DOORS}


def check(found, expected):
    for (losses, params, _, ops), (eager_losses, eager_params, _, eager_ops) in zip(
        found, expected, strict=True
    ):
        assert losses == pytest.approx(eager_losses, abs=1e-12)
        assert params.keys() == eager_params.keys()
        for name, value in eager_params.items():
            torch.testing.assert_close(params[name], value, rtol=0, atol=1e-12)
        assert ops == eager_ops


@pytest.mark.parametrize(
    ("build", "door", "how"),
    pairwise(
        {
            "before": compiled_before,
            "wrapper is unit": compiled_wrapper_is_unit,
            "after": compiled_after,
        },
        DOORS,
        HOWS,
    ),
)
def test_blocks_are_one_graph_that_is_compiled_once(gloo_world, in_eager, build, door, how):
    """A break raises, since ``fullgraph`` is asked for; so does a second compilation."""
    runs = gloo_world.run(2, train, build, door, how, backend="aot_eager", fullgraph=True)
    check(runs, in_eager[door])
    for _, _, graphs, _ in runs:
        assert graphs == [1, 1, 1, 1]  # both blocks share it


def test_inductor(gloo_world, in_eager):
    runs = gloo_world.run(2, train, compiled_in_part, "function", fullgraph=True)
    check(runs, in_eager["function"])


@pytest.mark.parametrize(("door", "how"), [*zip(DOORS, HOWS, strict=True)])
def test_a_whole_model_is_compiled_in_parts(gloo_world, in_eager, door, how):
    """Graphs end at units; torch leaves a loop over units to Python."""
    runs = gloo_world.run(2, train, compiled_whole, door, how, backend="aot_eager")
    check(runs, in_eager[door])
    for _, _, graphs, _ in runs:
        assert graphs == [1, 1, 1, 1]
