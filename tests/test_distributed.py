# SPDX-License-Identifier: Apache-2.0
"""The four calls of a training script, alone and as ranks of a launcher."""

import json
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.limits import PROCESS_S
from torch import nn

import fullshard as sft
from fullshard.core.errors import ConfigurationError, UsageError
from fullshard.torch import FullyShardedDataParallel, ShardingStrategy
from fullshard.torch.comm.sibling_groups import timeout_s_of

SCRIPT = Path(__file__).parent / "support" / "script_of_ranks.py"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "OMPI_", "PMIX_", "SLURM_")


@pytest.fixture
def alone(monkeypatch):
    """No launcher, and no group left behind."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)
    yield monkeypatch
    sft.cleanup()


def test_a_single_process_is_a_world_of_one(alone):
    assert sft.get_device() == torch.device("cpu") or torch.cuda.is_available()
    before = dict(os.environ)
    sft.initialize_distributed_training()
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert dict(os.environ) == before
    assert [each.rank for each in sft.memory_of_ranks()] == [0]
    model = FullyShardedDataParallel(nn.Linear(4, 4).to(sft.get_device()))
    model(torch.ones(2, 4, device=sft.get_device())).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    sft.cleanup()
    assert not dist.is_initialized()
    sft.cleanup()


def test_every_strategy_works_alone(alone):
    sft.initialize_distributed_training()
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"):
        model = FullyShardedDataParallel(
            nn.Linear(4, 4), sharding_strategy=ShardingStrategy[strategy]
        )
        model(torch.ones(2, 4)).sum().backward()
        assert next(model.parameters()).grad is not None


def test_a_second_call_must_want_the_same(alone):
    sft.initialize_distributed_training("gloo", timeout_s=40)
    group = dist.group.WORLD
    assert timeout_s_of(group) == 40
    sft.initialize_distributed_training()
    sft.initialize_distributed_training("gloo", 40)
    sft.initialize_distributed_training("cpu:gloo,cuda:gloo")
    assert dist.group.WORLD is group
    with pytest.raises(UsageError, match=r"over 'cpu:gloo,cuda:gloo' already.*cleanup\(\)"):
        sft.initialize_distributed_training("cpu:gloo")
    with pytest.raises(UsageError, match="with timeout_s=40, not 50"):
        sft.initialize_distributed_training(timeout_s=50)
    sft.cleanup()
    sft.initialize_distributed_training(timeout_s=50)
    assert timeout_s_of(dist.group.WORLD) == 50


def test_a_group_that_somebody_else_made_is_used(alone):
    store = dist.HashStore()
    timeout = timedelta(seconds=30)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
    group = dist.group.WORLD
    sft.initialize_distributed_training(timeout_s=50)
    assert dist.group.WORLD is group


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_a_time_that_is_none_is_refused_before_joining(alone, timeout_s):
    with pytest.raises(ConfigurationError, match="timeout_s must be above 0"):
        sft.initialize_distributed_training(timeout_s=timeout_s)
    assert not dist.is_initialized()


def test_half_a_launcher_is_refused(alone):
    alone.setenv("RANK", "0")
    with pytest.raises(ConfigurationError, match="but not WORLD_SIZE"):
        sft.initialize_distributed_training()


def test_after_an_error_the_group_is_left_to_the_end_of_the_process(alone):
    sft.initialize_distributed_training()

    def fail():
        try:
            raise ValueError("mine")
        finally:
            sft.cleanup()

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert dist.is_initialized()


def test_log_is_one_line_with_the_time_of_rank_0(alone, capsys):
    sft.log("Epoch", 3, "loss", 0.5)
    assert re.fullmatch(
        r"\[\d\d:\d\d:\d\d \+\d+\.\ds\] Epoch 3 loss 0\.5\n", capsys.readouterr().out
    )
    sft.log("a\nb")
    assert capsys.readouterr().out.endswith("s]\na\nb\n")
    alone.setenv("RANK", "2")
    sft.log("not mine to say")
    assert capsys.readouterr().out == ""
    sft.log("mine", all_ranks=True)
    assert capsys.readouterr().out.endswith(" rank 2] mine\n")
    alone.setenv("RANK", "0")
    sft.log("again")
    assert capsys.readouterr().out.endswith("] again\n")


def test_the_device_is_that_of_the_local_rank(alone):
    alone.setattr(torch.cuda, "is_available", lambda: True)
    alone.setattr(torch.cuda, "device_count", lambda: 4)
    alone.setattr(torch.cuda, "current_device", lambda: 3)
    assert sft.get_device() == torch.device("cuda", 3)
    for rank, local, expected in (("9", "1", 1), ("9", None, 1), ("5", "6", 2)):
        for name, value in (("RANK", rank), ("WORLD_SIZE", "16"), ("LOCAL_RANK", local)):
            alone.delenv(name, raising=False)
            if value is not None:
                alone.setenv(name, value)
        assert sft.get_device() == torch.device("cuda", expected)
    alone.setattr(torch.cuda, "device_count", lambda: 1)  # the launcher shows each rank its own
    assert sft.get_device() == torch.device("cuda", 0)


def run_ranks(environments):
    """The script as one process for each environment; (return code, output, errors) of each."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", SCRIPT],
            env={**kept, "GLOO_SOCKET_IFNAME": "lo", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    try:
        ended = [process.communicate(timeout=PROCESS_S) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(p.returncode, *texts) for p, texts in zip(started, ended, strict=True)]


def of_slurm(rank, port):
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": str(rank),
        "SLURM_JOB_NODELIST": "localhost",
        "MASTER_PORT": str(port),
    }


@pytest.mark.slow
def test_a_script_under_slurm_that_forgets_to_clean_up(unused_port):
    ranks = run_ranks([of_slurm(rank, unused_port) for rank in range(2)])
    for number, (code, output, errors) in enumerate(ranks):
        assert (code, errors) == (0, "")
        lines = output.splitlines()
        told = json.loads(lines[-1])
        assert told.pop("span") == (160, 96)[number]
        assert told == {
            "rank": number,
            "size": 2,
            "backend": "cpu:gloo,cuda:gloo",
            "ranks": [0, 1],
            "heavier": True,
        }
        said = [line.split("] ", 1)[1] for line in lines[:-1]]
        alone = ["before joining", "Epoch 0", "Epoch 1"] if number == 0 else []
        assert [line.split(",")[0] for line in said] == [*alone, "told by all"]
