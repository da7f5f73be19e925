# SPDX-License-Identifier: Apache-2.0
"""A run's folder with how it is kept, and the order in which its steps are tried."""

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from fullshard.checkpoint.background import Background
from fullshard.checkpoint.commit import Keep, StepFolder, find_step, steps_in
from fullshard.checkpoint.files import Files
from fullshard.checkpoint.format.manifest import MANIFEST
from fullshard.checkpoint.ranks import Ranks, agree
from fullshard.core.errors import CheckpointError

__all__ = ["RunFolder", "load_newest", "run_folder"]

Loaded = TypeVar("Loaded")


@dataclass(frozen=True)
class RunFolder:
    """A folder of checkpoints and how it is kept; wherever a path to one is taken.

    ``keep`` says which steps stay when a new one has come (None: all), ``background`` how much host
    memory asynchronous saves may hold, and ``files`` is the file system.
    """

    path: str | os.PathLike[str]
    keep: Keep | None = None
    background: Background = field(default_factory=Background)
    files: Files = field(default_factory=Files)


def run_folder(path: str | os.PathLike[str] | RunFolder) -> RunFolder:
    """``path`` as a `RunFolder`."""
    return path if isinstance(path, RunFolder) else RunFolder(path)


def load_newest(
    run: RunFolder,
    step: int | None,
    ranks: Ranks,
    fallback: bool,
    load: Callable[[StepFolder], Loaded],
) -> Loaded:
    """Load the newest complete step, or ``step``; with ``fallback`` the one before a damaged one.

    Collective. ``load`` raises alike on all ranks. A fallback is warned of on rank 0. The run
    folder may also be a step's folder itself.

    Raises:
        CheckpointError: on all ranks: there is no such step, or what ``load`` raised.
    """
    steps = _agreed_steps(run, step, ranks)
    while True:
        try:
            return load(steps.pop())
        except CheckpointError as error:
            if not fallback or not steps or error.file is None:
                raise
            if ranks.rank == 0:
                warnings.warn(
                    f"{error}\nfalling back to step {steps[-1].step}", RuntimeWarning, stacklevel=3
                )


def _agreed_steps(run: RunFolder, step: int | None, ranks: Ranks) -> list[StepFolder]:
    """The steps to try, the first one last, as rank 0 sees them. Collective."""
    found, failure = "[]", None
    if ranks.rank == 0:
        try:
            folder = Path(run.path)
            if step is None and (folder / MANIFEST).is_file() and not steps_in(run.files, folder):
                steps = [StepFolder(0, 1, folder)]
            else:
                newest = find_step(run.files, folder, step)
                steps = [each for each in steps_in(run.files, folder) if each <= newest]
            found = json.dumps([[each.step, each.revision, str(each.path)] for each in steps])
        except Exception as error:
            failure = error
    agree(ranks, f"cannot load a checkpoint of {run.path}", failure)
    told = json.loads(ranks.broadcast(found.encode()))
    return [StepFolder(number, revision, Path(path)) for number, revision, path in told]
