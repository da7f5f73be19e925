# SPDX-License-Identifier: Apache-2.0
"""A save, as every rank carries it out: agree who writes what, write, agree that it is right, show.

[Note: Who writes what]
Each rank proposes what it holds. What several ranks hold (replicas, buffers) is written by one of
them. The decision is a pure function of all proposals and is kept until a proposal changes, so a
later save of the same layout exchanges a few bytes before it starts.
"""

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullshard.checkpoint.files import Files
from fullshard.checkpoint.format.envelope import checksum_of
from fullshard.checkpoint.format.manifest import (
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
    parse_manifest,
    render_manifest,
)
from fullshard.checkpoint.ranks import CheckpointRanks, agree, failure_text
from fullshard.checkpoint.runs.commit import Ancestor, Staging, left_overs
from fullshard.checkpoint.runs.lock import lock_run
from fullshard.checkpoint.runs.retention import Keep, apply_retention, remove_entry
from fullshard.checkpoint.shards import Piece, ShardWriter
from fullshard.checkpoint.streaming import stream
from fullshard.core.boxes import Box
from fullshard.core.errors import CheckpointError

__all__ = [
    "About",
    "Plans",
    "WrittenStep",
    "assign",
    "publish",
    "save",
    "write_shard",
    "write_step",
]

SMALL_BYTES = 2**20  # what several ranks hold and is smaller is written by the first of them


@dataclass(frozen=True)
class About:
    """Everything in the manifest beside the tensors. Rank 0's counts, but for ``step``.

    ``after`` is the step that was trained on, None if nobody knows; ``metrics`` the numbers by
    which retention rates the step.
    """

    step: int
    layout: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    state: Any = None
    extra: Any = None
    after: Ancestor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class WrittenStep:
    """A step that is there: its folder, and the name of this very save."""

    folder: Path
    generation: str


Feed = Callable[[Sequence[Piece], ShardWriter], None]


def save(
    run: Path,
    pieces: Sequence[Piece],
    about: About,
    ranks: CheckpointRanks,
    files: Files | None = None,
    keep: Keep | None = None,
) -> Path:
    """Write one step of a run and return its folder. Collective.

    Raises `CheckpointError` on all ranks if it failed on one; then nothing of it is to be seen.
    """
    mine = Plans().mine(pieces, ranks)
    return write_step(run, mine, about, ranks, files or Files(), keep).folder


# -- who writes what -----------------------------------------------------------------------------

_Proposal = list[tuple[str, str, int]]  # identity, tensor, bytes


class Plans:
    """Decisions about who writes what, kept from save to save."""

    def __init__(self) -> None:
        self._known: dict[str, list[bool]] = {}
        self._identities: dict[tuple[Any, ...], str] = {}  # of the pieces of the last save

    def mine(
        self,
        pieces: Sequence[Piece],
        ranks: CheckpointRanks,
        what: str = "the step cannot be saved",
        failure: Exception | None = None,
    ) -> list[Piece]:
        """Choose the ``pieces`` that this rank writes. Collective.

        Raises on all ranks if one of them has a ``failure``, see `agree`.
        """
        pieces = [piece for piece in pieces if piece.size_bytes or 0 in piece.shape]
        known = self._identities
        keys = [(each.name, each.dtype, each.shape, each.boxes) for each in pieces]
        self._identities = {key: known.get(key) or _identity(*key) for key in keys}
        identities = map(self._identities.__getitem__, keys)
        proposal = [
            (each, p.name, p.size_bytes) for each, p in zip(identities, pieces, strict=True)
        ]
        digest = checksum_of(json.dumps(proposal).encode())
        joint = agree(ranks, what, failure, digest)
        if ranks.size > 1:
            if joint not in self._known:
                self._known[joint] = _decide(proposal, ranks)
            chosen = self._known[joint]
            pieces = [piece for piece, taken in zip(pieces, chosen, strict=True) if taken]
        # Wider elements first: then each tensor of the file is aligned.
        return sorted(pieces, key=lambda piece: -piece.item_bytes)


