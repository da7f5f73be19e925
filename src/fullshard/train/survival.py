# SPDX-License-Identifier: Apache-2.0
"""Runs that are ended and go on: which folder, when to save, and what a signal means.

Nothing here knows an engine. The position in the data is one integer, the number of samples that
all steps so far have taken; see `fullshard.train.data` for why nothing else is needed.
"""

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

from fullshard.checkpoint import CheckpointError, Files, steps_in
from fullshard.core.errors import ConfigurationError
from fullshard.train.config import CheckpointConfig, Config, resolve
from fullshard.train.metrics import writing

__all__ = [
    "CHECKPOINTS",
    "FINISHED",
    "SaveClock",
    "folder_to_resume",
    "forget_after",
]

CHECKPOINTS = "checkpoints"  # the folder of a run that has its steps
FINISHED = "model.safetensors"  # what a run leaves behind when it is done


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
