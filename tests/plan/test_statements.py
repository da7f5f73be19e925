# SPDX-License-Identifier: Apache-2.0
"""The statements of the reference document, as they should have been."""

import pytest

from fullshard.core.errors import ConfigurationError
from fullshard.plan import Run, cluster_of, named_device, named_model
from fullshard.plan.statements import (
    compare_parallelisms,
    efficiency,
    link_needed,
    model_state,
    sent_bytes,
)

GB = 1e9


def test_memory_with_and_without_sharding():
    alone, sharded = model_state(10**9), model_state(10**9, 8)
    assert alone.total_bytes == 16 * GB
    assert sharded.total_bytes == 2 * GB
    assert sharded.parameters_bytes == 0.5 * GB


@pytest.mark.parametrize(
    ("numel", "devices", "alone_gb", "sharded_gb"),
    [
        (175e9, 1024, 2800, 2.734),
        (65e9, 64, 1040, 16.25),
        (65e9, 2048, 1040, 0.508),
        (10e9, 8, 160, 20),
    ],
)
def test_examples_count_gradients_and_optimizer_too(numel, devices, alone_gb, sharded_gb):
    assert model_state(int(numel)).total_bytes / GB == pytest.approx(alone_gb)
    sharded = model_state(int(numel), devices).total_bytes
    assert sharded / GB == pytest.approx(sharded_gb, abs=1e-3)


def test_sharding_sends_one_and_a_half_times_what_data_parallelism_does():
    sent = sent_bytes(4 * GB, 8)
    assert sent["FULL_SHARD"] / sent["data parallel"] == 1.5
    assert sent["SHARD_GRAD_OP"] == sent["data parallel"] == 7 * GB


def test_batches_and_overlap():
    assert efficiency(10e-3, 15e-3, overlapped=False) == pytest.approx(0.4)
    assert efficiency(80e-3, 15e-3, overlapped=False) == pytest.approx(0.842, abs=1e-3)
    assert efficiency(10e-3, 15e-3) == pytest.approx(2 / 3)
    assert efficiency(80e-3, 15e-3) == 1


def test_the_link_that_is_needed_depends_on_the_batch():
    model, cluster = named_model("llama3-8b"), cluster_of(named_device("h100"), 64)
    small = link_needed(model, Run(sequence=512), cluster)
    large = link_needed(model, Run(sequence=8192), cluster)
    assert large.bytes_per_s < 0.1 * small.bytes_per_s
    assert large.enough
    slow = cluster_of(named_device("h100"), 64, between_bandwidth=0.1e9)
    assert not link_needed(model, Run(sequence=8192), slow).enough
    with pytest.raises(ConfigurationError, match="needs no link"):
        link_needed(model, Run(), cluster_of(named_device("h100"), 1))


def test_parallelisms_beside_each_other():
    found = {
        each.name: each
        for each in compare_parallelisms(named_model("llama3-8b"), Run(accumulate=8), 8)
    }
    assert found["FULL_SHARD"].state_bytes == found["data parallel"].state_bytes / 8
    assert found["pipeline"].idle_share == pytest.approx(7 / 15)
    assert found["pipeline"].sent_bytes < found["FULL_SHARD"].sent_bytes
    assert found["tensor"].sent_bytes > found["pipeline"].sent_bytes


def test_sizes_below_one_are_refused():
    with pytest.raises(ConfigurationError, match="at least 1"):
        model_state(0)
