# SPDX-License-Identifier: Apache-2.0
"""``fullshard doctor`` as it is run: alone, on ranks of its own, on those of torchrun."""

import json

import pytest
import torch

from fullshard.core.errors import ConfigurationError
from fullshard.doctor import main

BAD_SCRIPT = """\
import torch
from torch.distributed.fsdp import fully_shard
fully_shard(model)
if rank == 0:
    torch.save(model.state_dict(), "model.pt")
"""
SMALL = ["--size", "64KiB", "--size", "256KiB"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_script_alone(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(BAD_SCRIPT)
    assert main([str(script), "--no-links"]) == 1
    shown = capsys.readouterr().out
    assert f"severe: {script}:5: model.state_dict() runs on some ranks only" in shown
    script.write_text(
        BAD_SCRIPT.replace("if rank == 0:", "if True:").replace("torch.save", "print")
    )
    assert main([str(script), "--no-links", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["severe"] is False
    assert read["links"] is None
    assert "torch" in next(iter(read["facts"].values()))


def test_nonsense_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot read the script"):
        main([str(tmp_path / "none.py")])
    with pytest.raises(ConfigurationError, match="--nproc must be at least 1, got 0"):
        main(["--nproc", "0"])


def test_nproc_contradicts_a_launcher(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigurationError, match="leave --nproc out"):
        main(["--nproc", "2"])


def test_half_a_launch_is_a_finding(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert main(["--no-links", "--json"]) == 1
    whats = [each["what"] for each in json.loads(capsys.readouterr().out)["findings"]]
    assert any("but not WORLD_SIZE" in what for what in whats)


def test_local_ranks_that_cannot_meet_are_told(monkeypatch, capsys, forked_local_ranks):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    assert main(["--nproc", "2", "--json", *SMALL]) == 1
    read = json.loads(capsys.readouterr().out)
    assert read["links"] is None
    severe = [each for each in read["findings"] if each["severity"] == "severe"]
    assert any("no interface nothing0" in each["what"] for each in severe)
    assert any(
        each["what"] == "the ranks could not exchange data" and "failed" in each["means"]
        for each in severe
    )


def test_local_ranks(capsys, kept_local_ranks):
    kept_local_ranks("fullshard.doctor.links")
    assert main(["--nproc", "2", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "links between 2 ranks over gloo" in shown
    assert "0.25 MiB" in shown
    assert "of the best bandwidth" in shown


def test_a_launched_world(monkeypatch, capsys, unused_port, tmp_path):
    """Of one rank, since starting more takes seconds; measuring is tested with threads."""
    script = tmp_path / "train.py"
    script.write_text(BAD_SCRIPT)
    launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    launched |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(unused_port)}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert main([str(script), "--json"]) == 1
    read = json.loads(capsys.readouterr().out)
    (host,) = read["facts"]
    wheres = {each["what"].split(" ")[0]: each["where"] for each in read["findings"]}
    assert wheres["TORCH_DISTRIBUTED_DEBUG=DETAIL"] == host
    assert wheres["model.state_dict()"] == f"{script}:5"
    assert not torch.distributed.is_initialized()
