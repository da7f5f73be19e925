# SPDX-License-Identifier: Apache-2.0
"""Chunk checksums beside a checkpoint that another library has written.

The seal of a folder is the file ``fullshard-seal.json`` in it and covers all files below; that of a
single file stands beside it with ``.fullshard-seal.json`` behind its name. It says nothing about
what the files mean, and the library that wrote them does not see it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from fullshard.checkpoint.format.envelope import checksum_of, unwrap, wrap
from fullshard.checkpoint.format.index import CHUNK_BYTES, chunk_count
from fullshard.checkpoint.format.manifest import LARGEST_MANIFEST_BYTES
from fullshard.checkpoint.loading import Progress
from fullshard.core.errors import CheckpointError, ConfigurationError
from fullshard.core.safetensors_format import FileWriter

FORMAT = "fullshard-seal"
VERSION = 1
SEAL = "fullshard-seal.json"
_CHECKSUM = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class SealReport:
    """The extent of a seal; ``unsealed`` are files in the folder that it does not know."""

    path: Path
    file_count: int
    size_bytes: int
    unsealed: tuple[str, ...] = ()


def is_sealed(path: str | Path) -> bool:
    """True if there is a seal for this file or folder."""
    return _seal_of(Path(path)).is_file()


def _seal_of(target: Path) -> Path:
    return target / SEAL if target.is_dir() else target.with_name(f"{target.name}.{SEAL}")


def seal(path: str | Path, progress: Progress | None = None) -> SealReport:
    """Read all files of a checkpoint and write the seal, in place of one that is there.

    Raises `ConfigurationError` if there is nothing to seal, `CheckpointError` if it cannot be read.
    """
    target = Path(path)
    names = _names_below(target)
    if not names:
        raise ConfigurationError(f"{target} holds no files to seal")
    told: dict[str, Any] = {}
    try:
        for name, place in names.items():
            before = place.stat().st_size
            checksums = [checksum_of(chunk) for chunk in _chunks(place, progress)]
            if chunk_count(before) != len(checksums):
                raise CheckpointError(f"{place} changes while it is sealed", file=str(place))
            told[name] = {"size_bytes": before, "xxh3_128": checksums}
        data = wrap(FORMAT, VERSION, {"chunk_bytes": CHUNK_BYTES, "files": told})
        with FileWriter(_seal_of(target), data) as writer:
            pass
        if writer.failure is not None:
            raise writer.failure
    except OSError as error:
        raise CheckpointError(f"{target} cannot be sealed: {error}", file=str(target)) from error
    return SealReport(
        _seal_of(target), len(told), sum(each["size_bytes"] for each in told.values())
    )


def check_seal(path: str | Path, progress: Progress | None = None) -> SealReport:
    """Read all that is sealed and compare. Raises `CheckpointError` naming file and bytes."""
    target = Path(path)
    place = _seal_of(target)
    try:
        if place.stat().st_size > LARGEST_MANIFEST_BYTES:
            raise CheckpointError(f"{place} is too large for a seal", file=str(place))
        told = _checked(unwrap(place.read_bytes(), FORMAT, VERSION, place), place)
    except OSError as error:
        raise CheckpointError(
            f"there is no seal of {target} to check: {error}. Make one with 'fullshard ckpt seal'",
            file=str(place),
        ) from error
    root = target if target.is_dir() else target.parent
    for name, (size_bytes, checksums) in told.items():
        _compare(root / name, size_bytes, checksums, progress)
    unsealed = tuple(name for name in _names_below(target) if name not in told)
    return SealReport(place, len(told), sum(size for size, _ in told.values()), unsealed)


def _compare(place: Path, size_bytes: int, checksums: list[str], progress: Progress | None) -> None:
    try:
        found = place.stat().st_size
        if found != size_bytes:
            raise CheckpointError(
                f"{place}: bytes 0 to {size_bytes} were sealed, but the file has {found}",
                file=str(place),
                byte_range=(0, size_bytes),
            )
        for number, chunk in enumerate(_chunks(place, progress)):
            if checksum_of(chunk) != checksums[number]:
                span = (number * CHUNK_BYTES, number * CHUNK_BYTES + len(chunk))
                raise CheckpointError(
                    f"{place}: bytes {span[0]} to {span[1]} do not match their checksum: they have "
                    "changed since they were sealed",
                    file=str(place),
                    byte_range=span,
                )
    except OSError as error:
        raise CheckpointError(f"{place} cannot be read: {error}", file=str(place)) from error


def _checked(content: Any, place: Path) -> dict[str, tuple[int, list[str]]]:
    """The files of a seal, all of which are below its folder and have as many checksums as fit."""
    told: dict[str, tuple[int, list[str]]] = {}
    try:
        if content["chunk_bytes"] != CHUNK_BYTES:
            raise ValueError(f"chunk_bytes is {content['chunk_bytes']!r}")
        for name, each in content["files"].items():
            parts = PurePosixPath(name).parts
            if not parts or ".." in parts or name.startswith("/") or "\0" in name:
                raise ValueError(f"{name!r} is no file below the folder")
            size_bytes, checksums = each["size_bytes"], each["xxh3_128"]
            if type(size_bytes) is not int or not 0 <= size_bytes < 2**62:
                raise ValueError(f"{name!r} has {size_bytes!r} bytes")
            if len(checksums) != chunk_count(size_bytes) or not all(
                isinstance(text, str) and _CHECKSUM.fullmatch(text) for text in checksums
            ):
                raise ValueError(f"the checksums of {name!r} do not fit its size")
            told[name] = size_bytes, list(checksums)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"cannot read {place}: {error!r}", file=str(place)) from error
    return told


def _names_below(target: Path) -> dict[str, Path]:
    """Each file by its path from the folder, with slashes; a seal is none of them."""
    if not target.exists():
        raise ConfigurationError(f"there is nothing at {target}")
    if target.is_file():
        return {target.name: target}
    found = sorted(place for place in target.rglob("*") if place.is_file())
    return {
        place.relative_to(target).as_posix(): place
        for place in found
        if not place.name.endswith(SEAL)
    }


def _chunks(place: Path, progress: Progress | None) -> Iterator[bytes]:
    with place.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
            if progress is not None:
                progress(len(chunk))
