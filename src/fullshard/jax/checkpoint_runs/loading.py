# SPDX-License-Identifier: Apache-2.0
"""``load_checkpoint`` of `fullshard.jax`: a step of a run as a state of any shardings."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from fullshard.checkpoint import Checkpoint, Files, RunFolder, StepFolder
from fullshard.checkpoint.format.values import from_json
from fullshard.checkpoint.loading import Loading, Want
from fullshard.checkpoint.ranks import agree
from fullshard.checkpoint.run_folder import load_newest, run_folder
from fullshard.core.boxes import Box
from fullshard.core.errors import CheckpointError
from fullshard.jax.arrays.leaves import STORED_DTYPES, as_key, is_key
from fullshard.jax.checkpoint_runs.leaves import (
    Leaf,
    Names,
    box_of,
    clipped,
    leaves_of,
    turned_box,
)
from fullshard.jax.checkpoint_runs.processes import process_ranks
from fullshard.jax.checkpoint_runs.saving import settle

__all__ = ["Loaded", "load_checkpoint"]

_NUMPY = {told: name for name, told in STORED_DTYPES.items()}


@dataclass(frozen=True)
class Loaded:
    """A state, and what was found beside it; ``world`` is how many processes or ranks saved it."""

    state: Any
    step: int
    extra: Any
    folder: Path
    world: int


def load_checkpoint(
    path: str | Path | RunFolder,
    state: Any,
    *,
    step: int | None = None,
    strict: bool = True,
    fallback: bool = False,
    names: Names | None = None,
) -> Loaded:
    """The newest complete step of a run, or ``step``, as a state like ``state``.

    ``state`` says structure, shapes, dtypes and shardings; its leaves may be
    `jax.ShapeDtypeStruct`s with a sharding. It is not changed. Each process reads and verifies what
    its devices hold, whatever has saved it; nothing is made before all of it is right. Without
    ``strict`` leaves that are not stored stay as they are. With ``fallback`` the step before a
    damaged one is taken, with a warning.

    Raises:
        CheckpointError: on all processes: no such step, damage, or leaves that do not fit.
    """
    settle()
    run, ranks = run_folder(path), process_ranks()

    def load(folder: StepFolder) -> Loaded:
        return _load(folder.path, run.files, state, names, strict)

    return load_newest(run, step, ranks, fallback, load)


def _load(folder: Path, files: Files, state: Any, names: Names | None, strict: bool) -> Loaded:
    ranks = process_ranks()
    failure: Exception | None = None
    checkpoint: Checkpoint | None = None
    try:
        checkpoint = Checkpoint(folder, files)
    except Exception as error:
        failure = error
    agree(ranks, f"cannot load {folder}", failure)
    assert checkpoint is not None
    try:
        leaves = leaves_of(state, names)
        missing = [leaf for leaf in leaves if checkpoint.manifest.tensor(leaf.stored.name) is None]
        lacking = sorted(leaf.stored.name for leaf in missing if not leaf.stored.optional)
        if strict and lacking:
            raise CheckpointError(
                f"it lacks {', '.join(lacking[:5])} ({len(lacking)} in all)", tensor=lacking[0]
            )
        absent = {leaf.path for leaf in missing}
        reads = {leaf.path: _Read(checkpoint, leaf) for leaf in leaves if leaf.path not in absent}
        wants = [want for read in reads.values() for want in read.wants(targets=False)]
        with Loading(checkpoint, wants, kept_bytes=0) as loading:
            loading.verify()
    except Exception as error:
        failure = error
    agree(ranks, f"cannot load {folder}", failure)
    made = []
    for leaf in leaves:
        if leaf.path in reads:
            made.append(reads[leaf.path].array())
        elif leaf.stored.is_step:
            made.append(_like(leaf, np.asarray(checkpoint.step)))
        else:
            made.append(leaf.value)
    loaded = jax.tree.unflatten(jax.tree.structure(state), made)
    return Loaded(
        loaded,
        checkpoint.step,
        from_json(checkpoint.manifest.extra),
        checkpoint.folder,
        checkpoint.manifest.world,
    )


class _Read:
    """One leaf on its way in."""

    def __init__(self, checkpoint: Checkpoint, leaf: Leaf):
        self._checkpoint, self._leaf = checkpoint, leaf
        like = leaf.data
        if not hasattr(like, "shape"):
            like = np.asarray(like)
        self._shape = tuple(like.shape)
        self._dtype = np.dtype(like.dtype)
        self._true = leaf.stored.shape or self._shape
        self._axes = leaf.axes(len(self._true))
        stored = checkpoint.stored(leaf.stored.name)
        self._stored_dtype = np.dtype(jax.numpy.dtype(_NUMPY[stored.dtype]))
        wanted = tuple(self._true[axis] for axis in self._axes)
        if stored.shape != wanted:
            raise CheckpointError(
                f"{leaf.stored.name!r} has shape {stored.shape} in it, {leaf.path} wants {wanted}",
                tensor=leaf.stored.name,
            )
        sharding = getattr(like, "sharding", None)
        # What jit may move to where it is needed stays so.
        placed = isinstance(sharding, jax.sharding.Sharding) and getattr(like, "committed", True)
        self._sharding = sharding if placed else None
        self._parts: dict[Box, NDArray[Any]] = {}

    def wants(self, targets: bool) -> list[Want]:
        """List the reads of this process, each part once."""
        found = []
        for box in self._boxes():
            inside = clipped(box, self._true)
            if inside is None:
                continue
            turned = turned_box(inside, self._axes)
            target = None
            if targets:
                part = np.empty(turned.sizes, self._stored_dtype)
                self._parts[box] = part
                target = part.reshape(-1).view(np.uint8).data
            found.append(Want(self._leaf.stored.name, (turned,), target))
        return found

    def array(self) -> Any:
        """Read it, and put it where it belongs."""
        with Loading(self._checkpoint, self.wants(targets=True), kept_bytes=0) as loading:
            for _ in loading.deliver():
                pass
        if self._sharding is None:
            return _like(self._leaf, self._part(box_of(_everything(self._shape), self._shape)))
        made = jax.make_array_from_callback(
            self._shape,
            self._sharding,
            lambda index: self._part(box_of(index or (), self._shape)),
        )
        self._parts.clear()
        return _like(self._leaf, made)

    def _boxes(self) -> list[Box]:
        if self._sharding is None:
            return [box_of(_everything(self._shape), self._shape)]
        indices = self._sharding.addressable_devices_indices_map(self._shape)
        found = (box_of(index, self._shape) for index in indices.values() if index is not None)
        return list(dict.fromkeys(found))

    def _part(self, box: Box) -> NDArray[Any]:
        """A device's part in the leaf's own order of axes and dtype, padded with zeros."""
        part = self._parts.get(box)
        whole = np.zeros(box.sizes, self._dtype)
        if part is not None:
            back = [self._axes.index(axis) for axis in range(len(self._axes))]
            inside = part.transpose(back).astype(self._dtype, copy=False)
            whole[tuple(slice(0, size) for size in inside.shape)] = inside
        return whole


def _everything(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def _like(leaf: Leaf, made: Any) -> Any:
    """``made`` as the kind of value that the leaf is."""
    value = leaf.value
    if is_key(value):
        return as_key(made, value)
    if isinstance(made, jax.Array):
        return made
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return jax.numpy.asarray(made.astype(value.dtype))
    return made if isinstance(value, np.ndarray) else type(value)(made.item())
