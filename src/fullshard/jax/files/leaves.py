# SPDX-License-Identifier: Apache-2.0
"""The leaves of a state: names, boxes, and how their arrays are turned into stored ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from fullshard.core.boxes import Box
from fullshard.jax.arrays.leaves import key_data

__all__ = ["Leaf", "Names", "StoredAs", "leaves_of"]


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
    """One array of a state: its path, its value, and how it is stored."""

    def __init__(self, path: str, value: Any, stored: StoredAs):
        self.path: str = path
        self.value: Any = value
        self.stored: StoredAs = stored
        data = key_data(value)  # of random keys
        self.data: Any = data if hasattr(data, "shape") else np.asarray(data)
        self.here: tuple[int, ...] = tuple(self.data.shape)
        self.axes: tuple[int, ...] = (
            tuple(range(len(self.here))) if stored.axes is None else stored.axes
        )
        # as it is stored
        self.shape: tuple[int, ...] = tuple(self.here[axis] for axis in self.axes)
        self.dtype = stored.dtype or np.dtype(self.data.dtype).name

    def box(self, index: Sequence[slice]) -> Box | None:
        """The box of the stored tensor that ``index`` of the array selects; None if it is empty."""
        ends = [part.indices(size)[:2] for part, size in zip(index, self.here, strict=True)]
        sizes = tuple(ends[axis][1] - ends[axis][0] for axis in self.axes)
        return None if 0 in sizes else Box(tuple(ends[axis][0] for axis in self.axes), sizes)

    def as_stored(self, array: NDArray[Any]) -> NDArray[Any]:
        """Turn a device's array into the elements of its box."""
        turned = array.transpose(self.axes).astype(self.dtype, copy=False)
        return np.ascontiguousarray(turned).reshape(turned.shape)

    def as_held(self, part: NDArray[Any]) -> NDArray[Any]:
        """Turn the elements of a box into an array as a device has it."""
        back = [self.axes.index(axis) for axis in range(len(self.axes))]
        return part.transpose(back).astype(self.data.dtype, copy=False)


def leaves_of(state: Any, names: Names | None) -> list[Leaf]:
    """List the leaves of ``state`` in the order of its tree."""
    leaves = []
    for path, value in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        stored = (names or {}).get(name) or StoredAs(f"state/{name}")
        leaves.append(Leaf(name, value, stored))
    return leaves
