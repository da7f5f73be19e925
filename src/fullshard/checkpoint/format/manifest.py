# SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint: what is stored, in which files, and the files' checksums.

`docs/checkpoint-format.md` specifies the file. Reading one trusts nothing: each number is checked
against the others before it is used, and every bit of the file is covered by its checksum.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from fullshard.checkpoint.format.envelope import unwrap, wrap
from fullshard.checkpoint.format.index import CHUNK_BYTES
from fullshard.checkpoint.format.stored import (
    Ancestor,
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
)
from fullshard.checkpoint.format.tiling import Slicing, Tiling, part_count, why_no_rule
from fullshard.checkpoint.format.values import from_json, to_json
from fullshard.core.boxes import Box
from fullshard.core.errors import CheckpointError, ConfigurationError
from fullshard.core.safetensors_format import DTYPE_BYTES, LARGEST_HEADER_BYTES

MANIFEST = "manifest.json"
FORMAT = "fullshard-checkpoint"
VERSION = 2
LARGEST_MANIFEST_BYTES = 2**30
LARGEST_WORLD = 2**24
_LARGEST = 2**62  # of any number: sums of two stay below 64 bits
_CHECKSUM = re.compile(r"[0-9a-f]{32}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")


# -- writing -------------------------------------------------------------------------------------


def render_manifest(manifest: Manifest) -> bytes:
    """The bytes of the file; `parse_manifest` gives an equal manifest back."""
    return wrap(FORMAT, VERSION, _described(manifest))


def _described(manifest: Manifest) -> dict[str, Any]:
    return {
        "step": manifest.step,
        "generation": manifest.generation,
        "world": manifest.world,
        "saved_at": manifest.saved_at,
        "layout": manifest.layout,
        "versions": dict(manifest.versions),
        "chunk_bytes": CHUNK_BYTES,
        "files": [
            {
                "name": file.name,
                "size_bytes": file.size_bytes,
                "header_bytes": file.header_bytes,
                "header_xxh3_128": file.header_checksum,
                "table_bytes": file.table_bytes,
                "table_xxh3_128": file.table_checksum,
            }
            for file in manifest.files
        ],
        "tensors": {name: _tensor_told(tensor) for name, tensor in manifest.tensors.items()},
        "aliases": dict(manifest.aliases),
        "state": manifest.state,
        "extra": manifest.extra,
        "parent": manifest.after and astuple(manifest.after),
        "metrics": to_json(manifest.metrics),
    }


def _tensor_told(tensor: StoredTensor) -> dict[str, Any]:
    told: dict[str, Any] = {"shape": tensor.shape, "dtype": tensor.dtype}
    if tensor.tiling is None:
        told["boxes"] = [[each.box.offsets, each.box.sizes, each.file] for each in tensor.listed]
    else:
        told["slicings"] = [astuple(slicing) for slicing in tensor.tiling.slicings]
        told["files"] = tensor.tiling.files
    return told


# -- reading -------------------------------------------------------------------------------------


def parse_manifest(data: bytes, path: Path) -> Manifest:
    """The manifest in ``data``, read from ``path``. Raises `CheckpointError` for what cannot be."""
    body = unwrap(data, FORMAT, VERSION, path)
    try:
        return _Parser(body).manifest()
    except (_Wrong, ConfigurationError, ValueError, RecursionError) as error:
        why = f"it cannot be: {error or type(error).__name__}"
        raise CheckpointError(f"cannot read {path}: {why}", file=str(path)) from error


class _Wrong(Exception):
    """The statements of a manifest do not fit together."""


_T = TypeVar("_T")


