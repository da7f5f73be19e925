# SPDX-License-Identifier: Apache-2.0
"""The leaves of a state: what each is called, how it is stored, and which boxes it has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from fullshard.core.boxes import Box, intersection
from fullshard.jax.arrays.leaves import key_data, key_text

__all__ = [
    "Leaf",
    "Names",
    "StoredAs",
    "box_of",
    "clipped",
    "leaves_of",
    "turned_box",
]


@dataclass(frozen=True)
class StoredAs:
    """How a leaf is stored: under ``name``, with its ``axes`` in that order (None: as they are).

    ``shape`` is the true one where the array is padded at the ends of its dims. ``also`` are names
    of further tensors with the same value, ``aliases`` other names of the one tensor. ``dtype``
    (numpy's name) is the one in the file. A leaf that is ``optional`` may be missing there: it
    stays as it is, or with ``is_step`` becomes the checkpoint's step.
    """

    name: str
    axes: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    also: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    dtype: str | None = None
    optional: bool = False
    is_step: bool = False


Names = Mapping[str, StoredAs]


@dataclass(frozen=True)
class Leaf:
    """One array of a state, by path, and how it is stored."""

    path: str
    value: Any
    stored: StoredAs

    @property
    def data(self) -> Any:
        """The array; of random keys their data."""
        return key_data(self.value)

    def axes(self, ndim: int) -> tuple[int, ...]:
        """Its axes in the order in which they are stored."""
        return tuple(range(ndim)) if self.stored.axes is None else self.stored.axes


def leaves_of(state: Any, names: Names | None) -> list[Leaf]:
    """The leaves of ``state`` in the order of its tree."""
    found = []
    for path, value in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = ".".join(key_text(key) for key in path)
        stored = (names or {}).get(name) or StoredAs(f"state/{name}")
        found.append(Leaf(name, value, stored))
    return found


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box of an array of ``shape`` that ``index`` selects."""
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))


def clipped(box: Box, shape: Sequence[int]) -> Box | None:
    """The part of ``box`` inside of the true ``shape``; None if there is none."""
    if 0 in box.sizes or 0 in shape:
        return None
    return intersection(box, Box((0,) * len(shape), tuple(shape)))


def turned_box(box: Box, axes: Sequence[int]) -> Box:
    """The box with its dims in the order of ``axes``."""
    return Box(tuple(box.offsets[a] for a in axes), tuple(box.sizes[a] for a in axes))
