# SPDX-License-Identifier: Apache-2.0
"""Activations that wait on the host: less on the device, the same bytes there, never faster."""

from dataclasses import replace

import pytest

from fullshard.core.errors import ConfigurationError
from fullshard.plan import (
    Recompute,
    Run,
    SearchSpace,
    cluster_of,
    named_device,
    named_model,
    predict,
    search,
)

MODEL, CLUSTER = named_model("llama3-8b"), cluster_of(named_device("h100"), 8)


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_what_blocks_keep_is_on_the_host(recompute):
    here = Run(recompute=recompute)
    there = replace(here, offload_activations=True)
    kept, left = (predict(MODEL, run, CLUSTER) for run in (here, there))
    moved = left.memory.host_bytes
    assert kept.memory.host_bytes == 0
    if recompute is Recompute.FULL:
        assert moved == 32 * 8192 * 4096 * 2  # the inputs of 32 blocks
    less = kept.memory.allocated_bytes - left.memory.allocated_bytes
    assert 0.8 * moved < less <= moved
    assert left.step_s >= kept.step_s


def test_a_slow_link_to_the_host_is_waited_for():
    slow = replace(CLUSTER, device=replace(CLUSTER.device, host_link=1e9))
    run = Run(recompute=Recompute.NONE, offload_activations=True)
    found = predict(MODEL, run, slow)
    assert found.step_s > 2 * found.memory.host_bytes / 1e9


def test_selective_recomputation_does_not_offload():
    with pytest.raises(ConfigurationError, match="none or full"):
        Run(recompute=Recompute.SELECTIVE, offload_activations=True)


def test_a_search_leaves_selective_recomputation_out():
    space = SearchSpace(Run(micro_batch=1, offload_activations=True), frozenset({"recompute"}))
    found = {each.run.recompute for each in search(MODEL, space, CLUSTER).ranked}
    assert found == {Recompute.NONE, Recompute.FULL}
