# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: how a step comes to be in it, and which one is newest.

    run/
      .lock                       locked by the process that saves; says which
      step-000000000100/          a complete step: its manifest is there
        manifest.json
        00000.safetensors         what rank 0 wrote
        verified                  a mark: all of it has been read and was right
      step-000000000100.2/        the same step, saved again later
      aside-1/                    a run folder with the steps that followed one to which
        step-000000000200/        training went back
      .staging-0f3c9a.../         a save under way, or what is left of one
      .trash-0f3c9a.../           a step or staging folder that is being removed

[Note: One rename]
A save writes and flushes everything in a staging folder, the manifest last, and then renames the
folder. So a step is there with all its files or not at all, and nothing points to anything that is
not flushed. Removing goes the other way: a folder gets a name that nobody reads before its first
file goes. Thus also a rank 0 that was thought dead cannot publish what was cleaned away.

[Note: One line]
The steps directly in a run folder follow each other: each was saved by training that had seen the
one before. Whoever goes back, by loading an older step or by saving a lower number, begins another
line. Its first save moves the steps that do not lead to it into a folder ``aside-N``, just before
its own appears; nothing of them is deleted, ``aside-N`` is a run folder like any other, and moving
its steps back undoes it. So the newest step of the current line is the one with the highest
number, and retention has nothing to ask but numbers. Where nobody knows after which step a save
comes (a new process that has loaded nothing), lower steps are taken for those that lead to it.
"""

import contextlib
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fullshard.checkpoint.files import Files, read_whole, write_new
from fullshard.checkpoint.format.envelope import checksum_of
from fullshard.checkpoint.format.manifest import LARGEST_MANIFEST_BYTES, MANIFEST, parse_manifest
from fullshard.checkpoint.format.stored import Ancestor, Manifest
from fullshard.core.errors import CheckpointError

VERIFIED = "verified"
_STEP = re.compile(r"step-(\d{12,18})(?:\.([1-9]\d{0,8}))?")
_LEFT_OVER = re.compile(r"\.(staging|trash)-[0-9a-f]{32}")
_ASIDE = re.compile(r"aside-([1-9]\d{0,8})")


@dataclass(frozen=True, order=True)
class StepFolder:
    """One complete step; a later save of the same step has a higher ``revision``."""

    step: int
    revision: int
    path: Path


def steps_in(files: Files, run: Path) -> list[StepFolder]:
    """The complete steps of a run, oldest first. Raises `CheckpointError` if it cannot be read."""
    try:
        names = files.names(run)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"the run folder {run} cannot be read: {error}", file=str(run)
        ) from error
    complete = []
    for name in names:
        match = _STEP.fullmatch(name)
        if match is not None and (run / name / MANIFEST).is_file():
            complete.append(StepFolder(int(match[1]), int(match[2] or 1), run / name))
    return sorted(complete)


def steps_off_line(
    there: Sequence[StepFolder], step: int, after: Ancestor | None
) -> list[StepFolder]:
    """Choose those of the steps ``there`` that do not lead to ``step``, saved ``after`` another.

    Pure. See [Note: One line]. A step saved again after itself is a further save of it.
    """
    if after is None:
        last = step - 1
    else:
        last = after.step if step >= after.step else step - 1
    return [folder for folder in there if folder.step > last]


def left_overs(files: Files, run: Path) -> list[str]:
    """Names in ``run`` of what earlier saves have left over. Raises `OSError`."""
    return [name for name in files.names(run) if _LEFT_OVER.fullmatch(name)]


def told_below(files: Files, run: Path) -> str:
    """Say where steps are if ``run`` is the folder around theirs, as `fullshard train` makes it."""
    below = run / "checkpoints"
    return f"; there are some in {below}" if steps_in(files, below) else ""


def find_step(files: Files, run: Path, step: int | None = None) -> StepFolder:
    """The newest complete step, or the latest save of ``step``. Raises `CheckpointError`."""
    there = steps_in(files, run)
    fitting = [folder for folder in there if step is None or folder.step == step]
    if fitting:
        return fitting[-1]
    wanted = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
    if not run.is_dir():
        raise CheckpointError(f"{wanted} in {run}: there is no such folder", file=str(run))
    known = sorted({folder.step for folder in there})
    shown = f"there are steps {', '.join(map(str, known[-10:]))}" if known else "it has none"
    shown += "" if known else told_below(files, run)
    aside = [
        name
        for name in files.names(run)
        if _ASIDE.fullmatch(name) and any(s.step == step for s in steps_in(files, run / name))
    ]
    shown += f"; step {step} was moved aside: load {run / aside[-1]}" if aside else ""
    raise CheckpointError(f"{wanted} in {run}: {shown}", file=str(run))


def read_manifest(files: Files, folder: Path) -> Manifest:
    """The manifest of a step folder. Raises `CheckpointError`."""
    return parse_manifest(_read_whole(files, folder / MANIFEST), folder / MANIFEST)


def _read_whole(files: Files, path: Path) -> bytes:
    try:
        return read_whole(files, path, LARGEST_MANIFEST_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}", file=str(path)) from error


# -- a step comes --------------------------------------------------------------------------------


class Staging:
    """The folder in which one save is prepared. Methods raise `OSError`."""

    def __init__(self, files: Files, run: Path, generation: str):
        self._files = files
        self._run = run
        self.generation = generation
        self.path: Path = run / f".staging-{generation}"

    def open(self) -> None:
        """Make it. To be called by one rank."""
        self._files.make_new_folder(self.path)

    def commit(self, step: int, manifest: bytes, after: Ancestor | None = None) -> Path:
        """Write the manifest, flush, and let the step appear; returns its folder.

        See [Note: One rename] and [Note: One line]. All other files are written and flushed by
        then.
        """
        write_new(self._files, self.path / MANIFEST, manifest, flush=True)
        self._files.flush_folder(self.path)
        moved = self._move_aside(steps_off_line(steps_in(self._files, self._run), step, after))
        try:
            target = self._next_name(step)
            self._files.rename(self.path, target)
        except BaseException:
            with contextlib.suppress(OSError):
                for here, aside in moved:
                    self._files.rename(aside, here)
            raise
        self._files.flush_folder(self._run)
        return target

    def _move_aside(self, steps: Sequence[StepFolder]) -> list[tuple[Path, Path]]:
        """Move ``steps`` to a new folder; where they were and are."""
        if not steps:
            return []
        taken = [int(m[1]) for m in map(_ASIDE.fullmatch, self._files.names(self._run)) if m]
        folder = self._run / f"aside-{max(taken, default=0) + 1}"
        self._files.make_new_folder(folder)
        moved = []
        for step in steps:
            self._files.rename(step.path, folder / step.path.name)
            moved.append((step.path, folder / step.path.name))
        self._files.flush_folder(folder)
        self._files.flush_folder(self._run)
        return moved

    def _next_name(self, step: int) -> Path:
        name = f"step-{step:012d}"
        taken = [
            int(match[2] or 1)
            for match in map(_STEP.fullmatch, self._files.names(self._run))
            if match is not None and int(match[1]) == step
        ]
        return self._run / (f"{name}.{max(taken) + 1}" if taken else name)


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
        write_new(files, staged, text.encode())
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
