# SPDX-License-Identifier: Apache-2.0
"""The command as its user meets it: as a process."""

import json
import os
import subprocess
import sys
import tomllib

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.limits import PROCESS_S

from fullshard.core.presets import TRANSFORMERS
from fullshard.train.models import GPT

pytestmark = pytest.mark.slow

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "OMP_NUM_THREADS")


def fullshard(*arguments, cwd=None):
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    return subprocess.run(
        [sys.executable, "-m", "fullshard", *arguments],
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        cwd=cwd,
        env=environ,
        check=False,
    )


def test_help_says_what_there_is():
    done = fullshard("--help")
    assert done.returncode == 0
    assert "train a real model in one command" in done.stdout
    done = fullshard("train", "--help")
    assert done.returncode == 0
    for word in ("--nproc", "--model", "--engine", "CONFIG.toml", "optim.lr=0.003", "torchrun"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "optim.rate=1"], "fullshard train: unknown key 'optim.rate'"),
        (["train", "a.toml", "--nproc", "2", "b.toml"], "one settings file at most"),
        (["trian"], "invalid choice: 'trian'"),
    ],
)
def test_nonsense_ends_with_2_and_one_line_that_says_why(arguments, message):
    done = fullshard(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_batch_that_does_not_divide_starts_nothing(tmp_path):
    done = fullshard("train", "--nproc", "3", "train.batch=8", cwd=tmp_path)
    assert done.returncode == 2
    assert "train.batch=8 samples do not divide over 3 ranks" in done.stderr
    assert "starting" not in done.stdout
    assert not list(tmp_path.iterdir())


def test_two_ranks_train_and_leave_everything_behind(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(12):
        (texts / f"{number}.txt").write_text(f"to be or not to be, {number} times. " * 40)
    settings = tmp_path / "settings.toml"
    settings.write_text('[data]\npaths = ["texts"]\n[log]\nname = "small"\nsample_bytes = 8\n')
    plain = GPT(TRANSFORMERS["nano"])
    save_file(plain.state_dict(), tmp_path / "start.safetensors")
    steps = ["train.steps=3", "train.eval_every=2", "log.trace=true", "model.context=64"]
    steps += ["train.initial_weights=start.safetensors", "optim.lr=0"]
    done = fullshard("train", "settings.toml", "--nproc", "2", *steps, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "one unsharded process" in done.stdout
    assert "validation loss" in done.stdout

    folder = tmp_path / "runs" / "small"
    stored = tomllib.loads((folder / "config.toml").read_text())
    assert stored["train"]["steps"] == 3
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds == ["train", "validation", "train", "validation"]
    assert (folder / "trace.jsonl").stat().st_size > 0
    found = load_file(folder / "model.safetensors")
    assert found.keys() == plain.state_dict().keys()
    # At a rate of 0 nothing moves away from where the file says to begin.
    assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())
    assert not list(tmp_path.glob("**/*.partial"))


def test_a_failing_rank_is_shown_once_and_ends_the_others(tmp_path):
    overrides = ["optim.lr=1e35", "optim.warmup_steps=0", "train.steps=9"]
    done = fullshard("train", "--nproc", "2", *overrides, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("loss or gradient is not finite on rank") == 1
    assert "Traceback" not in done.stderr