class _Parser:
    def __init__(self, body: Any):
        self._body = _typed(body, dict, "the manifest")
        self._files: list[StoredFile] = []

    def manifest(self) -> Manifest:
        body = self._body
        if body.get("chunk_bytes") != CHUNK_BYTES:
            raise _Wrong(f"chunk_bytes is {body.get('chunk_bytes')!r}, expected {CHUNK_BYTES}")
        files = _typed(body.get("files"), list, "files")
        self._files = [self._file(_typed(each, dict, "a file")) for each in files]
        if len({file.name for file in self._files}) != len(self._files):
            raise _Wrong("two files have one name")
        tensors = {
            name: self._tensor(name, _typed(told, dict, f"tensor {name!r}"))
            for name, told in _typed(body.get("tensors"), dict, "tensors").items()
        }
        self._check_that_files_are_covered(tensors)
        aliases = _texts(body.get("aliases"), "aliases")
        for name, target in aliases.items():
            if target not in tensors or name in tensors:
                raise _Wrong(f"alias {name!r} of {target!r} has no tensor or is one")
        for key in ("state", "extra"):
            from_json(body.get(key))
        world = _number(body.get("world"), "world")
        if world > LARGEST_WORLD:
            raise _Wrong(f"world is {world}, expected at most {LARGEST_WORLD}")
        return Manifest(
            step=_number(body.get("step"), "step"),
            generation=_typed(body.get("generation"), str, "generation"),
            world=world,
            files=tuple(self._files),
            tensors=tensors,
            saved_at=_typed(body.get("saved_at"), str, "saved_at"),
            layout=_typed(body.get("layout"), str, "layout"),
            versions=_texts(body.get("versions"), "versions"),
            aliases=aliases,
            state=body.get("state"),
            extra=body.get("extra"),
            after=_parent(body.get("parent")),
            metrics=_metrics(from_json(body.get("metrics", {}))),
        )

    def _file(self, told: dict[str, Any]) -> StoredFile:
        name = _typed(told.get("name"), str, "a file's name")
        if not _FILE_NAME.fullmatch(name):
            raise _Wrong(f"{name!r} is no name of a file beside the manifest")
        size = _number(told.get("size_bytes"), f"size of {name!r}")
        header = _number(told.get("header_bytes"), f"header of {name!r}")
        if not 8 <= header <= min(size, LARGEST_HEADER_BYTES + 8):
            raise _Wrong(f"{name!r} of {size} bytes has a header of {header}")
        checksum = _checksum(told.get("header_xxh3_128"), name)
        table = _number(told.get("table_bytes"), f"table of {name!r}")
        if not 16 <= table <= size - header or table % 16:
            raise _Wrong(f"{name!r} has {table} bytes of checksums")
        table_checksum = _checksum(told.get("table_xxh3_128"), name)
        return StoredFile(name, size, header, checksum, table, table_checksum)

    def _tensor(self, name: str, told: dict[str, Any]) -> StoredTensor:
        dtype = told.get("dtype")
        if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
            raise _Wrong(f"tensor {name!r} has dtype {dtype!r}")
        shape = _numbers(told.get("shape"), f"shape of {name!r}")
        if len(shape) > _MOST_DIMS or math.prod(shape) * DTYPE_BYTES[dtype] > _LARGEST:
            raise _Wrong(f"tensor {name!r} has shape {shape!r:.200}")
        if "slicings" in told:
            return StoredTensor(shape, dtype, (), self._tiling(name, shape, told))
        boxes = tuple(
            self._box(name, shape, each)
            for each in _typed(told.get("boxes"), list, f"boxes of {name!r}")
        )
        if not _tile(shape, boxes):
            raise _Wrong(f"the boxes of {name!r} do not cover each of its elements once")
        return StoredTensor(shape, dtype, boxes)

    def _tiling(self, name: str, shape: tuple[int, ...], told: dict[str, Any]) -> Tiling:
        if "boxes" in told:
            raise _Wrong(f"{name!r} has a rule, and boxes too")
        slicings = []
        for each in _typed(told["slicings"], list, f"slicings of {name!r}"):
            dim, *numbers = _list_of(4, each, f"a slicing of {name!r}")
            dim = None if dim is None else _number(dim, f"dim of {name!r}")
            slicings.append(Slicing(dim, *_numbers(numbers, f"a slicing of {name!r}")))
        if len(slicings) > _MOST_DIMS:
            raise _Wrong(f"{name!r} has {len(slicings)} slicings")
        why, count = why_no_rule(shape, slicings), part_count(slicings)
        if why is not None or count > LARGEST_WORLD:
            raise _Wrong(f"{name!r} has no rule: {why or f'{count} parts'}")
        runs = []
        for each in _typed(told.get("files"), list, f"files of {name!r}"):
            first, step, length = _list_of(3, each, f"files of {name!r}")
            first, length = _numbers([first, length], f"files of {name!r}")
            step = _number(abs(_typed(step, int, "a step")), "a step") * (1 if step >= 0 else -1)
            last = first + step * (length - 1)
            if length < 1 or not 0 <= last < len(self._files) or first >= len(self._files):
                raise _Wrong(f"{name!r} is in files {first} to {last} of {len(self._files)}")
            runs.append((first, step, length))
        if sum(run[2] for run in runs) != count:
            raise _Wrong(f"the files of {name!r} are not those of its {count} parts")
        return Tiling(tuple(slicings), tuple(runs))

    def _box(self, name: str, shape: tuple[int, ...], told: Any) -> StoredBox:
        offsets, sizes, file = _list_of(3, told, f"a box of {name!r}")
        offsets = _numbers(offsets, f"offsets of {name!r}")
        sizes = _numbers(sizes, f"sizes of {name!r}")
        fits = len(offsets) == len(sizes) == len(shape) and all(
            size > 0 and offset + size <= length
            for offset, size, length in zip(offsets, sizes, shape, strict=True)
        )
        if not fits:
            raise _Wrong(f"{name!r} of shape {shape} has a box at {offsets} of {sizes}")
        number = _number(file, f"file of {name!r}")
        if number >= len(self._files):
            raise _Wrong(f"{name!r} is in file {number} of {len(self._files)}")
        return StoredBox(Box(offsets, sizes), number)

    def _check_that_files_are_covered(self, tensors: Mapping[str, StoredTensor]) -> None:
        """All tensors have as many bytes as the files have; where they are, each file tells."""
        held = sum(file.size_bytes - file.header_bytes - file.table_bytes for file in self._files)
        told = sum(tensor.size_bytes for tensor in tensors.values())
        if held != told:
            raise _Wrong(f"the files hold {held} bytes of tensors, which have {told}")