def _decide(proposal: _Proposal, ranks: CheckpointRanks) -> list[bool]:
    """For each piece whether this rank writes it. Collective."""
    proposals = [json.loads(each) for each in ranks.gather(json.dumps(proposal).encode())]
    decided = json.loads(ranks.broadcast(json.dumps(assign(proposals)).encode()))
    left_out = set(decided[ranks.rank])
    return [index not in left_out for index in range(len(proposal))]


def _identity(name: str, dtype: str, shape: tuple[int, ...], boxes: tuple[Box, ...]) -> str:
    return f"{name} {dtype} {shape} {[(box.offsets, box.sizes) for box in boxes]}"


def assign(proposals: Sequence[Sequence[Sequence[Any]]]) -> list[list[int]]:
    """Choose the proposals that each rank leaves to another rank, by index. Pure.

    A piece that several ranks hold goes to the one with the least to write so far, larger ones
    first; a small one to the first rank that holds it, so that what should be equal and is not
    (running statistics) comes from one rank.
    """
    holders: dict[str, list[tuple[int, int]]] = {}
    sizes: dict[str, int] = {}
    for rank, proposal in enumerate(proposals):
        for index, (identity, _, size_bytes) in enumerate(proposal):
            holders.setdefault(identity, []).append((rank, index))
            sizes[identity] = size_bytes
    load = [0] * len(proposals)
    for identity, held in holders.items():
        if len(held) == 1:
            load[held[0][0]] += sizes[identity]
    left_out: list[list[int]] = [[] for _ in proposals]
    shared = sorted((name for name in holders if len(holders[name]) > 1), key=lambda n: -sizes[n])
    for identity in shared:
        held = holders[identity]
        small = sizes[identity] < SMALL_BYTES
        writer = held[0][0] if small else min(held, key=lambda each: (load[each[0]], each[0]))[0]
        load[writer] += sizes[identity]
        taken = False
        for rank, index in held:
            if rank != writer or taken:
                left_out[rank].append(index)
            taken = taken or rank == writer
    return left_out


# -- writing -------------------------------------------------------------------------------------


def write_step(
    run: Path,
    mine: Sequence[Piece],
    about: About,
    ranks: CheckpointRanks,
    files: Files,
    keep: Keep | None = None,
    feed: Feed = stream,
) -> WrittenStep:
    """Write what is ``mine`` into a staging folder; when all ranks have, show the step. Collective.

    ``feed`` brings the bytes to the writer. Raises `CheckpointError` on all ranks if it failed on
    one of them. Other exceptions of ``ranks`` mean that a peer is gone.
    """
    staging: Staging | None = None
    what = f"step {about.step} was not saved to {run}"
    try:
        staging = _open_staging(run, ranks, files, what)
        failure: BaseException | None = None
        try:
            written = write_shard(staging, ranks.rank, mine, files, feed)
        except Exception as error:
            failure = error
        told = {"failure": failure_text(failure)} if failure else written
        parts = [json.loads(each) for each in ranks.gather(json.dumps(told).encode())]
        outcome = publish(staging, about, parts) if ranks.rank == 0 else {}
        outcome = json.loads(ranks.broadcast(json.dumps(outcome).encode()))
        if outcome["failure"]:
            raise CheckpointError(f"{what}: {outcome['failure']}", file=outcome["file"])
    except BaseException:
        if staging is not None and ranks.rank == 0:
            remove_entry(files, run, staging.path.name)
        raise
    if keep is not None and ranks.rank == 0:
        with contextlib.suppress(CheckpointError):
            apply_retention(files, run, keep)
    return WrittenStep(Path(outcome["folder"]), staging.generation)


