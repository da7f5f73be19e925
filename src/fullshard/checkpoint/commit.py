# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: how a step comes to be in it, which one is newest, and which ones go.

    run/
      step-000000000100/          a complete step: its manifest is there
        manifest.json
        00000.safetensors         what rank 0 wrote
        verified                  a mark: all of it has been read and was right
      step-000000000100.2/        the same step, saved again later
      .staging-0f3c9a.../         a save under way, or what is left of one
      .trash-0f3c9a.../           a step or staging folder that is being removed

[Note: One rename]
A save writes and flushes everything in a staging folder, the manifest last, and then renames the
folder. So a step is there with all its files or not at all, and nothing points to anything that is
not flushed. Removing goes the other way: a folder gets a name that nobody reads before its first
file goes. Thus also a rank 0 that was thought dead cannot publish what was cleaned away.
"""

import contextlib
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullshard.checkpoint.files import Files
from fullshard.checkpoint.format.envelope import checksum_of
from fullshard.checkpoint.format.manifest import (
    LARGEST_MANIFEST_BYTES,
    MANIFEST,
    Manifest,
    parse_manifest,
)
from fullshard.checkpoint.format.values import from_json
from fullshard.core.errors import CheckpointError, ConfigurationError

__all__ = [
    "Keep",
    "Staging",
    "StepFolder",
    "apply_retention",
    "find_step",
    "is_verified",
    "mark_verified",
    "read_manifest",
    "steps_in",
    "steps_to_remove",
    "sweep",
]

VERIFIED = "verified"
_STEP = re.compile(r"step-(\d{12,18})(?:\.([1-9]\d{0,8}))?")
_LEFT_OVER = re.compile(r"\.(staging|trash)-[0-9a-f]{32}")


@dataclass(frozen=True, order=True)
class StepFolder:
    """One complete step; a later save of the same step has a higher ``revision``."""

    step: int
    revision: int
    path: Path


def steps_in(files: Files, run: Path) -> list[StepFolder]:
    """The complete steps of a run, oldest first; none if the folder is not there.

    Raises `CheckpointError` if it is there and cannot be read.
    """
    try:
        names = files.names(run)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"the run folder {run} cannot be read: {error}", file=str(run)
        ) from error
    found = []
    for name in names:
        match = _STEP.fullmatch(name)
        if match is not None and (run / name / MANIFEST).is_file():
            found.append(StepFolder(int(match[1]), int(match[2] or 1), run / name))
    return sorted(found)


def find_step(files: Files, run: Path, step: int | None = None) -> StepFolder:
    """The newest complete step, or the latest save of ``step``. Raises `CheckpointError`."""
    there = steps_in(files, run)
    fitting = [each for each in there if step is None or each.step == step]
    if fitting:
        return fitting[-1]
    wanted = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
    known = sorted({each.step for each in there})
    shown = f"there are steps {', '.join(map(str, known[-10:]))}" if known else "it has none"
    raise CheckpointError(f"{wanted} in {run}: {shown}", file=str(run))


def read_manifest(files: Files, folder: Path) -> Manifest:
    """The manifest of a step folder. Raises `CheckpointError`."""
    return parse_manifest(_read_whole(files, folder / MANIFEST), folder / MANIFEST)


def _read_whole(files: Files, path: Path) -> bytes:
    try:
        file = files.open(path)
        try:
            size = files.size(file)
            if size > LARGEST_MANIFEST_BYTES:
                raise CheckpointError(
                    f"{path} has {size} bytes, a manifest at most {LARGEST_MANIFEST_BYTES}",
                    file=str(path),
                )
            data = bytearray(size)
            count = files.read_into(file, memoryview(data), 0)
            return bytes(data[:count])
        finally:
            files.close(file)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}", file=str(path)) from error


# -- a step comes --------------------------------------------------------------------------------


class Staging:
    """The folder in which one save is prepared. Methods raise `OSError`."""

    def __init__(self, files: Files, run: Path, generation: str):
        self._files = files
        self._run = run
        self.path = run / f".staging-{generation}"

    def open(self) -> None:
        """Make it. To be called by one rank."""
        self._files.make_folder(self._run)
        self._files.make_new_folder(self.path)

    def commit(self, step: int, manifest: bytes) -> Path:
        """Write the manifest, flush, and let the step appear; returns its folder.

        See [Note: One rename]. All other files are written and flushed by then.
        """
        file = self._files.create(self.path / MANIFEST)
        try:
            self._files.write(file, memoryview(manifest))
            self._files.flush(file)
        finally:
            self._files.close(file)
        self._files.flush_folder(self.path)
        target = self._next_name(step)
        self._files.rename(self.path, target)
        self._files.flush_folder(self._run)
        return target

    def discard(self) -> None:
        """Remove it as far as that is possible; never raises."""
        _remove(self._files, self.path)

    def _next_name(self, step: int) -> Path:
        name = f"step-{step:012d}"
        taken = [
            int(match[2] or 1)
            for match in map(_STEP.fullmatch, self._files.names(self._run))
            if match is not None and int(match[1]) == step
        ]
        return self._run / (f"{name}.{max(taken) + 1}" if taken else name)


def sweep(files: Files, run: Path) -> list[str]:
    """Remove what earlier saves have left over; returns the names. Never raises."""
    try:
        left = [name for name in files.names(run) if _LEFT_OVER.fullmatch(name)]
    except OSError:
        return []
    for name in left:
        _remove(files, run / name)
    return left


def _remove(files: Files, folder: Path) -> None:
    # One that cannot be removed is found by the next sweep.
    with contextlib.suppress(OSError):
        if not folder.name.startswith(".trash-"):
            trash = folder.with_name(f".trash-{uuid.uuid4().hex}")
            files.rename(folder, trash)
            folder = trash
        for name in files.names(folder):
            files.remove(folder / name)
        files.remove_folder(folder)


# -- steps that were read and right --------------------------------------------------------------


def mark_verified(files: Files, folder: Path) -> None:
    """Keep for later that all of this step was read and right. Never raises.

    Another kind of mark, or none, says nothing about the step. So it need not be flushed, which
    would let a load wait for whatever else is on its way to the disk.
    """
    with contextlib.suppress(OSError, CheckpointError):
        if is_verified(files, folder):
            return
        text = f"{_mark(files, folder)}\n{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n"
        staged = folder / f".{VERIFIED}-{uuid.uuid4().hex}"
        file = files.create(staged)
        try:
            files.write(file, memoryview(text.encode()))
        finally:
            files.close(file)
        files.replace(staged, folder / VERIFIED)


def is_verified(files: Files, folder: Path) -> bool:
    """True if this step, as its manifest is now, was marked by `mark_verified`."""
    try:
        mark = _read_whole(files, folder / VERIFIED).decode("ascii", "replace")
        return mark.partition("\n")[0] == _mark(files, folder)
    except CheckpointError:
        return False


def _mark(files: Files, folder: Path) -> str:
    return checksum_of(_read_whole(files, folder / MANIFEST))


# -- steps go ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Keep:
    """Which steps stay when a new one has come.

    ``last``: so many of the newest. ``every``: those whose step is a multiple of it. ``best``: so
    many with the lowest (``highest=True``: highest) number that ``extra`` has under ``metric``.
    The newest step that was verified stays in any case.
    """

    last: int = 3
    every: int = 0
    best: int = 0
    metric: str = ""
    highest: bool = False

    def __post_init__(self) -> None:
        if self.last < 1 or self.every < 0 or self.best < 0:
            raise ConfigurationError(
                f"Keep(last={self.last}, every={self.every}, best={self.best}): keep at least the "
                "last one; every and best are 0 or more"
            )
        if bool(self.best) != bool(self.metric):
            raise ConfigurationError("Keep(best=, metric=) need each other")


def steps_to_remove(
    steps: Sequence[StepFolder],
    keep: Keep,
    metrics: Mapping[StepFolder, float],
    verified: StepFolder | None,
) -> list[StepFolder]:
    """Which of ``steps`` go. Pure. ``verified`` is the newest one that is known to be right."""
    newest_saves = {each.step: each for each in sorted(steps)}  # of each step the last revision
    ordered = sorted(newest_saves.values())
    stay = set(ordered[-keep.last :])
    if keep.every:
        stay |= {each for each in ordered if each.step % keep.every == 0}
    if keep.best:
        sign = -1 if keep.highest else 1
        rated = [each for each in ordered if metrics.get(each, float("nan")) == metrics.get(each)]
        stay |= set(sorted(rated, key=lambda each: (sign * metrics[each], -each.step))[: keep.best])
    if verified is not None:
        stay.add(verified)
    return [each for each in sorted(steps) if each not in stay]


def apply_retention(files: Files, run: Path, keep: Keep) -> list[StepFolder]:
    """Remove the steps that ``keep`` does not name; returns them. Raises `CheckpointError`."""
    steps = steps_in(files, run)
    verified = next((each for each in reversed(steps) if is_verified(files, each.path)), None)
    metrics = {}
    if keep.best:
        for each in steps:
            with contextlib.suppress(CheckpointError, TypeError, ValueError, KeyError):
                extra = from_json(read_manifest(files, each.path).extra)
                metrics[each] = float(extra[keep.metric])
    gone = steps_to_remove(steps, keep, metrics, verified)
    for each in gone:
        _remove(files, each.path)
    return gone
