# SPDX-License-Identifier: Apache-2.0
"""Runs that are ended and go on, on ranks that are threads."""

import itertools
import json
import os
import random
import signal
import time
from dataclasses import replace

import pytest
import torch
from support.models import seeded

from fullshard import local_ranks
from fullshard.checkpoint import Files, open_checkpoint, steps_in
from fullshard.cli import main
from fullshard.core.errors import ConfigurationError
from fullshard.testing import LocalWorld
from fullshard.torch import FullyShardedDataParallel
from fullshard.torch.inspection.memory import Bytes
from fullshard.train.config import CheckpointConfig, resolve, to_toml
from fullshard.train.loop import fit
from fullshard.train.metrics import Reporter
from fullshard.train.signals import COME_AGAIN, StopRequest, stop_request
from fullshard.train.survival import (
    CHECKPOINTS,
    RunCheckpoints,
    SaveClock,
    folder_to_resume,
    forget_after,
)
from fullshard.train.torch.run import RankWorld, TorchRun

STEPS = 24
BATCH = 12
AT_ONCE = "checkpoint.asynchronous=false"


class Killed(Exception):
    """Stands for SIGKILL: nothing after it runs."""


class Points:
    """Sample ``n`` is a point that depends on ``n`` alone; who took which is written down."""

    tokens_per_sample = 1
    token = "points"

    def __init__(self, taken, fail_at=None):
        self.taken, self.fail_at = taken, fail_at

    def train_batch(self, seed, numbers):
        step = numbers[0] // BATCH
        if step == self.fail_at:
            raise Killed
        self.taken.setdefault(step, {})[numbers[0]] = list(numbers)
        points = torch.tensor([[float(n % 7), float(n % 5)] for n in numbers])
        return points, torch.tensor([n % 3 for n in numbers])

    @property
    def validation_count(self):
        return 1

    def validation_batch(self, positions):
        raise AssertionError

    def describe(self):
        return "points"


