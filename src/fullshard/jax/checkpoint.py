# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of any pytree of arrays, in the format that `fullshard.torch` reads and writes, too.

A leaf is called by its path, as ``params.blocks.0.kernel``, and stored as ``state/<path>`` unless
``names`` says otherwise. `torch_layout` makes names under which a state is, array for array, what
the torch engine stores of the same model and AdamW.
"""

import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.tree_util import keystr
from numpy.typing import NDArray

from fullshard.checkpoint import (
    Background,
    Checkpoint,
    CheckpointRanks,
    Files,
    RunFolder,
    Saving,
    SoloRanks,
)
from fullshard.checkpoint.conversion import change_of_kind, is_narrower, refuse_lost_numbers
from fullshard.checkpoint.format.stored import About
from fullshard.checkpoint.format.tiling import grid_tile
from fullshard.checkpoint.format.values import from_json, to_json
from fullshard.checkpoint.loading import Loading, Want
from fullshard.checkpoint.ranks import FolderRanks, agreed
from fullshard.checkpoint.runs.folder import run_folder
from fullshard.checkpoint.saving import versions_of
from fullshard.checkpoint.session import Content, Loaded, SaveSession, check_step
from fullshard.checkpoint.shards import Piece, memory_view
from fullshard.core.boxes import Box
from fullshard.core.errors import CheckpointError, ConfigurationError
from fullshard.core.safetensors_format import DTYPE_NAMES, Entry
from fullshard.jax.placing import as_key, is_key, key_data

_NUMPY = {told: np.dtype(jax.numpy.dtype(name)) for name, told in DTYPE_NAMES.items()}


# -- leaves ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredAs:
    """A leaf's place in files: ``name``, with its ``axes`` in that order (None: as they are).

    ``also`` are names of further tensors with the same value, ``aliases`` other names of the one
    tensor. ``dtype`` (numpy's name) is the one in the file. A leaf that is ``optional`` may be
    missing there: it stays as it is, or with ``is_step`` becomes the checkpoint's step.
    """

    name: str
    axes: tuple[int, ...] | None = None
    also: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    dtype: str | None = None
    optional: bool = False
    is_step: bool = False


Names = Mapping[str, StoredAs]


class Leaf:
    """One array of a state: its path, its value, and how it is stored (``shape``, ``dtype``)."""

    def __init__(self, path: str, value: Any, stored: StoredAs):
        self.path: str = path
        self.value: Any = value
        self.stored: StoredAs = stored
        data = key_data(value)  # of random keys
        self.data: Any = data if hasattr(data, "shape") else np.asarray(data)
        self.here: tuple[int, ...] = tuple(self.data.shape)
        every = tuple(range(len(self.here)))
        self.axes: tuple[int, ...] = every if stored.axes is None else stored.axes
        self.shape: tuple[int, ...] = tuple(self.here[axis] for axis in self.axes)
        self.dtype = stored.dtype or np.dtype(self.data.dtype).name
        sharding = getattr(self.data, "sharding", None)
        placed = isinstance(sharding, jax.sharding.Sharding)
        # What jit may move to where it is needed stays so.
        stays = placed and getattr(self.data, "committed", True)
        self.sharding: jax.sharding.Sharding | None = sharding if stays else None

    @property
    def held_dtype(self) -> str:
        """The dtype here, as safetensors calls it."""
        return DTYPE_NAMES[np.dtype(self.data.dtype).name]

    @property
    def entry(self) -> Entry:
        """Its description in a file. Raises `ConfigurationError` for a dtype that has no name."""
        if self.dtype not in DTYPE_NAMES:
            raise ConfigurationError(
                f"{self.path!r} is {self.dtype}, which safetensors cannot hold"
            )
        return Entry(DTYPE_NAMES[self.dtype], self.shape)

    def box(self, index: Sequence[slice]) -> Box:
        """The box of the stored tensor that ``index`` of the array selects."""
        ends = [part.indices(size)[:2] for part, size in zip(index, self.here, strict=True)]
        sizes = tuple(ends[axis][1] - ends[axis][0] for axis in self.axes)
        return Box(tuple(ends[axis][0] for axis in self.axes), sizes)

    def boxes(self) -> list[Box]:
        """The boxes of the parts that this process holds, each once."""
        indices: Iterable[Any] = [(slice(None),) * len(self.here)]
        if self.sharding is not None:
            indices = self.sharding.addressable_devices_indices_map(self.here).values()
        boxes = [self.box(index) for index in indices if index is not None]
        return [box for box in dict.fromkeys(boxes) if box.numel]

    def as_stored(self, array: NDArray[Any]) -> NDArray[Any]:
        """Turn a device's array into the elements of its box."""
        turned = array.transpose(self.axes).astype(self.dtype, copy=False)
        return np.ascontiguousarray(turned).reshape(turned.shape)

    def made(self, read: Callable[[Box], NDArray[Any]]) -> Any:
        """Make a value like the leaf's of what ``read`` gives for each box that has elements."""
        back = [self.axes.index(axis) for axis in range(len(self.axes))]

        def part(index: Sequence[slice] | None) -> NDArray[Any]:
            box = self.box(index or ())
            found = read(box) if box.numel else np.empty(box.sizes)
            return found.transpose(back).astype(self.data.dtype, copy=False)

        value, sharding = self.value, self.sharding
        made: Any = (
            part((slice(None),) * len(self.here))
            if sharding is None
            else (jax.make_array_from_callback(self.here, sharding, part))
        )
        if is_key(value):
            return as_key(made, value)
        if sharding is not None or isinstance(value, np.ndarray):
            return made
        on_device = isinstance(value, jax.Array | jax.ShapeDtypeStruct)
        return jax.numpy.asarray(made) if on_device else type(value)(made.item())


def leaves_of(state: Any, names: Names | None) -> list[Leaf]:
    """List the leaves of ``state`` in the order of its tree."""
    leaves = []
    for path, value in jax.tree.leaves_with_path(state):
        name = keystr(path, simple=True, separator=".")
        stored = (names or {}).get(name) or StoredAs(f"state/{name}")
        leaves.append(Leaf(name, value, stored))
    return leaves


# -- processes -------------------------------------------------------------------------------------


class _ProcessRanks:
    """The processes of a JAX program; see `fullshard.checkpoint.CheckpointRanks`."""

    def __init__(self) -> None:
        self.rank: int = jax.process_index()
        self.size: int = jax.process_count()

    def gather(self, data: bytes) -> list[bytes]:
        parts = self.share(data)
        return [] if self.rank else parts

    def broadcast(self, data: bytes) -> bytes:
        return self.share(b"" if self.rank else data)[0]

    def share(self, data: bytes) -> list[bytes]:
        sizes = multihost_utils.process_allgather(np.asarray([len(data)], np.int32))
        padded = np.zeros(max(1, int(sizes.max())), np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        rows = multihost_utils.process_allgather(padded)
        return [bytes(row[: int(n)]) for row, n in zip(rows, sizes.reshape(-1), strict=True)]

    def duplicate(self, run: Path, files: Files) -> FolderRanks:
        """Ranks that talk through ``run``: threads of a JAX program have no collectives."""
        name = self.broadcast(uuid.uuid4().hex.encode()).decode()
        aside = FolderRanks(run, name, self.rank, self.size, files)
        with agreed(self, f"nothing can be saved to {run}"):
            if self.rank == 0:
                aside.open()
        return aside


def process_ranks() -> CheckpointRanks:
    """All processes."""
    return _ProcessRanks() if jax.process_count() > 1 else SoloRanks()


# -- saving ----------------------------------------------------------------------------------------


@cache
def _session() -> SaveSession:
    """The process's own; it stands for what is trained, too, since pytrees come and go."""
    return SaveSession(process_ranks())


def save_checkpoint(
    path: "str | os.PathLike[str] | RunFolder",
    state: Any,
    *,
    step: int,
    extra: Any = None,
    asynchronous: bool | Background = False,
    names: Names | None = None,
    about: Mapping[str, Any] | None = None,
) -> Saving:
    """Write ``state``, a pytree of arrays on any devices, as one step of the run folder ``path``.

    Collective: with several processes all of them call. Each writes what its devices hold, replicas
    once. The step is complete or not to be seen. The state stays valid. Steps that do not lead to
    this one are moved aside, as by `fullshard.torch.save_checkpoint`.

    Args:
        path: the run's folder, on a file system that all processes share; a `RunFolder` to say
            which steps are kept.
        state: arrays of `jax.Array`, numpy arrays and numbers; random keys too.
        step: the step's number.
        extra: what process 0 wants to find again: numbers, texts, lists, tuples, dicts.
        asynchronous: return when everything is copied to host memory; a thread writes. A failure is
            raised on all processes by the next call, or on each by ``wait()``. The threads of
            several processes agree through files in the run's folder.
        names: how leaves are stored, by path; see `torch_layout`.
        about: what readers on other engines find beside tensors, as `torch_layout` gives it.

    Raises:
        CheckpointError: on all processes, if one could not write.
        ConfigurationError: a path or step that is none, values that cannot be stored.
    """
    run = run_folder(path)
    check_step(step)

    def content() -> Content:
        leaves = leaves_of(state, names)
        told = About(
            step,
            f"fullshard.jax, {jax.device_count()} devices of {jax.process_count()} processes",
            versions_of("jax", "numpy"),
            {alias: leaf.stored.name for leaf in leaves for alias in leaf.stored.aliases},
            to_json({**(about or {"parts": {"state": "pytree"}})}, None, "about"),
            to_json(extra, lambda x: np.asarray(x).tolist() if hasattr(x, "dtype") else x, "extra"),
        )
        return Content([piece for leaf in leaves for piece in _pieces(leaf)], told, extra)

    return _session().save(run, step, content, asynchronous, _session)


def _pieces(leaf: Leaf) -> list[Piece]:
    parts: list[tuple[Box, Any]] = []
    if isinstance(leaf.data, jax.Array):
        shards = [shard for shard in leaf.data.addressable_shards if shard.replica_id == 0]
        parts = [(leaf.box(shard.index), shard.data) for shard in shards]
    elif jax.process_index() == 0:
        parts = [(leaf.box((slice(None),) * len(leaf.shape)), leaf.data)]
    # An array without elements is there once, one with some has no empty parts.
    parts = parts[:1] if 0 in leaf.shape else [part for part in parts if part[0].numel]
    pieces = []
    for name in (leaf.stored.name, *leaf.stored.also):
        for box, data in parts:
            tile, boxes = (grid_tile(leaf.shape, box), (box,)) if box.numel else (None, ())
            source = _ShardSource(leaf, data)
            pieces.append(Piece(name, leaf.shape, leaf.entry.dtype, boxes, source, tile))
    return pieces


class _ShardSource:
    """The bytes of one device's part, on the host until the last of them is taken."""

    def __init__(self, leaf: Leaf, data: Any):
        self._leaf, self._data = leaf, data
        self._held: memoryview | None = None

    def copy_into(self, view: memoryview, start: int) -> None:
        held = self._held or memory_view(self._leaf.as_stored(np.asarray(self._data)))
        view[:] = held[start : start + view.nbytes]
        self._held = None if start + view.nbytes == held.nbytes else held


# -- loading ---------------------------------------------------------------------------------------


def load_checkpoint(
    path: "str | os.PathLike[str] | RunFolder",
    state: Any,
    *,
    step: int | None = None,
    strict: bool = True,
    fallback: bool = False,
    names: Names | None = None,
    if_any: bool = False,
) -> Any:
    """Load the newest complete step of a run, or ``step``, as a state like ``state``.

    Collective. Returns `Loaded` with ``.state``, in the structure, shapes, dtypes and shardings of
    ``state``, whose leaves may be `jax.ShapeDtypeStruct`s with a sharding; it is not changed. Each
    process reads and verifies what its devices hold, whatever has saved it; nothing is made before
    all of it is right. Without ``strict`` leaves that are not stored stay as they are, stored ones
    that a part of the state (as ``params``) lacks are left, and numbers may change their kind or
    overflow. With ``fallback`` the step before a damaged one is taken,
    with a warning. With ``if_any`` the result is None if there is no step yet.

    Raises:
        CheckpointError: on all processes: no such step, damage, or leaves that do not fit.
        ConfigurationError: a path or step that is none.
    """
    run, session = run_folder(path), _session()
    if step is not None:
        check_step(step)

    def prepare(checkpoint: Checkpoint) -> _StateDelivery:
        return _StateDelivery(checkpoint, state, names, strict)

    return session.load(run, step, prepare, fallback, _session, if_any)


class _StateDelivery:
    """The leaves of a state on their way in: arrays of the host, then of the devices."""

    is_whole = False

    def __init__(self, checkpoint: Checkpoint, state: Any, names: Names | None, strict: bool):
        self._checkpoint, self._tree = checkpoint, jax.tree.structure(state)
        self._leaves = leaves_of(state, names)
        self._made: dict[int, Any] = {}
        self._converted: list[str] = []
        self.wants: list[Want] = []
        lacking = []
        for number, leaf in enumerate(self._leaves):
            if checkpoint.manifest.tensor(leaf.stored.name) is not None:
                self.wants += self._reads(number, leaf, strict)
            elif leaf.stored.is_step:
                self._made[number] = leaf.made(lambda _: np.asarray(checkpoint.step))
            else:
                self._made[number] = leaf.value
                lacking += [] if leaf.stored.optional else [leaf.stored.name]
        self._missing = tuple(sorted(lacking))
        self._unexpected = self._left_over(state)
        for verb, left in (("lacks", self._missing), ("also has", self._unexpected)):
            if strict and left:
                raise CheckpointError(
                    f"it {verb} {', '.join(left[:5])} ({len(left)} in all)", tensor=left[0]
                )

    def _left_over(self, state: Any) -> tuple[str, ...]:
        """Stored names that no leaf reads, of the parts of the tree that are here, if only empty.

        As an optimizer's state is that remembers nothing.
        """

        def part(name: str) -> str:
            return name.partition("." if name.startswith("state/") else "/")[0]

        read = [each.stored for each in self._leaves]
        known = {name for each in read for name in (each.name, *each.also, *each.aliases)}
        below = jax.tree.leaves_with_path(state, is_leaf=lambda each: each is not state)
        here = [keystr(path, simple=True) for path, child in below if child is not None]
        parts = {part(name) for name in known} | {f"state/{name}" for name in here}
        stored = self._checkpoint.manifest.tensors
        return tuple(name for name in stored if name not in known and part(name) in parts)

    def _reads(self, number: int, leaf: Leaf, strict: bool) -> list[Want]:
        name, stored = leaf.stored.name, self._checkpoint.stored(leaf.stored.name)
        if stored.shape != leaf.shape:
            raise CheckpointError(
                f"{name!r} has shape {stored.shape} in it, {leaf.path} wants {leaf.shape}",
                tensor=name,
            )
        if leaf.stored.dtype is None and (
            change := change_of_kind(name, stored.dtype, leaf.held_dtype, strict)
        ):
            self._converted.append(change)
        inspect = strict and is_narrower(stored.dtype, leaf.held_dtype)
        return [Want(name, (box,), key=(number, box), inspect=inspect) for box in leaf.boxes()]

    def look(self, want: Want, data: memoryview) -> None:
        """Refuse a part with numbers that would be lost."""
        stored = self._checkpoint.stored(want.name).dtype
        values = np.frombuffer(data, _NUMPY[stored])
        values = values if values.dtype.kind in "iu" else values.astype(np.float64)
        refuse_lost_numbers(want.name, stored, self._leaves[want.key[0][0]].held_dtype, values)

    def receive(self, loading: Loading) -> None:
        """Make the arrays, leaf by leaf, so that the host holds few of them at a time."""
        for number, leaf in enumerate(self._leaves):
            if number in self._made:
                continue
            name = leaf.stored.name
            dtype = _NUMPY[self._checkpoint.stored(name).dtype]
            parts = {box: np.empty(box.sizes, dtype) for box in leaf.boxes()}
            for want, data in loading.deliver(name) if parts else ():
                (of_leaf, box), start = want.key
                if of_leaf == number:
                    values = np.frombuffer(data, dtype)
                    parts[box].reshape(-1)[start : start + values.size] = values
            self._made[number] = leaf.made(parts.__getitem__)

    def finish(self, checkpoint: Checkpoint, newer: tuple[int, ...]) -> Loaded:
        made = [self._made[number] for number in range(len(self._leaves))]
        return Loaded(
            checkpoint.step,
            from_json(checkpoint.manifest.extra),
            checkpoint.folder,
            checkpoint.manifest.world,
            self._missing,
            self._unexpected,
            newer=newer,
            converted=tuple(self._converted),
            state=jax.tree.unflatten(self._tree, made),
        )
