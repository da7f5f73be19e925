# SPDX-License-Identifier: Apache-2.0
"""The command as its user meets it: as a process."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.limits import PROCESS_S

from fullshard.cli import main
from fullshard.core.presets import TRANSFORMERS
from fullshard.report import read_run
from fullshard.train.torch.models import GPT

pytestmark = pytest.mark.slow

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "OMP_NUM_THREADS")


def alone(**more):
    return {name: value for name, value in os.environ.items() if name not in LAUNCHED} | more


def fullshard(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "fullshard", *arguments],
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        cwd=cwd,
        env=alone(),
        check=False,
    )


def test_help_says_what_there_is(capsys):
    done = fullshard("--help")
    assert done.returncode == 0
    assert "train a real model in one command" in done.stdout
    assert main([]) == 0
    assert capsys.readouterr().out == done.stdout
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    text = capsys.readouterr().out
    for word in ("--nproc", "--model", "--engine", "CONFIG.toml", "optim.lr=0.003", "torchrun"):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "optim.rate=1"], "fullshard train: unknown key 'optim.rate'"),
        (["train", "a.toml", "--nproc", "2", "b.toml"], "one settings file at most"),
    ],
)
def test_nonsense_ends_with_2_and_one_line_that_says_why(capsys, arguments, message):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_command_ends_with_2_and_names_the_nearest():
    done = fullshard("trian")
    assert done.returncode == 2
    assert "no command 'trian': did you mean 'train'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("output", [">&-", ""], ids=["closed", "of ASCII alone"])
def test_an_output_that_takes_little_ends_nothing(output):
    line = shlex.join([sys.executable, "-m", "fullshard", "plan", "llama3-8b"])
    done = subprocess.run(
        ["sh", "-c", f"{line} {output}"],
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        env={**alone(), "PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_who_reads_a_plan_may_stop_reading():
    read, write = os.pipe()
    os.close(read)
    line = [sys.executable, "-m", "fullshard", "plan", "llama3-8b"]
    with open(write, "w") as closed:
        done = subprocess.run(
            line, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=PROCESS_S, check=False
        )
    assert (done.returncode, done.stderr) == (128 + 13, "")  # as of a command that SIGPIPE ends


def test_a_batch_that_does_not_divide_starts_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    assert main(["train", "--nproc", "3", "train.batch=8"]) == 2
    printed = capsys.readouterr()
    assert "train.batch=8 samples do not divide over 3 ranks" in printed.err
    assert "starting" not in printed.out
    assert not list(tmp_path.iterdir())


def test_two_ranks_train_and_leave_everything_behind(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
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
    assert main(["train", "settings.toml", "--nproc", "2", *steps]) == 0
    printed = capfd.readouterr().out
    assert "one unsharded process" in printed
    assert "validation loss" in printed

    folder = tmp_path / "runs" / "small"
    stored = tomllib.loads((folder / "config.toml").read_text())
    assert stored["train"]["steps"] == 3
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds == ["train", "train", "validation", "train", "validation"]
    assert (folder / "trace.jsonl").stat().st_size > 0
    run = read_run(folder)
    assert (run.world, run.absent) == (2, ())
    for record in run.ranks.values():
        (attempt,) = record.attempts
        assert [step.step for step in attempt.steps] == [0, 1, 2]
        assert attempt.steps[0].loss == json.loads(lines[0])["loss"]
        assert attempt.facts.settings["name"] == "small"
        spans = [span.what for span in attempt.spans]
        assert spans == ["start", "start", "evaluation", "checkpoint", "evaluation"]
        assert all("data" in step.sums_s for step in attempt.steps)
        assert attempt.ending == "finished"
    found = load_file(folder / "model.safetensors")
    assert found.keys() == plain.state_dict().keys()
    # At a rate of 0 nothing moves away from where the file says to begin.
    assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())
    assert not list(tmp_path.glob("**/*.partial"))


def listening(pids):
    """The local addresses, as /proc has them, at which one of these processes waits for others."""
    sockets = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(fd))
            except OSError:
                continue  # closed meanwhile
    texts = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    return {
        row[1].partition(":")[0]
        for row in map(str.split, "".join(texts).splitlines())
        if row[3] == "0A" and f"socket:[{row[9]}]" in sockets
    }


def children(pid):
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's /proc")
def test_local_ranks_keep_to_this_host_and_leave_nothing_when_killed(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    steps = ["model.context=16", "train.batch=2", "log.every=1", "data.validation_samples=2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fullshard", "train", "--nproc", "2", *steps],
        cwd=tmp_path,
        env=alone(TMPDIR=str(temporary)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
    )
    try:
        assert any(line.startswith("step 1 ") for line in process.stdout)
        ranks = children(process.pid)
        assert len(ranks) >= 2
        assert listening([process.pid, *ranks]) == {"0100007F"}
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    ended_by = time.monotonic() + 60
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < ended_by, "ranks outlive the process that started them"
        time.sleep(0.1)
    left = [each.name for each in temporary.iterdir()]
    assert not [name for name in left if not name.startswith("torchinductor_")]  # torch's own cache


@pytest.mark.thorough
def test_a_failing_rank_is_shown_once_and_ends_the_others(tmp_path):
    overrides = ["optim.lr=1e35", "optim.warmup_steps=0", "train.steps=9", "model.context=16"]
    done = fullshard("train", "--nproc", "2", *overrides, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("loss or gradient is not finite on rank") == 1
    assert "Traceback" not in done.stderr
