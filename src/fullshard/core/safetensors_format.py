# SPDX-License-Identifier: Apache-2.0
"""Files in the format of safetensors: a header that says where each tensor's bytes are.

https://github.com/huggingface/safetensors#format. Only the header and the order of bytes are known
here; what the bytes are is the engines' business.
"""

import contextlib
import json
import math
import os
import stat
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import item_bytes

_METADATA = "__metadata__"  # the one key of a header that is no tensor
LARGEST_HEADER_BYTES = 100_000_000  # as the format says

DTYPE_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint16": "U16", "int16": "I16", "float16": "F16", "bfloat16": "BF16", "uint32": "U32",
    "int32": "I32", "float32": "F32", "uint64": "U64", "int64": "I64", "float64": "F64",
}  # fmt: skip
"""The format's names of dtypes, by those that torch, numpy and JAX share."""

DTYPE_BYTES = {told: item_bytes(name) for name, told in DTYPE_NAMES.items()}
"""Bytes of one element, by the format's names."""


@dataclass(frozen=True)
class Entry:
    """A tensor as a header tells it; ``dtype`` is the format's name, one of `DTYPE_BYTES`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class EntryPlace:
    """An entry and where in the file its bytes begin."""

    entry: Entry
    start: int


class FileWriter:
    """A file that appears under its name when it is complete; keeps its first failure.

    Until then it lies beside the target, with ``.partial`` behind its name. It is complete when the
    ``with`` ends well; else what is there of it is removed. A target that is there and no regular
    file (a device, a pipe, a folder) is a failure, and is left alone.
    """

    def __init__(self, target: Path, header: bytes):
        self._target = Path(os.path.realpath(target))  # through a link, as writing to it would go
        self._staging = self._target.with_name(f"{self._target.name}.partial")
        self._descriptor: int | None = None
        self.failure: OSError | None = None
        try:
            _refuse_other_than_file(self._target)
            _refuse_other_than_file(self._staging)
            self._staging.unlink(missing_ok=True)  # of a process that was killed
            self._descriptor = os.open(self._staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            self.failure = error
        self.append(header)

    def __enter__(self) -> "FileWriter":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self._let_appear()
        self._remove()

    def append(self, data: bytes | memoryview) -> None:
        """Write the next bytes."""
        self._write(data, None)

    def write_at(self, start: int, data: memoryview) -> None:
        """Write bytes that begin at ``start`` of the file; `append` goes on where it was."""
        self._write(data, start)

    def _write(self, data: bytes | memoryview, start: int | None) -> None:
        if self._descriptor is None or self.failure is not None:
            return
        rest = memoryview(data).cast("B")
        try:
            while rest:
                if start is None:
                    written = os.write(self._descriptor, rest)
                else:
                    written = os.pwrite(self._descriptor, rest, start)
                    start += written
                rest = rest[written:]
        except OSError as error:
            self.failure = error

    def _let_appear(self) -> None:
        if self._descriptor is None or self.failure is not None:
            return
        try:
            os.fsync(self._descriptor)
            if not os.path.samestat(os.fstat(self._descriptor), self._staging.stat()):
                raise FileExistsError(f"somebody else writes {self._staging} too")
            self._staging.replace(self._target)
        except OSError as error:
            self.failure = error

    def _remove(self) -> None:
        """Remove what has been written, unless it is complete."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), self._staging.stat()):
                self._staging.unlink()
        try:
            os.close(descriptor)
        except OSError as error:
            self.failure = self.failure or error


class SliceReader:
    """Reads bytes of a file from any place; a context that closes it. Methods raise `OSError`."""

    def __init__(self, source: Path):
        self._descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> "SliceReader":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read_into(self, view: memoryview, start: int) -> None:
        """Fill ``view`` from ``start`` on. Raises `ConfigurationError` if the file ends before."""
        filled = 0
        while filled < view.nbytes:
            count = os.preadv(self._descriptor, [view[filled:]], start + filled)
            if not count:
                raise ConfigurationError(f"it ends {view.nbytes - filled} bytes early")
            filled += count


