# SPDX-License-Identifier: Apache-2.0
"""``save_checkpoint`` of `fullshard.jax`: a pytree into a run folder, now or aside."""

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fullshard.checkpoint import Background, RunFolder, Saving
from fullshard.checkpoint.background import save_in_background
from fullshard.checkpoint.format.values import to_json
from fullshard.checkpoint.run_folder import run_folder
from fullshard.checkpoint.saving import About, Plans, write_step
from fullshard.checkpoint.shards import ArraySource, Piece
from fullshard.checkpoint.streaming import Blocks
from fullshard.core.boxes import Box
from fullshard.core.errors import NotSupportedError
from fullshard.jax.arrays.leaves import STORED_DTYPES
from fullshard.jax.checkpoint_runs.leaves import (
    Leaf,
    Names,
    box_of,
    clipped,
    leaves_of,
    turned_box,
)
from fullshard.jax.checkpoint_runs.processes import process_ranks

__all__ = ["save_checkpoint", "settle"]


class _Session:
    """The memory of this process from save to save."""

    def __init__(self) -> None:
        self.plans = Plans()
        self.pending: Saving | None = None
        self.blocks: tuple[int, Blocks] | None = None

    def settle(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.wait()

    def blocks_of(self, most: int) -> Blocks:
        """Host memory for an asynchronous save, the same as last time if the bound is."""
        if self.blocks is None or self.blocks[0] != most:
            self.blocks = most, Blocks(most)
        return self.blocks[1]


_session = _Session()


def settle() -> None:
    """Wait for a save under way. Raises its `CheckpointError`, once."""
    _session.settle()


def save_checkpoint(
    path: str | Path | RunFolder,
    state: Any,
    *,
    step: int,
    extra: Any = None,
    asynchronous: bool | Background = False,
    names: Names | None = None,
    about: Mapping[str, Any] | None = None,
) -> Saving:
    """Write ``state``, a pytree of arrays on any devices, as one step of the run folder ``path``.

    With several processes all of them call. Each writes what its devices hold, replicas once. The
    step is complete or not to be seen. The state stays valid.

    Args:
        path: the run's folder, on a file system that all processes share; a `RunFolder` to say
            which steps are kept.
        state: arrays of `jax.Array`, numpy arrays and numbers; random keys too.
        step: the step's number.
        extra: what process 0 wants to find again: numbers, texts, lists, tuples, dicts.
        asynchronous: return when everything is copied to host memory; a thread writes. One process
            only. A failure is raised by the next call or by ``wait()``.
        names: how leaves are stored, by path; see `torch_layout`.
        about: what readers on other engines find beside tensors, as `torch_layout` gives it.

    Raises:
        CheckpointError: on all processes, if one could not write.
        NotSupportedError: asynchronous with several processes.
    """
    ranks = process_ranks()
    if asynchronous and ranks.size > 1:
        raise NotSupportedError("asynchronous=True with several processes: save synchronously")
    _session.settle()
    failure: Exception | None = None
    pieces: list[Piece] = []
    told = About(step)
    try:
        leaves = leaves_of(state, names)
        pieces = [piece for leaf in leaves for piece in _pieces(leaf)]
        aliases = {alias: leaf.stored.name for leaf in leaves for alias in leaf.stored.aliases}
        told = About(
            step,
            f"fullshard.jax, {jax.device_count()} devices of {ranks.size} processes",
            _versions(),
            aliases,
            to_json({**(about or {"parts": {"state": "pytree"}})}, None, "about"),
            to_json(extra, _plain_value, "extra"),
        )
    except Exception as error:
        failure = error
    mine = _session.plans.mine(pieces, ranks, f"step {step} cannot be saved", failure)
    run = run_folder(path)
    target, files = Path(run.path), run.files
    if not asynchronous:
        return Saving.finished(step, write_step(target, mine, told, ranks, files, run.keep))
    background = asynchronous if isinstance(asynchronous, Background) else run.background
    blocks = _session.blocks_of(background.host_memory_bytes)
    _session.pending = save_in_background(target, mine, told, ranks, files, blocks, run.keep)
    return _session.pending


def _pieces(leaf: Leaf) -> list[Piece]:
    array = leaf.data
    if not isinstance(array, jax.Array):
        array = np.asarray(array)
    true = leaf.stored.shape or tuple(array.shape)
    axes = leaf.axes(len(true))
    dtype = leaf.stored.dtype or np.dtype(array.dtype).name
    shape = tuple(true[axis] for axis in axes)
    held: list[tuple[Box | None, Any]] = []
    if isinstance(array, jax.Array):
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                held.append((clipped(box_of(shard.index, array.shape), true), shard.data))
    elif jax.process_index() == 0:
        held.append((clipped(Box((0,) * len(true), true), true), array))
    pieces = []
    for name in (leaf.stored.name, *leaf.stored.also):
        for box, data in held:
            if box is None and 0 not in true:
                continue  # padding alone
            boxes = () if box is None else (turned_box(box, axes),)
            source = _ShardSource(data, box, axes, dtype)
            pieces.append(Piece(name, shape, STORED_DTYPES[dtype], boxes, source))
            if box is None:
                break  # an array without elements, once
    return pieces


class _ShardSource:
    """The bytes of one device's part, on the host while they are copied."""

    def __init__(self, data: Any, box: Box | None, axes: Sequence[int], dtype: str):
        self._data, self._box, self._axes, self._dtype = data, box, axes, dtype
        self._source: ArraySource | None = None

    def copy_into(self, view: memoryview, start: int) -> None:
        """Copy from the part; the host copy goes when the last byte is taken."""
        assert self._box is not None
        if self._source is None:
            whole = np.asarray(self._data)
            inside = whole[tuple(slice(0, size) for size in self._box.sizes)]
            turned = inside.transpose(self._axes).astype(self._dtype, copy=False)
            self._source = ArraySource(np.ascontiguousarray(turned).reshape(turned.shape))
        self._source.copy_into(view, start)
        if start + view.nbytes == self._box.numel * np.dtype(self._dtype).itemsize:
            self._source = None


def _plain_value(value: Any) -> Any:
    return np.asarray(value).tolist() if hasattr(value, "dtype") else value


def _versions() -> dict[str, str]:
    names = ("fullshard", "jax", "numpy")
    found = {name: importlib.metadata.version(name) for name in names}
    return {**found, "python": platform.python_version()}
