# SPDX-License-Identifier: Apache-2.0
"""Retention: the steps that go when a new one has come, removed without leaving the folder.

The steps of a run folder are one line: a save that goes back moves aside what followed
([Note: One line] in `commit.py`). So retention goes by the numbers of steps, and never sees steps
that were moved aside.
"""

import contextlib
import math
import os
import stat
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.checkpoint.files import Files
from fullshard.checkpoint.format.values import from_json
from fullshard.checkpoint.runs.commit import StepFolder, is_verified, read_manifest, steps_in
from fullshard.core.errors import CheckpointError, ConfigurationError


@dataclass(frozen=True)
class Keep:
    """The rules by which steps stay when a new one has come.

    ``last``: so many of the newest. ``every``: those whose step is a multiple of it. ``best``: so
    many with the lowest (``highest=True``: highest) number that ``extra`` has under ``metric``,
    with dots for what is nested ("eval.loss"). The newest step that was verified stays in any case.
    """

    last: int = 3
    every: int = 0
    best: int = 0
    metric: str = ""
    highest: bool = False

    def __post_init__(self) -> None:
        numbers = (self.last, self.every, self.best)
        if any(type(number) is not int for number in numbers) or not (
            self.last >= 1 and self.every >= 0 and self.best >= 0
        ):
            raise ConfigurationError(
                f"Keep(last={self.last!r}, every={self.every!r}, best={self.best!r}): keep at "
                "least the last one; every and best are whole numbers from 0"
            )
        if bool(self.best) != bool(self.metric):
            raise ConfigurationError("Keep(best=, metric=) need each other")

    def rating(self, extra: Any) -> float:
        """The number by which a step with this ``extra`` is rated. Raises `ConfigurationError`."""
        value = extra
        for part in self.metric.split("."):
            if not isinstance(value, Mapping) or part not in value:
                known = sorted(map(str, value)) if isinstance(value, Mapping) else []
                raise ConfigurationError(
                    f"Keep(metric={self.metric!r}): extra has no {part!r}; it has {known}"
                )
            value = value[part]
        if getattr(value, "ndim", None) == 0:  # of torch, numpy and jax
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigurationError(
                f"Keep(metric={self.metric!r}): extra has {type(value).__name__} there, "
                "expected a number"
            )
        return float(value)


def steps_to_remove(
    steps: Sequence[StepFolder],
    keep: Keep,
    metrics: Mapping[StepFolder, float | None],
    verified: StepFolder | None,
) -> list[StepFolder]:
    """Choose the ``steps`` that go. Pure.

    ``verified`` is the newest one that is known to be right. A step whose metric is None, since it
    cannot be read, stays: nobody can tell that it is not the best.
    """
    newest_saves = {folder.step: folder for folder in sorted(steps)}  # the last revision of each
    ordered = sorted(newest_saves.values())
    stay = set(ordered[-keep.last :])
    if keep.every:
        stay |= {folder for folder in ordered if folder.step % keep.every == 0}
    if keep.best:
        sign = -1 if keep.highest else 1
        rates = {folder: metrics.get(folder) for folder in ordered}
        stay |= {folder for folder, rate in rates.items() if rate is None}
        rated = [
            (sign * rate, -folder.step, folder)
            for folder, rate in rates.items()
            if rate is not None and not math.isnan(rate)
        ]
        stay |= {folder for _, _, folder in sorted(rated)[: keep.best]}
    if verified is not None:
        stay.add(verified)
    return [folder for folder in sorted(steps) if folder not in stay]


def apply_retention(files: Files, run: Path, keep: Keep) -> list[StepFolder]:
    """Remove the steps that ``keep`` does not name; returns them. Raises `CheckpointError`."""
    steps = steps_in(files, run)
    verified = next((step for step in reversed(steps) if is_verified(files, step.path)), None)
    metrics: dict[StepFolder, float | None] = {}
    if keep.best:
        for step in steps:
            metrics[step] = None
            with contextlib.suppress(CheckpointError, ConfigurationError):
                manifest = read_manifest(files, step.path)
                told = manifest.metrics.get(keep.metric)
                metrics[step] = keep.rating(from_json(manifest.extra)) if told is None else told
    gone = steps_to_remove(steps, keep, metrics, verified)
    for step in gone:
        if not remove_entry(files, run, step.path.name):
            warnings.warn(
                f"{step.path} is not removed: it belongs to another user or lies on another device",
                RuntimeWarning,
                stacklevel=2,
            )
    return gone


def remove_entry(files: Files, run: Path, name: str) -> bool:
    """Remove a folder of files, or a link, that is directly inside ``run``; never raises.

    A link is removed and what it points to left alone. A folder gets a name that nobody reads
    before its first file goes; everything is done by handles of folders, so that no link that is
    put there meanwhile leads out of ``run``. False for a folder on another device or of another
    owner. What cannot be removed is tried again by the next sweep.
    """
    with contextlib.suppress(OSError):
        outer = files.open_folder(run)
        try:
            return _remove(files, outer, name)
        finally:
            files.close(outer)
    return True


def _remove(files: Files, outer: Any, name: str) -> bool:
    about = files.look(outer, name)
    if stat.S_ISLNK(about.st_mode):
        files.remove(outer, name)
        return True
    whole = os.fstat(outer.descriptor)
    owners = (whole.st_uid, os.geteuid())
    if not stat.S_ISDIR(about.st_mode) or about.st_dev != whole.st_dev:
        return False
    if about.st_uid not in owners:
        return False
    if not name.startswith(".trash-"):
        trash = f".trash-{uuid.uuid4().hex}"
        files.rename_inside(outer, name, trash)
        name = trash
    inner = files.open_folder(Path(name), outer)
    try:
        if os.path.samestat(os.fstat(inner.descriptor), about):
            for entry in files.names(inner):
                files.remove(inner, entry)
    finally:
        files.close(inner)
    files.remove_folder(outer, name)
    return True
