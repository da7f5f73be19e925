# SPDX-License-Identifier: Apache-2.0
"""Refuse what does not fit into memory before anything is built."""

import pytest

from fullshard.core.errors import ConfigurationError
from fullshard.train.config import resolve
from fullshard.train.fits import check_memory, needed_bytes, way_to_fit

GIB = 2**30


def test_a_model_that_cannot_fit_is_refused_with_what_it_needs():
    config = resolve(overrides=["model.preset=llama3-8b"])
    needed = needed_bytes(config, 2)
    assert needed > 48 * GIB  # half of 8 billion parameters, gradients and moments in float32
    with pytest.raises(ConfigurationError, match=r"llama3-8b needs about \d+\.\d+ GiB .* 2 ranks"):
        check_memory(config, 2, needed - 1)
    check_memory(config, 2, needed)


def test_small_ones_fit_and_digits_are_not_asked_about():
    for preset in ("nano", "micro"):
        check_memory(resolve(overrides=[f"model.preset={preset}"]), 2, 2 * GIB)
    check_memory(resolve(model="mnist"), 2, 1)


def test_when_memory_runs_out_there_is_a_smallest_change():
    config = resolve(overrides=["model.preset=small"])
    needed = needed_bytes(config, 4)
    assert "which is there: something else holds memory" in way_to_fit(config, 4, needed)
    said = way_to_fit(config, 4, int(0.9 * needed))
    assert said.startswith("The planner's smallest change that fits: ")
    assert "," not in said  # one is enough
    assert "knows no three changes" in way_to_fit(config, 4, needed // 100)
    assert way_to_fit(resolve(model="mnist"), 4, 1) == ""


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_what_is_sharded_less_needs_more(strategy):
    least = needed_bytes(resolve(overrides=["model.preset=small"]), 4)
    less = resolve(overrides=["model.preset=small", f"shard.strategy={strategy}"])
    assert needed_bytes(less, 4) > least
    jax = resolve(overrides=["model.preset=small"], engine="jax")
    assert needed_bytes(jax, 4) < least
