# SPDX-License-Identifier: Apache-2.0
"""Whole weights as safetensors: one file, or several with the index that Hugging Face reads."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fullshard.checkpoint.format.stored import About, StoredTensor
from fullshard.checkpoint.loading import Checkpoint, Progress
from fullshard.checkpoint.ranks import SoloRanks
from fullshard.checkpoint.reading.reads import PART_BYTES, in_parts, read_boxes
from fullshard.checkpoint.saving import save
from fullshard.checkpoint.shards import Piece, ShardReader
from fullshard.core.boxes import Box
from fullshard.core.errors import CheckpointError, ConfigurationError
from fullshard.core.safetensors_format import (
    Entry,
    EntryPlace,
    FileWriter,
    SliceReader,
    entries_in,
    header_of,
)

INDEX = "model.safetensors.index.json"


# -- out -----------------------------------------------------------------------------------------


def export_safetensors(
    checkpoint: Checkpoint,
    target: str | Path,
    part: str = "model",
    most_bytes: int = 5 * 10**9,
    progress: Progress | None = None,
) -> list[Path]:
    """Write one part of a checkpoint as whole tensors and return the files.

    ``part`` is the model's name in the checkpoint ("model" unless several were saved together). A
    ``target`` that ends with ``.safetensors`` becomes one file, as `save_full_weights` writes it;
    any other one a folder with files of about ``most_bytes`` and an index if there are several.
    Everything is verified while it is read. Raises `CheckpointError`.
    """
    target = Path(target)
    prefix = f"{part}/"
    names = {*checkpoint.manifest.tensors, *checkpoint.manifest.aliases}
    tensors = {
        name.removeprefix(prefix): checkpoint.stored(name)
        for name in sorted(names)
        if name.startswith(prefix)
    }
    if not tensors:
        parts = sorted({name.partition("/")[0] for name in names})
        raise ConfigurationError(f"{checkpoint.folder} has no part {part!r}; it has {parts}")
    if target.suffix == ".safetensors":
        target.parent.mkdir(parents=True, exist_ok=True)
        _write_file(checkpoint, target, tensors, prefix, progress)
        return [target]
    target.mkdir(parents=True, exist_ok=True)
    groups = list(_groups(tensors, most_bytes))
    files = []
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        if len(groups) == 1:
            name = "model.safetensors"
        _write_file(checkpoint, target / name, group, prefix, progress)
        weight_map.update(dict.fromkeys(group, name))
        files.append(target / name)
    if len(groups) > 1:
        total = sum(tensor.size_bytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        with _written(target / INDEX, json.dumps(index, indent=2).encode()):
            pass
        files.append(target / INDEX)
    return files


def _groups(
    tensors: Mapping[str, StoredTensor], most_bytes: int
) -> Iterator[dict[str, StoredTensor]]:
    group: dict[str, StoredTensor] = {}
    size_bytes = 0
    for name, tensor in tensors.items():
        if group and size_bytes + tensor.size_bytes > most_bytes:
            yield group
            group, size_bytes = {}, 0
        group[name] = tensor
        size_bytes += tensor.size_bytes
    yield group


def _write_file(
    checkpoint: Checkpoint,
    target: Path,
    tensors: Mapping[str, StoredTensor],
    prefix: str,
    progress: Progress | None,
) -> None:
    ordered = dict(sorted(tensors.items(), key=lambda each: -each[1].item_bytes))
    header = header_of({name: Entry(each.dtype, each.shape) for name, each in ordered.items()})
    block = memoryview(bytearray(PART_BYTES))
    with (
        _written(target, header) as writer,
        ShardReader(checkpoint.files, checkpoint.folder, checkpoint.manifest) as reader,
    ):
        for name, tensor in ordered.items():
            for boxes, size_bytes in in_parts(tensor):
                view = block[:size_bytes]
                read_boxes(reader, prefix + name, tensor, boxes, view)
                writer.append(view)
                if progress is not None:
                    progress(size_bytes)


@contextmanager
def _written(target: Path, header: bytes) -> Iterator[FileWriter]:
    """Write a file that begins with ``header``. Raises `CheckpointError` if it cannot be."""
    with FileWriter(target, header) as writer:
        yield writer
    if writer.failure is not None:
        raise CheckpointError(f"{target} cannot be written: {writer.failure}", file=str(target))


# -- in ------------------------------------------------------------------------------------------


class _FileSource:
    """The bytes of one tensor of a safetensors file."""

    def __init__(self, path: Path, place: EntryPlace):
        self._path, self._start = path, place.start

    def copy_into(self, view: memoryview, start: int) -> None:
        try:
            with SliceReader(self._path) as file:
                file.read_into(view, self._start + start)
        except ConfigurationError as error:
            raise CheckpointError(f"{self._path}: {error}", file=str(self._path)) from error


def import_safetensors(
    source: str | Path, run: str | Path, step: int = 0, part: str = "model"
) -> Path:
    """Make a step of a run out of safetensors files, and return its folder.

    ``source`` is one file, or a folder with the index that Hugging Face writes, or with any
    safetensors files. The step has weights alone: it loads without an optimizer. Raises
    `CheckpointError` for files that cannot be read.
    """
    if not part or "/" in part or "\0" in part:
        raise ConfigurationError(f"a model is named by a text without '/', got part={part!r}")
    source = Path(source)
    pieces: dict[str, Piece] = {}
    for path, wanted in _files_of(source).items():
        try:
            places = entries_in(path)
        except (OSError, ConfigurationError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}", file=str(path)) from error
        lacking = sorted((wanted or set()) - places.keys())
        if lacking:
            raise CheckpointError(f"{path} has no tensor {lacking[0]!r}", file=str(path))
        for name, place in places.items():
            full = f"{part}/{name}"
            if full in pieces:
                raise CheckpointError(f"{name!r} is in two files of {source}", tensor=name)
            shape = place.entry.shape
            boxes = (Box((0,) * len(shape), shape),) if place.entry.size_bytes else ()
            pieces[full] = Piece(full, shape, place.entry.dtype, boxes, _FileSource(path, place))
    about = About(step, layout=f"imported from {source.name}", state={"parts": {part: "weights"}})
    return save(Path(run), list(pieces.values()), about, SoloRanks(), keep=None)


def _files_of(source: Path) -> dict[Path, set[str] | None]:
    """The files to read, and what each must hold as far as an index tells."""
    if source.is_file():
        return {source: None}
    if (source / INDEX).is_file():
        held: dict[Path, set[str] | None] = {}
        for name, file in _weight_map(source / INDEX).items():
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise CheckpointError(
                    f"{source / INDEX}: {file!r} is no file beside it", file=str(source / INDEX)
                )
            known = held.setdefault(source / file, set())
            assert known is not None
            known.add(name)
        return held
    found: dict[Path, set[str] | None] = dict.fromkeys(sorted(source.glob("*.safetensors")))
    if not found:
        raise CheckpointError(f"there are no safetensors files in {source}", file=str(source))
    return found


def _weight_map(index: Path) -> dict[str, str]:
    try:
        told: Any = json.loads(index.read_bytes())["weight_map"]
        return {str(name): str(file) for name, file in told.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}", file=str(index)) from error
