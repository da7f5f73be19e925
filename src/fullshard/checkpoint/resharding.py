# SPDX-License-Identifier: Apache-2.0
"""A checkpoint written anew, as another number of ranks would have written it."""

import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from fullshard.checkpoint.files import Files
from fullshard.checkpoint.format.stored import About, Manifest, StoredTensor
from fullshard.checkpoint.format.tiling import Slicing, Tiling, boxes_of_part
from fullshard.checkpoint.loading import Checkpoint, Progress
from fullshard.checkpoint.reading.reads import read_boxes
from fullshard.checkpoint.runs.commit import Staging
from fullshard.checkpoint.runs.folder import RunFolder, save_into
from fullshard.checkpoint.runs.retention import remove_entry
from fullshard.checkpoint.saving import publish, write_shard
from fullshard.checkpoint.shards import Piece, ShardReader
from fullshard.core.boxes import boxes_of_interval
from fullshard.core.errors import CheckpointError, ConfigurationError


class _SpanSource:
    """An interval of a stored tensor's elements, read and verified when it is copied."""

    def __init__(self, reader: ShardReader, name: str, tensor: StoredTensor, start: int):
        self._reader, self._name, self._tensor, self._start = reader, name, tensor, start

    def copy_into(self, view: memoryview, start: int) -> None:
        item = self._tensor.item_bytes
        # A block may begin and end inside an element: read whole ones.
        first, last = start // item, -(-(start + view.nbytes) // item)
        boxes = boxes_of_interval(self._tensor.shape, self._start + first, self._start + last)
        whole = memoryview(bytearray((last - first) * item))
        read_boxes(self._reader, self._name, self._tensor, boxes, whole)
        view[:] = whole[start - first * item :][: view.nbytes]


def reshard_checkpoint(
    source: Checkpoint, run: str | Path, world: int, progress: Progress | None = None
) -> Path:
    """Write ``source`` as ``world`` ranks would, each its equal part of every tensor.

    Loading needs no such copy: any number of ranks reads any checkpoint. It helps where one file a
    rank is wanted. Everything is verified on the way. Returns the folder of the step in ``run``.
    Raises `CheckpointError`.
    """
    if world < 1:
        raise ConfigurationError(f"a checkpoint is for at least 1 rank, got {world}")
    manifest, files = source.manifest, Files()
    folder = RunFolder(run).path
    staging = Staging(files, folder, uuid.uuid4().hex)
    about = About(
        manifest.step,
        f"resharded from {manifest.world} to {world} ranks ({manifest.layout})",
        manifest.versions,
        manifest.aliases,
        manifest.state,
        manifest.extra,
    )
    tensors, parts = _cut_evenly(manifest, world), []
    try:
        with (
            save_into(files, folder),
            ShardReader(source.files, source.folder, manifest) as reader,
        ):
            staging.open()
            for rank in range(world):
                mine = list(_pieces(manifest, tensors, reader, rank))
                parts.append({"file": write_shard(staging, rank, mine, files)})
                if progress is not None:
                    progress(sum(piece.size_bytes for piece in mine))
            return publish(staging, about, tensors, parts)
    except BaseException as error:
        remove_entry(files, folder, staging.path.name)
        if isinstance(error, OSError):
            raise CheckpointError(f"{run} cannot be written: {error}", file=str(run)) from error
        raise


def _cut_evenly(manifest: Manifest, world: int) -> dict[str, StoredTensor]:
    """All tensors, with ranks in place of files."""
    cut = {}
    for name, tensor in sorted(manifest.tensors.items(), key=lambda each: -each[1].item_bytes):
        size = -(-tensor.size_bytes // tensor.item_bytes // world)
        rule = Tiling((Slicing(None, 0, size, world),), ((0, 1, world),)) if size else None
        cut[name] = StoredTensor(tensor.shape, tensor.dtype, (), rule)
    return cut


def _pieces(
    manifest: Manifest, tensors: Mapping[str, StoredTensor], reader: ShardReader, rank: int
) -> Iterator[Piece]:
    for name, tensor in tensors.items():
        slicings = tensor.tiling.slicings if tensor.tiling is not None else ()
        boxes = boxes_of_part(tensor.shape, slicings, rank) if slicings else ()
        if boxes:
            start = rank * slicings[0].size
            source = _SpanSource(reader, name, manifest.tensors[name], start)
            yield Piece(name, tensor.shape, tensor.dtype, boxes, source)
