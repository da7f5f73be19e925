# SPDX-License-Identifier: Apache-2.0
"""Files in the format of safetensors: a header that says where each tensor's bytes are."""

import json
import math
import os
from collections.abc import Set
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from fullshard.core.errors import ConfigurationError

__all__ = ["DTYPE_NAMES", "FileWriter", "header_of", "places_in"]

LARGEST_HEADER_BYTES = 100_000_000  # as the format says

# The dtype names of the safetensors format: https://github.com/huggingface/safetensors#format
DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


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
        self._write(header)

    def append(self, data: Tensor) -> None:
        """Write flat bytes."""
        self._write(data.cpu().numpy().data)

    def _write(self, data: bytes | memoryview) -> None:
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


def header_of(entries: dict[str, Tensor]) -> bytes:
    """What a file begins with that has the bytes of ``entries`` behind it, in their order."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in entries.items():
        stop = start + tensor.numel() * tensor.element_size()
        described[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def places_in(source: Path, wanted: dict[str, Tensor]) -> dict[str, int]:
    """Where in the file each entry begins. Raises `ConfigurationError` if it does not fit."""
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
    lacking, unknown = wanted.keys() - described.keys(), described.keys() - wanted.keys()
    if lacking or unknown:
        raise ConfigurationError(
            f"the model's {_some(lacking)} are not in it, its {_some(unknown)} not in the model"
        )
    return {
        name: 8 + size + _start_of(name, described[name], tensor, data_bytes)
        for name, tensor in wanted.items()
    }


def _start_of(name: str, described: Any, tensor: Tensor, data_bytes: int) -> int:
    told = described if isinstance(described, dict) else {}
    found = told.get("dtype"), told.get("shape")
    expected = DTYPE_NAMES[tensor.dtype], list(tensor.shape)
    if found != expected:
        raise ConfigurationError(
            f"{name!r} is {expected[0]} of shape {expected[1]} in the model, "
            f"{found[0]} of shape {found[1]} in the file"
        )
    numel_bytes = math.prod(tensor.shape) * tensor.element_size()
    offsets = told.get("data_offsets")
    if (
        not isinstance(offsets, list)
        or not all(type(each) is int for each in offsets)
        or len(offsets) != 2
        or not 0 <= offsets[0] <= offsets[1] <= data_bytes
        or offsets[1] - offsets[0] != numel_bytes
    ):
        raise ConfigurationError(
            f"{name!r} has {numel_bytes} bytes, which cannot be those at {offsets} of {data_bytes}"
        )
    start: int = offsets[0]
    return start


def _some(names: Set[str]) -> str:
    shown = sorted(names)[:5]
    return f"{shown}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
