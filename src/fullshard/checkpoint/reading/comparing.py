# SPDX-License-Identifier: Apache-2.0
"""Two checkpoints compared by what they hold, however it is cut."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from fullshard.checkpoint.conversion import numpy_dtype
from fullshard.checkpoint.format.envelope import checksum_of
from fullshard.checkpoint.format.stored import Manifest, StoredTensor
from fullshard.checkpoint.loading import Checkpoint, Progress
from fullshard.checkpoint.reading.reads import in_parts, read_boxes
from fullshard.checkpoint.shards import ShardReader


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
    count, largest = 0, 0.0
    for boxes, size_bytes in in_parts(a):
        held = numpy.empty((2, size_bytes), numpy.uint8)
        read_boxes(reader_a, name, a, boxes, held[0].data)
        read_boxes(reader_b, name, b, boxes, held[1].data)
        rows = (held[0] != held[1]).reshape(-1, a.item_bytes)
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
    known = numpy_dtype(dtype)
    if known in (None, "?"):
        return numpy.zeros(raw.shape)
    return raw.view(known).astype(numpy.float64)
