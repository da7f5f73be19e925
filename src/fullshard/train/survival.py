# SPDX-License-Identifier: Apache-2.0
"""Runs that are ended and go on: which folder, when to save and to leave, and where to go on.

Nothing here knows an engine. The position in the data is one integer, the number of samples that
all steps so far have taken; see `fullshard.train.data` for why nothing else is needed.
"""

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

from fullshard.checkpoint import CheckpointError, Files, Keep, RunFolder, Saving, steps_in
from fullshard.core.errors import ConfigurationError
from fullshard.train.config import CheckpointConfig, Config, resolve, to_toml
from fullshard.train.metrics import Reporter, new_run_folder, writing
from fullshard.train.run import TrainingRun, World
from fullshard.train.signals import COME_AGAIN, StopRequest

CHECKPOINTS = "checkpoints"  # the folder of a run that has its steps
FINISHED = "model.safetensors"  # what a run leaves behind when it is done


def open_folder(config: Config, world: World) -> Path | None:
    """Make the run's folder, or take the one that goes on; None but on the first process."""
    if not world.is_first:
        return None
    resumed = folder_to_resume(config)
    if resumed is not None:
        return resumed
    folder = new_run_folder(config.log.folder, config.run_name)
    with writing(folder / "config.toml"):
        (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    return folder


def folder_to_resume(config: Config) -> Path | None:
    """Return the run folder to go on with, None to begin a new one.

    ``checkpoint.resume`` may name one. With "auto", and after torchrun has restarted its ranks, it
    is the newest folder of this run's name that has a checkpoint, is not finished and has the same
    settings. Raises `ConfigurationError` for a named folder that is none.
    """
    wanted = config.checkpoint.resume
    if wanted and wanted != "auto":
        folder = Path(wanted)
        if not folder.is_dir():
            raise ConfigurationError(f"checkpoint.resume={wanted!r}: there is no such folder")
        if not (folder / "config.toml").is_file():
            raise ConfigurationError(
                f"checkpoint.resume={wanted!r} is no run folder: it has no config.toml"
            )
        if (folder / FINISHED).exists() and not _has_steps(folder):
            raise ConfigurationError(
                f"checkpoint.resume={wanted!r} is finished ({FINISHED}) and has no checkpoint to "
                "go on from: start a new run, with train.initial_weights for its weights"
            )
        return folder
    if not wanted and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    name = re.compile(re.escape(config.run_name) + r"(-\d+)?")
    root = Path(config.log.folder)
    found = [path for path in root.glob("*") if name.fullmatch(path.name) and path.is_dir()]
    for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
        if not (path / FINISHED).exists() and _has_steps(path) and _is_of(path, config):
            return path
    return None


def _has_steps(path: Path) -> bool:
    try:
        return bool(steps_in(Files(), path / CHECKPOINTS))
    except CheckpointError:
        return False


def _is_of(path: Path, config: Config) -> bool:
    """Return whether the folder is of a run with these settings, but for how it was to begin."""
    try:
        kept = resolve(path / "config.toml")
    except ConfigurationError:
        return False
    resume = config.checkpoint.resume
    return replace(kept, checkpoint=replace(kept.checkpoint, resume=resume)) == config


def forget_after(folder: Path, step: int) -> None:
    """Leave out of ``metrics.jsonl`` what was told of later steps, which are to come again."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            kept = json.loads(line)["step"] <= step
        except (ValueError, KeyError, TypeError):  # a line that was half written
            kept = False
        if kept:
            lines.append(line)
    staged = path.with_name(".metrics.jsonl")
    with writing(path):
        staged.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        staged.replace(path)


class SaveClock:
    """When a checkpoint is due, by steps or by minutes since the last one."""

    def __init__(self, config: CheckpointConfig):
        self._config = config
        self._last_s = time.monotonic()

    def is_due(self, done: int) -> bool:
        """Return true after ``done`` steps if it is time; ranks may differ about minutes."""
        by_steps = bool(self._config.every) and done % self._config.every == 0
        minutes = (time.monotonic() - self._last_s) / 60
        return by_steps or 0 < self._config.minutes <= minutes

    def saved(self) -> None:
        """Count minutes from now."""
        self._last_s = time.monotonic()


class RunCheckpoints:
    """The checkpoints of one run, below ``folder``, which its first process knows.

    All methods are collective. That process looks at the folder and at the clock for all.
    """

    def __init__(
        self, run: TrainingRun, folder: Path | None, reporter: Reporter, stop: StopRequest
    ):
        self._run = run
        self._reporter = reporter
        self._stop = stop
        self._clock = SaveClock(run.config.checkpoint)
        path = run.world.shared_text(str(folder / CHECKPOINTS) if folder is not None else "")
        self._folder = RunFolder(path, keep=Keep(last=run.config.checkpoint.keep))
        self._saving: Saving | None = None

    def resume(self) -> int:
        """Load the newest right step, if any; return the steps done. Refuses another batch's."""
        world, batch = self._run.world, self._run.config.train.batch
        there = world.is_first and bool(steps_in(Files(), Path(self._folder.path)))
        if not any(world.somewhere(there)):
            return 0
        loaded, note = self._run.load_step(self._folder)
        position = int(loaded.extra["position"])
        if position != loaded.step * batch:
            raise ConfigurationError(
                f"{loaded.folder} was saved at sample {position}, which is no multiple of "
                f"train.batch={batch}: go on with the batch that it was trained with"
            )
        if self._reporter.folder is not None:
            forget_after(self._reporter.folder, loaded.step)
        self._reporter.say(f"going on after step {loaded.step}, sample {position}{note}")
        return loaded.step

    def after_step(self, done: int) -> None:
        """Save if it is time, or if a signal wants it; then leave with `SystemExit`."""
        run = self._run
        due = run.world.is_first and self._clock.is_due(done)
        due, stop = run.world.somewhere(due, bool(self._stop.signal))
        if not due and not stop:
            return
        self._clock.saved()
        with run.record.span("checkpoint"):
            saved = run.is_finite()
            if saved:
                aside = run.config.checkpoint.asynchronous and not stop
                extra = {"position": done * run.config.train.batch}
                self._saving = run.save_step(self._folder, done, extra, aside)
        if not saved:
            self._reporter.say(
                f"step {done}: parameters or optimizer state are not finite; not saved, and the "
                "checkpoints before it stay"
            )
        if stop:
            what = f"step {done} is saved" if saved else f"step {done} is not saved"
            self._reporter.say(f"signal received: {what}; go on with --resume")
            raise SystemExit(COME_AGAIN)

    def finish(self) -> None:
        """Wait for a save that is under way. Raises `CheckpointError` if it failed."""
        if self._saving is not None:
            self._saving.wait()