def small_model():
    return torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def train_on(folder, size, data, *settings, stop=None, every=5, kind=TorchRun):
    """Train to the end, or until ``data`` fails; losses by step."""
    config = resolve(
        overrides=[
            f"train.steps={STEPS}",
            f"train.batch={BATCH}",
            f"checkpoint.every={every}",
            "log.every=1",
            *settings,
        ]
    )
    losses = {}

    def body(comm):
        world = RankWorld(comm, torch.device("cpu"))
        model = FullyShardedDataParallel(seeded(small_model, 3), comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        run = kind(config, world, data, model, optimizer, Bytes.unsharded(model))
        mine = folder if comm.rank == 0 else None
        reporter = Reporter(world, mine, STEPS)
        reporter.step = lambda step, values, token: losses.setdefault(step, values["loss"])
        checkpoints = RunCheckpoints(run, mine, reporter, stop or StopRequest())
        fit(run, reporter, checkpoints)
        checkpoints.finish()

    LocalWorld(size).run(body)
    return losses


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    taken = {}
    folder = tmp_path_factory.mktemp("undisturbed")
    return train_on(folder, 2, Points(taken)), taken


def samples(taken):
    """The numbers of all samples in the order of steps and ranks."""
    parts = [taken[step][first] for step in sorted(taken) for first in sorted(taken[step])]
    return list(itertools.chain.from_iterable(parts))


@pytest.mark.long
def test_killed_five_times_on_changing_ranks_no_sample_twice_or_never(tmp_path, undisturbed):
    losses, taken = {}, {}
    draw = random.Random(1)
    for size in (2, 3, 1, 2, 4):
        done = max((each.step for each in steps_in(Files(), tmp_path / CHECKPOINTS)), default=0)
        attempt = {}
        fail_at = draw.randrange(done + 1, STEPS)
        with pytest.raises(Killed):
            train_on(tmp_path, size, Points(attempt, fail_at), AT_ONCE)
        taken = {step: each for step, each in taken.items() if step < min(attempt)} | attempt
    attempt = {}
    losses = train_on(tmp_path, 3, Points(attempt))
    taken = {step: each for step, each in taken.items() if step < min(attempt)} | attempt
    assert samples(taken) == samples(undisturbed[1]) == list(range(STEPS * BATCH))
    assert losses[STEPS] == pytest.approx(undisturbed[0][STEPS], rel=1e-4)


def test_stopped_and_resumed_on_as_many_ranks_it_is_the_same_bit_by_bit(tmp_path, undisturbed):
    with pytest.raises(Killed):
        train_on(tmp_path, 2, Points({}, fail_at=13), AT_ONCE)
    losses = train_on(tmp_path, 2, Points({}))
    assert min(losses) == 11
    assert losses == {step: undisturbed[0][step] for step in losses}


def test_a_signal_saves_on_all_ranks_and_leaves(tmp_path):
    stop = StopRequest()

    class Stopping(Points):
        def train_batch(self, seed, numbers):
            if numbers[0] // BATCH == 7:
                stop.signal = signal.SIGTERM
            return super().train_batch(seed, numbers)

    with pytest.raises(SystemExit) as left:
        train_on(tmp_path, 2, Stopping({}), stop=stop, every=0)
    assert left.value.code == COME_AGAIN == 75
    found = open_checkpoint(tmp_path / CHECKPOINTS)
    assert (found.step, found.extra) == (8, {"position": 8 * BATCH})


def test_what_is_not_finite_is_not_saved(tmp_path, capsys):
    class Poison(Points):
        def train_batch(self, seed, numbers):
            points, labels = super().train_batch(seed, numbers)
            return points * (float("nan") if numbers[0] // BATCH >= 6 else 1), labels

    with pytest.raises(Exception, match="not finite"):
        train_on(tmp_path, 2, Poison({}), AT_ONCE)
    assert open_checkpoint(tmp_path / CHECKPOINTS).step == 5


def test_parameters_that_are_not_finite_are_not_saved(tmp_path, capsys):
    class Spoilt(TorchRun):
        def step_on(self, batch, rate):
            outcome = super().step_on(batch, rate)
            if self.optimizer.state[next(self.model.parameters())]["step"] == 10:
                for param in self.model.parameters():
                    param.local.fill_(float("inf"))
            return outcome

    with pytest.raises(Exception, match="not finite"):
        train_on(tmp_path, 2, Points({}), AT_ONCE, kind=Spoilt)
    assert "step 10: parameters or optimizer state are not finite; not saved" in (
        capsys.readouterr().out
    )
    assert open_checkpoint(tmp_path / CHECKPOINTS).step == 5


def test_another_batch_is_refused(tmp_path):
    with pytest.raises(Killed):
        train_on(tmp_path, 2, Points({}, fail_at=7), AT_ONCE)
    with pytest.raises(ConfigurationError, match="sample 60, which is no multiple"):
        train_on(tmp_path, 2, Points({}), "train.batch=8")


def test_when_a_checkpoint_is_due(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = SaveClock(CheckpointConfig(every=4, minutes=2))
    assert [step for step in range(1, 10) if clock.is_due(step)] == [4, 8]
    now[0] += 120
    assert clock.is_due(1)
    clock.saved()
    assert not clock.is_due(1)
    assert not SaveClock(CheckpointConfig(every=0, minutes=0)).is_due(4)


def test_which_folder_goes_on(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    config = resolve(overrides=[f"log.folder={tmp_path}", "log.name=a"])
    auto = replace(config, checkpoint=replace(config.checkpoint, resume="auto"))
    assert folder_to_resume(config) is None
    assert folder_to_resume(auto) is None
    for name in ("a", "a-2", "a-3", "ab"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(to_toml(config))
        steps = tmp_path / name / CHECKPOINTS / "step-000000000005"
        steps.mkdir(parents=True)
        (steps / "manifest.json").write_text("")
        os.utime(tmp_path / name, (len(name), len(name)))
    os.utime(tmp_path / "a-2", (50, 50))
    os.utime(tmp_path / "a-3", (60, 60))
    assert folder_to_resume(config) is None
    assert folder_to_resume(auto) == tmp_path / "a-3"
    (tmp_path / "a-3" / "model.safetensors").write_text("")
    os.utime(tmp_path / "a-3", (60, 60))
    assert folder_to_resume(auto) == tmp_path / "a-2"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert folder_to_resume(config) == tmp_path / "a-2"
    other = replace(config, train=replace(config.train, seed=5))
    assert folder_to_resume(other) is None
    named = replace(config, checkpoint=replace(config.checkpoint, resume=str(tmp_path / "a")))
    assert folder_to_resume(named) == tmp_path / "a"
    missing = replace(config, checkpoint=replace(config.checkpoint, resume=str(tmp_path / "x")))
    with pytest.raises(ConfigurationError, match="there is no such folder"):
        folder_to_resume(missing)
    (tmp_path / "x").mkdir()
    with pytest.raises(ConfigurationError, match=r"is no run folder: it has no config\.toml"):
        folder_to_resume(missing)
    (tmp_path / "x" / "config.toml").write_text(to_toml(config))
    assert folder_to_resume(missing) == tmp_path / "x"  # ended before its first checkpoint
    (tmp_path / "x" / "model.safetensors").write_text("")
    with pytest.raises(ConfigurationError, match=r"is finished .* and has no checkpoint"):
        folder_to_resume(missing)


def test_metrics_of_steps_to_come_are_forgotten(tmp_path):
    lines = [json.dumps({"kind": "train", "step": step}) for step in range(5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "tr')
    forget_after(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == "\n".join(lines[:3]) + "\n"


def test_a_signal_is_noted_and_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with stop_request() as stop:
        assert stop.signal == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_the_command_passes_signals_on_to_its_ranks_instead_of_dying_of_them(name):
    number = signal.Signals[name]
    with pytest.raises(SystemExit) as ended, local_ranks._ended_by_signals():
        os.kill(os.getpid(), number)
    assert ended.value.code == 128 + number


def test_a_signal_before_training_has_begun_ends_the_command_with_come_again(monkeypatch):
    launch = pytest.importorskip("fullshard.train.torch.launch")

    def ends(*_, **__):
        raise SystemExit(128 + signal.SIGUSR1)  # as ranks that could not save

    monkeypatch.setattr(launch, "run_local_ranks", ends)
    assert main(["train", "--nproc", "1"]) == COME_AGAIN
    monkeypatch.setattr(launch, "check_run", lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--nproc", "1"])
    assert ended.value.code == COME_AGAIN
    assert signal.getsignal(signal.SIGUSR1) is before
