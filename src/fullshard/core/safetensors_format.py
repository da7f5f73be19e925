# SPDX-License-Identifier: Apache-2.0
"""Files in the format of safetensors: a header that says where each tensor's bytes are.

https://github.com/huggingface/safetensors#format. Only the header and the order of bytes are known
here; what the bytes are is the engines' business.
"""

import json
import math
import os
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fullshard.core.errors import ConfigurationError

__all__ = ["DTYPE_BYTES", "Entry", "FileWriter", "Place", "entries_in", "header_of", "places_in"]

LARGEST_HEADER_BYTES = 100_000_000  # as the format says

# Bytes of one element, by the format's names of dtypes.
DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


@dataclass(frozen=True)
class Entry:
    """A tensor as a header tells it; ``dtype`` is the format's name, one of `DTYPE_BYTES`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all its elements."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Place:
    """An entry and where in the file its bytes begin."""

    entry: Entry
    start: int


class FileWriter:
    """A file that appears under its name when it is complete; keeps its first failure."""

    def __init__(self, target: Path, header: bytes):
        self._target = target
        self._staging = target.with_name(f"{target.name}.partial")
        self._file: IO[bytes] | None = None
        self.failure: OSError | None = None
        try:
            self._file = self._staging.open("wb")
        except OSError as error:
            self.failure = error
        self.append(header)

    def append(self, data: bytes | memoryview) -> None:
        """Write the next bytes."""
        if self._file is None or self.failure is not None:
            return
        try:
            self._file.write(data)
        except OSError as error:
            self.failure = error

    def finish(self) -> None:
        """Let the file appear, unless something has failed."""
        if self._file is None:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            if self.failure is None:
                self._staging.replace(self._target)
            else:
                self._staging.unlink(missing_ok=True)
        except OSError as error:
            self.failure = self.failure or error


def header_of(entries: Mapping[str, Entry], metadata: Mapping[str, str] | None = None) -> bytes:
    """What a file begins with that has the bytes of ``entries`` behind it, in their order.

    ``metadata`` is told beside ``format``, which other readers look for.
    """
    described: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    start = 0
    for name, entry in entries.items():
        stop = start + entry.size_bytes
        described[name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def places_in(source: Path, wanted: Mapping[str, Entry]) -> dict[str, Place]:
    """Where in the file each entry begins, if it holds these entries and no others.

    Raises `ConfigurationError` if it does not fit, `OSError` if it cannot be read.
    """
    described, first, data_bytes = _header_in(source)
    lacking, unknown = wanted.keys() - described.keys(), described.keys() - wanted.keys()
    if lacking or unknown:
        raise ConfigurationError(
            f"the model's {_some(lacking)} are not in it, its {_some(unknown)} not in the model"
        )
    for name, entry in wanted.items():
        told = described[name] if isinstance(described[name], dict) else {}
        found = told.get("dtype"), told.get("shape")
        expected = entry.dtype, list(entry.shape)
        if found != expected:
            raise ConfigurationError(
                f"{name!r} is {expected[0]} of shape {expected[1]} in the model, "
                f"{found[0]} of shape {found[1]} in the file"
            )
    return {
        name: Place(entry, first + _start_of(name, described[name], entry, data_bytes))
        for name, entry in wanted.items()
    }


def entries_in(source: Path) -> dict[str, Place]:
    """All that the file holds, by name.

    Raises `ConfigurationError` for a header that cannot be, `OSError` if it cannot be read.
    """
    described, first, data_bytes = _header_in(source)
    places = {}
    for name, told in described.items():
        entry = _entry_told(name, told)
        places[name] = Place(entry, first + _start_of(name, told, entry, data_bytes))
    return places


def _entry_told(name: str, told: Any) -> Entry:
    told = told if isinstance(told, dict) else {}
    dtype, shape = told.get("dtype"), told.get("shape")
    if not (
        dtype in DTYPE_BYTES
        and isinstance(shape, list)
        and all(type(size) is int and size >= 0 for size in shape)
    ):
        raise ConfigurationError(f"{name!r} is {dtype} of shape {shape}, which cannot be read")
    return Entry(dtype, tuple(shape))


def _header_in(source: Path) -> tuple[dict[str, Any], int, int]:
    """What the header tells, where the data begin, and how many bytes of them there are."""
    with source.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        data_bytes = source.stat().st_size - 8 - size
        if size > LARGEST_HEADER_BYTES or data_bytes < 0:
            raise ConfigurationError(f"it is no safetensors file: its header has {size} bytes")
        try:
            described = json.loads(file.read(size))
        except ValueError as error:
            raise ConfigurationError(f"it is no safetensors file: {error}") from error
    if not isinstance(described, dict):
        raise ConfigurationError("it is no safetensors file: its header is no JSON object")
    described.pop("__metadata__", None)
    return described, 8 + size, data_bytes


def _start_of(name: str, told: Mapping[str, Any], entry: Entry, data_bytes: int) -> int:
    offsets = told.get("data_offsets")
    if (
        not isinstance(offsets, list)
        or not all(type(each) is int for each in offsets)
        or len(offsets) != 2
        or not 0 <= offsets[0] <= offsets[1] <= data_bytes
        or offsets[1] - offsets[0] != entry.size_bytes
    ):
        raise ConfigurationError(
            f"{name!r} has {entry.size_bytes} bytes, which cannot be those at {offsets} of "
            f"{data_bytes}"
        )
    start: int = offsets[0]
    return start


def _some(names: Set[str]) -> str:
    shown = sorted(names)[:5]
    return f"{shown}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