def _refuse_other_than_file(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise FileExistsError(f"{path} is there, and is no regular file")


def header_of(entries: Mapping[str, Entry], metadata: Mapping[str, str] | None = None) -> bytes:
    """The header of a file in which the bytes of ``entries`` follow in their order.

    ``metadata`` is told beside ``format``, which other readers look for.
    Raises `ConfigurationError` for a name that the format cannot hold.
    """
    if _METADATA in entries:
        raise ConfigurationError(f"a tensor cannot be named {_METADATA!r} in a safetensors file")
    described: dict[str, Any] = {_METADATA: {"format": "pt", **(metadata or {})}}
    start = 0
    for name, entry in entries.items():
        stop = start + entry.size_bytes
        described[name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    try:
        text = json.dumps(described, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"a name cannot be written as UTF-8: {error}") from error
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def places_in(source: Path, wanted: Mapping[str, Entry]) -> dict[str, EntryPlace]:
    """The offset of each entry in a file that holds these entries and no others.

    Raises `ConfigurationError` if it does not fit, `OSError` if it cannot be read.
    """
    described, first, data_bytes = _header_in(source)
    lacking, unknown = wanted.keys() - described.keys(), described.keys() - wanted.keys()
    if lacking or unknown:
        raise ConfigurationError(
            f"the model's {_some(lacking)} are not in it, its {_some(unknown)} not in the model"
        )
    for name, entry in wanted.items():
        found = _entry_told(name, described[name])
        if found != entry:
            raise ConfigurationError(
                f"{name!r} is {entry.dtype} of shape {list(entry.shape)} in the model, "
                f"{found.dtype} of shape {list(found.shape)} in the file"
            )
    places = _places(described, first, data_bytes)
    return {name: places[name] for name in wanted}


def entries_in(source: Path) -> dict[str, EntryPlace]:
    """All that the file holds, by name. Raises as `places_in` does."""
    return _places(*_header_in(source))


def entries_of(header: bytes, data_bytes: int) -> dict[str, EntryPlace]:
    """All that a file with this ``header`` holds, by name. Raises `ConfigurationError`."""
    return _places(_described(header[8:]), len(header), data_bytes)


def _entry_told(name: str, told: Any) -> Entry:
    told = told if isinstance(told, dict) else {}
    dtype, shape = told.get("dtype"), told.get("shape")
    if not (
        isinstance(dtype, str)
        and dtype in DTYPE_BYTES
        and isinstance(shape, list)
        and all(type(size) is int and size >= 0 for size in shape)
    ):
        raise ConfigurationError(f"{name!r} is {dtype} of shape {shape}, which cannot be read")
    return Entry(dtype, tuple(shape))


def _places(described: Mapping[str, Any], first: int, data_bytes: int) -> dict[str, EntryPlace]:
    """Find where all entries begin, if together they are all of the data, each byte once."""
    spans: list[tuple[int, int, str]] = []
    places = {}
    for name, told in described.items():
        entry = _entry_told(name, told)
        start = _start_of(name, told, entry, data_bytes)
        spans.append((start, start + entry.size_bytes, name))
        places[name] = EntryPlace(entry, first + start)
    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            raise ConfigurationError(
                f"{name!r} begins at byte {start} of the data, but what is before it ends at {end}"
            )
        end = stop
    if end != data_bytes:
        raise ConfigurationError(f"its entries end at byte {end} of {data_bytes} bytes of data")
    return places


def _header_in(source: Path) -> tuple[dict[str, Any], int, int]:
    """Read the header; return its content, the offset of the data and their size in bytes."""
    if not stat.S_ISREG(source.stat().st_mode):  # a pipe would be waited for
        raise ConfigurationError("it is no regular file")
    with source.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        data_bytes = os.fstat(file.fileno()).st_size - 8 - size
        if size > LARGEST_HEADER_BYTES or data_bytes < 0:
            raise ConfigurationError(f"it is no safetensors file: its header has {size} bytes")
        return _described(file.read(size)), 8 + size, data_bytes


def _described(text: bytes) -> dict[str, Any]:
    """Parse the header's JSON but for the notes in it."""
    try:
        described = json.loads(text.decode(), object_pairs_hook=_without_duplicates)
    except RecursionError:  # with its thousand frames as a cause nobody could read it
        raise ConfigurationError(
            "it is no safetensors file: its header is nested too deeply"
        ) from None
    except ValueError as error:
        raise ConfigurationError(f"it is no safetensors file: {error}") from error
    if not isinstance(described, dict):
        raise ConfigurationError("it is no safetensors file: its header is no JSON object")
    notes = described.pop(_METADATA, {})
    if not isinstance(notes, dict) or not all(isinstance(each, str) for each in notes.values()):
        raise ConfigurationError(f"it is no safetensors file: its {_METADATA} has other than texts")
    return described


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"its header has {name!r} more than once")
        found[name] = value
    return found


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