_MOST_DIMS = 64
_MOST_CUT_DIMS = 10


def _tile(shape: tuple[int, ...], boxes: Sequence[StoredBox]) -> bool:
    """True if ``boxes`` cover each element of ``shape`` once; time is linear in their number.

    How often a place is covered is known from the corners of all boxes, each with a sign that
    changes from one end of a dim to the other: the sums are those of one box of the whole shape.
    """
    cut = [
        dim
        for dim, size in enumerate(shape)
        if any(stored.box.sizes[dim] != size for stored in boxes)
    ]
    if len(cut) > _MOST_CUT_DIMS:
        raise _Wrong(f"a tensor is cut along {len(cut)} dims, expected at most {_MOST_CUT_DIMS}")
    corners: Counter[tuple[int, ...]] = Counter()
    signs = [(-1) ** sum(ends) for ends in product((0, 1), repeat=len(cut))]
    for stored in boxes:
        ends = [(stored.box.offsets[d], stored.box.offsets[d] + stored.box.sizes[d]) for d in cut]
        for corner, sign in zip(product(*ends), signs, strict=True):
            corners[corner] += sign
    if 0 not in shape:
        for corner, sign in zip(product(*((0, shape[d]) for d in cut)), signs, strict=True):
            corners[corner] -= sign
    return not any(corners.values())


def _typed(value: Any, kind: type[_T], what: str) -> _T:
    if not isinstance(value, kind):
        raise _Wrong(f"{what} is {type(value).__name__}, expected {kind.__name__}")
    return value


def _number(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise _Wrong(f"{what} is {value!r:.40}, expected a number from 0")
    return value


def _numbers(value: Any, what: str) -> tuple[int, ...]:
    return tuple(_number(each, what) for each in _typed(value, list, what))


def _list_of(count: int, value: Any, what: str) -> list[Any]:
    if len(_typed(value, list, what)) != count:
        raise _Wrong(f"{what} has {len(value)} numbers, expected {count}")
    return list(value)


def _checksum(value: Any, what: str) -> str:
    if not isinstance(value, str) or not _CHECKSUM.fullmatch(value):
        raise _Wrong(f"a checksum of {what!r} is {value!r:.50}")
    return value


def _parent(value: Any) -> Ancestor | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise _Wrong(f"parent is {value!r:.50}")
    generation = _typed(value[1], str, "generation of the parent")
    return Ancestor(_number(value[0], "parent"), generation)


def _metrics(value: Any) -> dict[str, float]:
    metrics = _typed(value, dict, "metrics")
    return {key: float(_typed(number, float, f"metric {key!r}")) for key, number in metrics.items()}


def _texts(value: Any, what: str) -> dict[str, str]:
    texts = _typed(value, dict, what)
    return {key: _typed(text, str, f"{what} of {key!r}") for key, text in texts.items()}
