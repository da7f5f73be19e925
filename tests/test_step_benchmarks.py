# SPDX-License-Identifier: Apache-2.0
"""What benchmarks of steps hold engines against: bytes that must cross, and equal work."""

import importlib
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmark_module(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.mark.parametrize(
    ("engine", "ranks", "full_buffers"),
    [
        ("plain, alone", 4, 0),
        ("DDP", 2, 1),
        ("DDP", 4, 1.5),
        ("FSDP1", 2, 1.5),
        ("fullshard FULL_SHARD", 4, 2.25),
        ("FSDP2 SHARD_GRAD_OP", 4, 1.5),
        ("fullshard FULL_SHARD, bf16", 2, 0.75),
        ("fullshard FULL_SHARD, int8", 4, 2.25 * 65 / 256),
        ("fullshard FULL_SHARD, int8, reduces in bf16", 4, (2 * 65 / 256 + 1 / 2) * 3 / 4),
        # Within pairs 3/2 of the parameters, and an all-reduce of half the gradients across.
        ("fullshard HYBRID_SHARD", 4, 2),
        ("fullshard FULL_SHARD, direct", 2, 1.5),  # two hosts, whatever ranks they have
    ],
)
def test_bytes_that_must_cross(benchmark_module, engine, ranks, full_buffers):
    must_cross_bytes = benchmark_module("step_netlab").must_cross_bytes
    assert must_cross_bytes(engine, 1000, ranks) == pytest.approx(1000 * full_buffers)


def test_the_plain_model_updates_as_much_as_a_rank_with_a_shard(benchmark_module):
    training_step = benchmark_module("training_step")
    params = [torch.empty(10) for _ in range(6)]
    assert training_step.part_of(params, 1) == params
    assert len(training_step.part_of(params, 2)) == 3
    assert len(training_step.part_of(iter(params), 4)) == 2  # at least a quarter


def test_ratios_are_paired(benchmark_module):
    throughput_ratio = benchmark_module("training_step").throughput_ratio
    # A machine that was ten times slower in one round makes no engine faster.
    assert throughput_ratio([1.0, 10.0, 1.0], [2.0, 20.0, 2.0]) == 2.0


def test_without_root_or_tools_there_is_no_lab(benchmark_module, monkeypatch, tmp_path):
    netlab = benchmark_module("netlab")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(netlab.Unavailable, match="need root"), netlab.Netlab(2, 1000):
        pass
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(netlab.Unavailable, match="install iproute2"), netlab.Netlab(2, 1000):
        pass
