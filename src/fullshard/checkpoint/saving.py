# SPDX-License-Identifier: Apache-2.0
"""A save, as every rank carries it out: agree who writes what, write, agree that it is right, show.

Who writes what is decided before: [Note: Who writes what] in `planning.py`.
"""

import contextlib
import json
import platform
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy

from fullshard.checkpoint.files import Files
from fullshard.checkpoint.format.manifest import parse_manifest, render_manifest
from fullshard.checkpoint.format.stored import About, Manifest, StoredFile, StoredTensor
from fullshard.checkpoint.format.tiling import Run, Tiling, runs_of
from fullshard.checkpoint.planning import Plans, WritePlan
from fullshard.checkpoint.ranks import CheckpointRanks, failure_text, from_first
from fullshard.checkpoint.runs.commit import Staging, left_overs
from fullshard.checkpoint.runs.folder import RunFolder, save_into
from fullshard.checkpoint.runs.retention import Keep, apply_retention, remove_entry
from fullshard.checkpoint.shards import Piece, ShardWriter
from fullshard.checkpoint.streaming import stream
from fullshard.core.errors import CheckpointError
from fullshard.core.tested import installed_version


@dataclass(frozen=True)
class WrittenStep:
    """A step that is there: its folder, and the name of this very save."""

    folder: Path
    generation: str


@cache
def versions_of(*packages: str) -> dict[str, str]:
    """Return the versions of fullshard, of ``packages`` and of Python, for a manifest."""
    names = ("fullshard", *packages)
    versions = {name: installed_version(name) or "not installed" for name in names}
    return {**versions, "python": platform.python_version()}


Feed = Callable[[Sequence[Piece], ShardWriter], None]


def save(
    run: Path,
    pieces: Sequence[Piece],
    about: About,
    ranks: CheckpointRanks,
    files: Files | None = None,
    keep: Keep | None = None,
) -> Path:
    """Write a step, return its folder. Collective; raises `CheckpointError` on all ranks."""
    plan = Plans().plan(pieces, ranks)
    return write_step(RunFolder(run, keep, files=files), plan, about, ranks).folder


# -- writing -------------------------------------------------------------------------------------


def write_step(
    run: RunFolder, plan: WritePlan, about: About, ranks: CheckpointRanks, feed: Feed = stream
) -> WrittenStep:
    """Write this rank's part of ``plan`` into a staging folder; when all have, show the step.

    Collective. ``feed`` brings the bytes to the writer. Raises `CheckpointError` on all ranks if it
    failed on one of them. Other exceptions of ``ranks`` mean that a peer is gone.
    """
    files, what = run.files, f"step {about.step} was not saved to {run.path}"
    with contextlib.ExitStack() as stack:
        generation = from_first(ranks, what, lambda: _staging_in(run.path, files, stack))
        staging = Staging(files, run.path, generation)
        try:
            told: dict[str, Any] = {}
            try:
                told["file"] = write_shard(staging, ranks.rank, plan.pieces, files, feed)
            except Exception as error:
                told["failure"] = failure_text(error)
            parts = [json.loads(each) for each in ranks.gather(json.dumps(told).encode())]
            folder = Path(
                from_first(ranks, what, lambda: str(publish(staging, about, plan.tensors, parts)))
            )
        except BaseException:
            if ranks.rank == 0:
                remove_entry(files, run.path, staging.path.name)
            raise
        if run.keep is not None and ranks.rank == 0:
            with contextlib.suppress(CheckpointError):
                apply_retention(files, run.path, run.keep)
    return WrittenStep(folder, generation)


def _staging_in(run: Path, files: Files, stack: contextlib.ExitStack) -> str:
    """Make a staging folder, for rank 0 alone, until ``stack`` ends; the name of this save."""
    stack.enter_context(save_into(files, run))
    for name in left_overs(files, run):
        remove_entry(files, run, name)
    staging = Staging(files, run, uuid.uuid4().hex)
    staging.open()
    return staging.generation


def write_shard(
    staging: Staging, rank: int, mine: Sequence[Piece], files: Files, feed: Feed = stream
) -> list[Any] | None:
    """Write a rank's file; the fields of its `StoredFile`, None if there is nothing to write."""
    if not mine:
        return None
    path = staging.path / f"{rank:05d}.safetensors"
    metadata = {"fullshard_generation": staging.generation, "fullshard_rank": str(rank)}
    try:
        writer = ShardWriter(files, path, mine, metadata)
        try:
            feed(mine, writer)
            return list(astuple(writer.finish()))
        except BaseException:
            with contextlib.suppress(OSError):
                writer.abandon()
            raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}", file=str(path)) from error


def publish(
    staging: Staging,
    about: About,
    tensors: Mapping[str, StoredTensor],
    parts: Sequence[Mapping[str, Any]],
) -> Path:
    """Write the manifest of what all ranks have written, and let the step appear; its folder.

    For rank 0 alone. ``tensors`` have ranks in place of files; ``parts`` have by rank what
    `write_shard` gave as "file", or a "failure". Raises `CheckpointError`.
    """
    failed = [(rank, part["failure"]) for rank, part in enumerate(parts) if "failure" in part]
    if failed:
        where = f"rank {failed[0][0]} of {len(parts)}: " if len(parts) > 1 else ""
        more = f" ({len(failed) - 1} other ranks failed too)" if len(failed) > 1 else ""
        raise CheckpointError(f"{where}{failed[0][1]}{more}", file=str(staging.path))
    data = render_manifest(_manifest(staging, about, tensors, parts))
    parse_manifest(data, staging.path)  # what could not be read back is not committed
    return staging.commit(about.step, data, about.after)


def _manifest(
    staging: Staging,
    about: About,
    tensors: Mapping[str, StoredTensor],
    parts: Sequence[Mapping[str, Any]],
) -> Manifest:
    files = tuple(StoredFile(*part["file"]) for part in parts if part["file"] is not None)
    if len(files) < len(parts):
        tensors = _renumbered(tensors, [part["file"] is not None for part in parts])
    return Manifest(
        **vars(about),
        generation=staging.generation,
        world=len(parts),
        files=files,
        tensors=tensors,
        saved_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def _renumbered(
    tensors: Mapping[str, StoredTensor], has_file: Sequence[bool]
) -> dict[str, StoredTensor]:
    """Put numbers of files in the place of ranks, of which some have none."""
    number_of = numpy.maximum(numpy.cumsum(has_file) - 1, 0)

    @cache
    def of_runs(runs: tuple[Run, ...]) -> tuple[Run, ...]:
        ranks = [first + step * numpy.arange(count) for first, step, count in runs]
        return runs_of(number_of[numpy.concatenate(ranks)])

    renumbered = {}
    for name, tensor in tensors.items():
        listed = tuple(replace(each, file=int(number_of[each.file])) for each in tensor.listed)
        rule = tensor.tiling
        tiling = None if rule is None else Tiling(rule.slicings, of_runs(rule.files))
        renumbered[name] = replace(tensor, listed=listed, tiling=tiling)
    return renumbered