def _open_staging(run: Path, ranks: CheckpointRanks, files: Files, what: str) -> Staging:
    """Make the folder on rank 0. Collective."""
    made: dict[str, Any] = {}
    if ranks.rank == 0:
        made = {"generation": uuid.uuid4().hex, "failure": None}
        try:
            files.make_folder(run)
            lock_run(files, run)
            for name in left_overs(files, run):
                remove_entry(files, run, name)
            Staging(files, run, made["generation"]).open()
        except Exception as error:
            made["failure"] = failure_text(error)
    made = json.loads(ranks.broadcast(json.dumps(made).encode()))
    if made["failure"]:
        raise CheckpointError(f"{what}: {made['failure']}", file=str(run))
    return Staging(files, run, made["generation"])


def write_shard(
    staging: Staging, rank: int, mine: Sequence[Piece], files: Files, feed: Feed = stream
) -> dict[str, Any]:
    """Write a rank's file; what it holds, as JSON for `publish`. Nothing to write: no file.

    Raises `CheckpointError`.
    """
    if not mine:
        return {"failure": None, "file": None}
    path = staging.path / f"{rank:05d}.safetensors"
    metadata = {"fullshard_generation": staging.generation, "fullshard_rank": str(rank)}
    try:
        writer = ShardWriter(files, path, mine, metadata)
        try:
            feed(mine, writer)
            file, held = writer.finish()
        except BaseException:
            with contextlib.suppress(OSError):
                writer.abandon()
            raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}", file=str(path)) from error
    return {
        "failure": None,
        "file": [file.name, file.size_bytes, file.header_bytes, file.header_checksum],
        "held": [
            [
                piece.name,
                piece.shape,
                piece.dtype,
                [[b.box.offsets, b.box.sizes, b.start, b.checksums] for b in boxes],
            ]
            for piece, boxes in held
        ],
    }


def publish(staging: Staging, about: About, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Write the manifest of what all ranks have told, and let the step appear. For rank 0 alone.

    Returns JSON: "failure" and "file" if something failed, and the "folder" of the step.
    """
    world = len(parts)
    failed = [(rank, part["failure"]) for rank, part in enumerate(parts) if part["failure"]]
    if failed:
        where = f"rank {failed[0][0]} of {world}: " if world > 1 else ""
        more = f" ({len(failed) - 1} other ranks failed too)" if len(failed) > 1 else ""
        return {"failure": f"{where}{failed[0][1]}{more}", "file": str(staging.path)}
    try:
        manifest = _manifest(staging, about, parts, world)
        data = render_manifest(manifest)
        parse_manifest(data, staging.path)  # what could not be read back is not committed
        folder = staging.commit(about.step, data, about.after)
    except Exception as error:
        return {"failure": failure_text(error), "file": str(staging.path)}
    return {"failure": None, "folder": str(folder)}


def _manifest(
    staging: Staging, about: About, parts: Sequence[Mapping[str, Any]], world: int
) -> Manifest:
    files: list[StoredFile] = []
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    stored: dict[str, list[StoredBox]] = {}
    for part in parts:
        if part["file"] is None:
            continue
        number = len(files)
        files.append(StoredFile(*part["file"]))
        for name, shape, dtype, boxes in part["held"]:
            known = shapes.setdefault(name, (tuple(shape), dtype))
            if known != (tuple(shape), dtype):
                raise CheckpointError(
                    f"{name!r} is {known[1]} of shape {known[0]} on one rank and {dtype} of "
                    f"shape {tuple(shape)} on another",
                    tensor=name,
                )
            stored.setdefault(name, []).extend(
                StoredBox(Box(tuple(offsets), tuple(sizes)), number, start, tuple(checksums))
                for offsets, sizes, start, checksums in boxes
            )
    tensors = {name: StoredTensor(*shapes[name], tuple(stored[name])) for name in sorted(stored)}
    return Manifest(
        step=about.step,
        generation=staging.generation,
        world=world,
        files=tuple(files),
        tensors=tensors,
        saved_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        layout=about.layout,
        versions=about.versions,
        aliases=about.aliases,
        state=about.state,
        extra=about.extra,
        parent=(about.after.step, about.after.generation) if about.after else None,
        metrics=about.metrics,
    )
