# SPDX-License-Identifier: Apache-2.0
"""One checkpoint as its manifest tells it: files, tensors, and which is where.

Each file tells the places and checksums of its own boxes, in parts that the manifest has checksums
of, and a regular cut is a rule: a manifest grows with ranks and with tensors, not with ranks times
tensors.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fullshard.checkpoint.format.tiling import Tiling, boxes_of_part, part_count, parts_meeting
from fullshard.core.boxes import Box
from fullshard.core.safetensors_format import DTYPE_BYTES


@dataclass(frozen=True)
class StoredBox:
    """A rectangle of a tensor in file number ``file``, its elements in row-major order."""

    box: Box
    file: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor whose boxes, ``listed`` or by ``tiling``, cover each of its elements once."""

    shape: tuple[int, ...]
    dtype: str
    listed: tuple[StoredBox, ...] = ()
    tiling: Tiling | None = None

    @property
    def item_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes

    @property
    def boxes(self) -> tuple[StoredBox, ...]:
        """All boxes, made for this call where they follow from a rule."""
        if self.tiling is None:
            return self.listed
        return tuple(self._tiles(range(part_count(self.tiling.slicings))))

    def near(self, wanted: Sequence[Box]) -> Sequence[StoredBox]:
        """The boxes that may meet ``wanted``, and perhaps others."""
        if self.tiling is None:
            return self.listed
        slicings = self.tiling.slicings
        parts = {part for box in wanted for part in parts_meeting(self.shape, slicings, box)}
        return tuple(self._tiles(sorted(parts)))

    def in_file(self, number: int) -> Iterator[StoredBox]:
        """The boxes of a tensor with a rule that are in that file."""
        return iter(()) if self.tiling is None else self._tiles(self.tiling.parts_in(number))

    def _tiles(self, parts: Iterable[int]) -> Iterator[StoredBox]:
        assert self.tiling is not None
        for part in parts:
            for box in boxes_of_part(self.shape, self.tiling.slicings, part):
                yield StoredBox(box, self.tiling.file_of(part))


@dataclass(frozen=True)
class StoredFile:
    """A safetensors file beside the manifest; ``header_bytes`` counts its length field too.

    Its last ``table_bytes`` are the checksums of all chunks.
    """

    name: str
    size_bytes: int
    header_bytes: int
    header_checksum: str
    table_bytes: int
    table_checksum: str


@dataclass(frozen=True)
class Ancestor:
    """The step after which another one was trained: its number, and the name of its very save."""

    step: int
    generation: str = ""


@dataclass(frozen=True)
class About:
    """Everything in a manifest beside the tensors. Rank 0's counts, but for ``step``.

    ``layout`` is free text about how the run was sharded, ``aliases`` other names of tensors (tied
    weights), ``state`` what the engines keep beside tensors, and ``extra`` the user's, both as
    `fullshard.checkpoint.format.values` has it. ``after`` is the step that was trained on, None if
    nobody knows, and ``metrics`` are the numbers by which retention rates the step.
    """

    step: int
    layout: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    state: Any = None
    extra: Any = None
    after: Ancestor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Manifest(About):
    """All that is known of one checkpoint; ``generation`` is a random name of this very save."""

    generation: str
    world: int
    files: tuple[StoredFile, ...]
    tensors: Mapping[str, StoredTensor]
    saved_at: str = ""

    @property
    def size_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.size_bytes for file in self.files)

    def tensor(self, name: str) -> StoredTensor | None:
        """The tensor of that name, or of which that is another name."""
        return self.tensors.get(self.aliases.get(name, name))

    def boxes_in(self, number: int) -> Iterator[tuple[str, StoredTensor, StoredBox]]:
        """All that is in file number ``number``: name, tensor and box."""
        yield from self._listed_in.get(number, ())
        for name, tensor in self._with_rule:
            for stored in tensor.in_file(number):
                yield name, tensor, stored

    @cached_property
    def _listed_in(self) -> Mapping[int, list[tuple[str, StoredTensor, StoredBox]]]:
        held = defaultdict(list)
        for name, tensor in self.tensors.items():
            for stored in tensor.listed:
                held[stored.file].append((name, tensor, stored))
        return held

    @cached_property
    def _with_rule(self) -> list[tuple[str, StoredTensor]]:
        return [(name, each) for name, each in self.tensors.items() if each.tiling is not None]
