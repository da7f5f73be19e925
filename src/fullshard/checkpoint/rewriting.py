# SPDX-License-Identifier: Apache-2.0
"""A checkpoint written anew for another number of ranks, and two of them compared."""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
from numpy.typing import NDArray

from fullshard.checkpoint.files import Files
from fullshard.checkpoint.format.envelope import checksum_of
from fullshard.checkpoint.format.stored import About, Manifest, StoredTensor
from fullshard.checkpoint.format.tiling import Slicing, Tiling, boxes_of_part
from fullshard.checkpoint.loading import Checkpoint, Progress
from fullshard.checkpoint.reading.chunks import read_boxes
from fullshard.checkpoint.runs.commit import Staging
from fullshard.checkpoint.runs.folder import RunFolder
from fullshard.checkpoint.runs.lock import lock_run
from fullshard.checkpoint.runs.retention import remove_entry
from fullshard.checkpoint.saving import publish, write_shard
from fullshard.checkpoint.shards import Piece, ShardReader
from fullshard.core.boxes import boxes_of_interval
from fullshard.core.errors import CheckpointError, ConfigurationError

__all__ = ["Difference", "compare", "reshard_checkpoint", "same_content"]

PART_BYTES = 8 * 2**20


class _SpanSource:
    """An interval of a stored tensor's elements, read and verified when it is copied."""

    def __init__(self, reader: ShardReader, name: str, tensor: StoredTensor, start: int):
        self._reader, self._name, self._tensor, self._start = reader, name, tensor, start

    def copy_into(self, view: memoryview, start: int) -> None:
        item = self._tensor.item_bytes
        # A block may begin and end inside an element: read whole ones.
        first, last = start // item, -(-(start + view.nbytes) // item)
        boxes = boxes_of_interval(self._tensor.shape, self._start + first, self._start + last)
        if start == first * item and view.nbytes == (last - first) * item:
            read_boxes(self._reader, self._name, self._tensor, boxes, view)
            return
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
        files.make_folder(folder)
        lock_run(files, folder)
        staging.open()
        with ShardReader(source.files, source.folder, manifest) as reader:
            for rank in range(world):
                mine = list(_pieces(manifest, tensors, reader, rank))
                parts.append(write_shard(staging, rank, mine, files))
                if progress is not None:
                    progress(sum(piece.size_bytes for piece in mine))
        outcome = publish(staging, about, tensors, parts)
        if outcome["failure"]:
            raise CheckpointError(outcome["failure"], file=outcome["file"])
    except OSError as error:
        remove_entry(files, folder, staging.path.name)
        raise CheckpointError(f"{run} cannot be written: {error}", file=str(run)) from error
    except BaseException:
        remove_entry(files, folder, staging.path.name)
        raise
    return Path(outcome["folder"])


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


# -- comparing -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """One way in which two checkpoints differ; ``tensor`` is empty for what is not about one."""

    tensor: str
    what: str


def compare(a: Checkpoint, b: Checkpoint, progress: Progress | None = None) -> Iterator[Difference]:
    """All differences of content, not of how it is cut. Raises `CheckpointError` for damage.

    What is cut alike is compared by checksums alone; the rest is read from both.
    """
    for label, of_a, of_b in (
        ("step", a.manifest.step, b.manifest.step),
        ("extra", a.manifest.extra, b.manifest.extra),
        ("state beside tensors", a.manifest.state, b.manifest.state),
        ("other names of tensors", dict(a.manifest.aliases), dict(b.manifest.aliases)),
    ):
        if of_a != of_b:
            yield Difference("", f"{label}: {_short(of_a)} and {_short(of_b)}")
    with (
        ShardReader(a.files, a.folder, a.manifest) as reader_a,
        ShardReader(b.files, b.folder, b.manifest) as reader_b,
    ):
        sums_a, sums_b = _content_sums(reader_a, a.manifest), _content_sums(reader_b, b.manifest)
        for name in sorted(a.manifest.tensors.keys() | b.manifest.tensors.keys()):
            of_a, of_b = a.manifest.tensors.get(name), b.manifest.tensors.get(name)
            if of_a is None or of_b is None:
                yield Difference(name, f"only in {(b if of_a is None else a).folder}")
                continue
            if (of_a.shape, of_a.dtype) != (of_b.shape, of_b.dtype):
                yield Difference(name, f"{of_a.dtype} {of_a.shape} and {of_b.dtype} {of_b.shape}")
                continue
            count, most = 0, 0.0
            if sums_a.get(name) != sums_b.get(name):
                count, most = _unequal(name, of_a, reader_a, of_b, reader_b)
            if progress is not None:
                progress(of_a.size_bytes)
            if count:
                numel = of_a.size_bytes // of_a.item_bytes
                by = f", by {most:.3g} at most" if most else ""
                yield Difference(name, f"{count:,} of {numel:,} elements differ{by}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def same_content(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """True if two tensors of a step are cut alike and have equal checksums."""
    a, b = checkpoint.stored(one), checkpoint.stored(other)
    with ShardReader(checkpoint.files, checkpoint.folder, checkpoint.manifest) as reader:
        sums = _content_sums(reader, checkpoint.manifest, (a, b))
    return (a.shape, a.dtype) == (b.shape, b.dtype) and len(set(sums.values())) == 1


def _content_sums(
    reader: ShardReader, manifest: Manifest, of: Sequence[StoredTensor] | None = None
) -> dict[str, int]:
    """A number for each tensor, or those ``of`` alone: equal if cut and checksums are.

    Files come one after the other, so that no more than one of them needs to be remembered.
    """
    sums: dict[str, int] = {}
    for number in range(len(manifest.files)):
        for name, tensor, stored in manifest.boxes_in(number):
            if of is None or any(tensor is each for each in of):
                place = reader.place(name, tensor, stored)
                told = f"{stored.box} {place.checksums.hex()}"
                sums[name] = sums.get(name, 0) + int(checksum_of(told.encode()), 16)
    return sums


def _unequal(
    name: str, a: StoredTensor, reader_a: ShardReader, b: StoredTensor, reader_b: ShardReader
) -> tuple[int, float]:
    """Count the elements that differ in a bit, and return the largest difference of numbers."""
    item = a.item_bytes
    numel, most = a.size_bytes // item, PART_BYTES // item
    count, largest = 0, 0.0
    for start in range(0, numel, most):
        boxes = boxes_of_interval(a.shape, start, min(start + most, numel))
        size_bytes = sum(box.numel for box in boxes) * item
        held = numpy.empty((2, size_bytes), numpy.uint8)
        read_boxes(reader_a, name, a, boxes, held[0].data)
        read_boxes(reader_b, name, b, boxes, held[1].data)
        rows = (held[0] != held[1]).reshape(-1, item)
        count += int(rows.any(axis=1).sum())
        with numpy.errstate(invalid="ignore", over="ignore"):  # infinities, NaN
            numbers = _numbers(held, a.dtype)
            apart = numpy.abs(numbers[0] - numbers[1])
        largest = max(largest, float(apart[~numpy.isnan(apart)].max(initial=0)))
    return count, largest


def _numbers(raw: NDArray[numpy.uint8], dtype: str) -> NDArray[numpy.float64]:
    """Return stored bytes as numbers; zeros for dtypes that NumPy does not know."""
    if dtype == "BF16":
        return (raw.view("<u2").astype("<u4") << 16).view("<f4").astype(numpy.float64)
    if dtype in ("BOOL", "F8_E4M3", "F8_E5M2"):
        return numpy.zeros(raw.shape)
    return raw.view(f"<{dtype[0].lower()}{int(dtype[1:]) // 8}").astype(numpy.float64)
