# SPDX-License-Identifier: Apache-2.0
"""The place of every element of a unit: slots in a flat buffer, cut into equal slices.

[Note: Equal slices]
A unit's parameters lie one behind the other in a flat buffer, one segment for each kind
(dtype, trainable). A segment is cut into equal slices, one a rank, without regard to where one
parameter ends and the next begins. So a gather is one call that writes every element to its final
place, a reduce is its mirror image, and no rank holds more than another.

Of {no copy after the gather, whole rows on one rank, no padding} equal slices allow any two; we
take the first and the last. The price is that a rank holds an *interval* of a parameter rather than
some of its rows; `fullshard.core.boxes` turns it back into rectangles.

[Note: Thirty-two elements]
Slots start, and slices end, on multiples of 32 elements. In every dtype that is at least 16 bytes,
which NCCL needs for its fast path, and it stays so when the buffer travels in another dtype than
the one it rests in. And a vectorised kernel then sees an element at the same place of its loop in a
span as in the whole parameter, and rounds alike: an optimizer's step on spans is, bit by bit, that
of one process (16 would do for fp32, not for bf16, whose kernels take 32 elements a turn). Since
slots do not depend on the number of slices, an element has the same offset for every world size,
and resharding is interval arithmetic.

[Note: Whole rows]
PyTorch's DTensor cuts a tensor into whole rows (slices of dimension 0, as `torch.chunk` makes
them), and code written for FSDP2 relies on it. With ``align="row"`` every parameter gets a segment
of its own, cut after every ceil(rows / ranks) rows and padded behind the last. That keeps the
promise that a gather writes each element to its final place. Its price is a message for each
parameter in place of one for a unit (they travel in one coalesced call), up to one chunk of rows of
padding, and slices that need not be aligned.

Small parameters would pay most, so they share a segment, ``packed``: each slice has the rows of all
of them, one behind the other. Such a segment travels in that order, and its few elements are then
copied to their places. So does what is cut along another dimension than the first. A parameter
without dims has no rows; it stays in a segment that is cut by element. In a packed slice the rows
of each parameter start on a multiple of 32 elements, too, so that an optimizer may step on all of
it at once. Beyond 256 ranks, where zeros would be most of what travels, they touch.

[Note: Whole matrices]
An optimizer that multiplies matrices (Muon, Shampoo) needs all of one. Parameters that have an
``owner`` share a segment in which they lie in the order of their owners, and its slices are as long
as what these own: unequal, even empty, and without padding. A gather still writes each element to
its final place, and a reduce sends a gradient where the optimizer wants it. Which rank owns what is
chosen for the whole model: see `fullshard.core.grouping`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, overload

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec, item_bytes
from fullshard.core.strategy import AS_IT_RESTS, Precision

Align = Literal["element", "row"]
"""The places where parameters may be cut; see [Note: Equal slices] and [Note: Whole rows]."""

ALIGN_NUMEL = 32

PACKED_BYTES = 2**15
"""Parameters of at most so many bytes share a segment when they are cut by rows."""

_ALIGN_BYTES = 32

_MOST_PADDED_SHARDS = 256
"""Up to so many ranks what is packed starts on multiples of 32 elements in each slice."""


def stored_bytes(numel: int, dtype: str) -> int:
    """Bytes that ``numel`` elements take in a flat buffer, where the next begin on 32 bytes."""
    return aligned_bytes(numel * item_bytes(dtype))


def aligned_bytes(size: int) -> int:
    """Bytes up to where the next tensor begins in a flat buffer."""
    return -(-size // _ALIGN_BYTES) * _ALIGN_BYTES


def _round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


@dataclass(frozen=True)
class Span:
    """The interval [start, stop) of a flattened parameter that one rank holds; may be empty."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements held."""
        return self.stop - self.start


@dataclass(frozen=True)
class SpansOfRanks(Sequence[Span]):
    """The spans of a parameter of ``numel`` elements that begins at ``start`` of its segment.

    Worked out when asked for: one for each rank of thousands, kept for each parameter, is more than
    a host has to spare.
    """

    start: int
    numel: int
    slice_numel: int
    shards: int

    def __len__(self) -> int:
        return self.shards

    @overload
    def __getitem__(self, rank: int) -> Span: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Span]: ...
    def __getitem__(self, rank: int | slice) -> Span | list[Span]:
        if isinstance(rank, slice):
            return [self[each] for each in range(*rank.indices(self.shards))]
        if not -self.shards <= rank < self.shards:
            raise IndexError(f"rank {rank} of {self.shards}")
        first = rank % self.shards * self.slice_numel - self.start
        start = min(max(first, 0), self.numel)
        return Span(start, min(max(first + self.slice_numel, 0), self.numel))


@dataclass(frozen=True)
class Slot:
    """A parameter's place [start, stop) in its segment, in elements.

    Of one that is cut along another dimension than the first, the elements are counted with that
    dimension moved to the front.
    """

    spec: ParamSpec
    start: int
    stop: int


@dataclass(frozen=True)
class Segment:
    """The parameters of one unit that share dtype and trainability, as one flat run of elements.

    They rest in ``dtype``, are gathered in ``full_dtype``, their gradients travel in
    ``grad_dtype``. ``by_row`` and ``packed``: see [Note: Whole rows]; a packed segment's slots are
    places in the order of parameters, not in that in which it travels. ``ends``: where the slices
    of ranks end if they are unequal, see [Note: Whole matrices]; ``slice_numel`` is then the
    largest.
    """

    dtype: str
    trainable: bool
    slots: tuple[Slot, ...]
    shards: int
    slice_numel: int
    full_dtype: str
    grad_dtype: str
    by_row: bool = False
    packed: bool = False
    ends: tuple[int, ...] = ()

    @property
    def full_numel(self) -> int:
        """Elements of the whole segment with padding; of equal slices all of them."""
        numel: int = self.ends[-1] if self.ends else self.slice_numel * self.shards
        return numel

    def slice_of(self, rank: int) -> slice:
        """Return where the slice of ``rank`` lies in the whole segment."""
        if self.ends:
            return slice(self.ends[rank - 1] if rank else 0, self.ends[rank])
        return slice(rank * self.slice_numel, (rank + 1) * self.slice_numel)

    def numel_of(self, rank: int) -> int:
        """Return the elements of the slice of ``rank``."""
        numel: int = self.slice_of(rank).stop - self.slice_of(rank).start
        return numel

    @property
    def unequal(self) -> list[int] | None:
        """Elements of each rank's slice, in rank order; None if they are equal."""
        return [self.numel_of(rank) for rank in range(self.shards)] if self.ends else None

    @property
    def slice_bytes(self) -> int:
        """Bytes of one rank's slice at rest."""
        return stored_bytes(self.slice_numel, self.dtype)

    @property
    def full_bytes(self) -> int:
        """Bytes of the whole segment with padding, as it is gathered."""
        return stored_bytes(self.full_numel, self.full_dtype)

    @property
    def grad_full_bytes(self) -> int:
        """Bytes of its full gradients: none if it is frozen."""
        return stored_bytes(self.full_numel, self.grad_dtype) if self.trainable else 0

    @property
    def staged_bytes(self) -> int:
        """Bytes that the segment takes as it travels, beside where its parameters end up."""
        return self.full_bytes if self.travels_apart else 0

    @property
    def travels_apart(self) -> bool:
        """True if its elements travel in another order than that of parameters."""
        return self.packed and self.shards > 1

    @property
    def sent_as_made(self) -> bool:
        """True if a gradient, as it is made, is what travels: one parameter's, without padding."""
        alone = len(self.slots) == 1 and self.trainable and not self.travels_apart
        whole = self.shards > 1 and not self.padding_numel
        return alone and whole and self.full_dtype == self.grad_dtype

    def made_bytes(self, slot: Slot) -> int:
        """Bytes of the full gradient of the parameter at ``slot``, as autograd makes it."""
        return stored_bytes(slot.spec.numel, self.full_dtype)

    @property
    def padding_numel(self) -> int:
        """Elements that belong to no parameter."""
        return self.full_numel - sum(slot.stop - slot.start for slot in self.slots)

    def span(self, slot: Slot, rank: int) -> Span:
        """The part of ``slot`` in slice ``rank``, counted from the parameter's first element."""
        return self.spans(slot)[rank]

    def spans(self, slot: Slot) -> "SpansOfRanks":
        """The spans of all ranks; together they tile the parameter in rank order."""
        numel = slot.stop - slot.start
        if self.ends:  # as if each rank could hold one
            return SpansOfRanks((slot.spec.owner or 0) * numel, numel, numel, self.shards)
        if self.by_row:
            return SpansOfRanks(0, numel, chunk_numel(slot.spec, self.shards), self.shards)
        return SpansOfRanks(slot.start, numel, self.slice_numel, self.shards)

    def offset_in_slice(self, slot: Slot, rank: int) -> int:
        """The start of the span of ``slot`` in slice ``rank``, in elements (0 if it is empty)."""
        span = self.span(slot, rank)
        if not span.numel:
            return 0
        if self.packed:
            return slot.start // self.shards
        first: int = self.slice_of(rank).start
        return slot.start + span.start - first


@dataclass(frozen=True)
class Layout:
    """The flat buffer of one unit: its segments, in the order in which they lie in the buffer."""

    segments: tuple[Segment, ...]
    shards: int

    def __iter__(self) -> Iterator[tuple[Segment, Slot]]:
        for segment in self.segments:
            for slot in segment.slots:
                yield segment, slot

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's shard of the parameters, padding included."""
        return sum(segment.slice_bytes for segment in self.segments)

    @property
    def full_bytes(self) -> int:
        """Bytes of the gathered unit, padding included."""
        return sum(segment.full_bytes for segment in self.segments)

    @property
    def sent_bytes(self) -> int:
        """Bytes of the slice that one rank sends in a gather to each of the others."""
        return sum(each.slice_numel * item_bytes(each.full_dtype) for each in self.segments)

    @property
    def grad_sent_bytes(self) -> int:
        """Bytes of the slice that one rank sends in a reduce to each of the others."""
        trained = (each for each in self.segments if each.trainable)
        return sum(each.slice_numel * item_bytes(each.grad_dtype) for each in trained)

    @property
    def staged_bytes(self) -> int:
        """Bytes that are copied when a gather has been waited for; see [Note: Whole rows]."""
        return sum(segment.staged_bytes for segment in self.segments)

    @property
    def grad_shard_bytes(self) -> int:
        """Bytes of one rank's shard of the gradients at rest: frozen parameters have none."""
        return sum(segment.slice_bytes for segment in self.segments if segment.trainable)

    @property
    def grad_moved_bytes(self) -> int:
        """Bytes of full gradients, as autograd makes them, that are copied to be sent."""
        moved = (each for each in self if each[0].trainable and not each[0].sent_as_made)
        return sum(segment.made_bytes(slot) for segment, slot in moved)

    @property
    def grad_copied_bytes(self) -> int:
        """Bytes of the buffer that they are copied into."""
        return sum(each.grad_full_bytes for each in self.segments if not each.sent_as_made)

    @property
    def grad_full_bytes(self) -> int:
        """Bytes of the full gradients of the unit, as they travel."""
        return sum(segment.grad_full_bytes for segment in self.segments)


def chunk_numel(spec: ParamSpec, shards: int) -> int:
    """Elements of the rows that each of ``shards`` ranks gets, as `torch.chunk` cuts them.

    The last rank that gets any may get fewer, those behind it none.
    """
    rows = spec.shape[spec.cut_dim] if spec.shape else 1
    return -(-rows // shards) * (spec.numel // rows) if rows else 0


def lay_out(
    specs: Iterable[ParamSpec],
    shards: int,
    precision: Precision = AS_IT_RESTS,
    align: Align = "element",
) -> Layout:
    """Lay the parameters of one unit out for ``shards`` equal slices.

    Parameters keep their order inside a segment; segments come in order of first appearance.
    """
    kinds: dict[tuple[str, bool, str], list[ParamSpec]] = {}
    for spec in specs:
        kind = (spec.dtype, spec.trainable, spec.name if spec.apart else "")
        kinds.setdefault(kind, []).append(spec)
    return lay_out_segments(kinds.values(), shards, precision, align)


def lay_out_segments(
    groups: Iterable[Sequence[ParamSpec]],
    shards: int,
    precision: Precision = AS_IT_RESTS,
    align: Align = "element",
) -> Layout:
    """The layout of groups; the specs of a group agree in dtype and trainable.

    A group becomes one segment, or with rows or owners several.
    """
    if shards < 1:
        raise ConfigurationError(f"a layout needs at least 1 shard, got {shards}")
    segments: list[Segment] = []
    for members in groups:
        dtype, trainable = members[0].dtype, members[0].trainable
        dtypes = precision.full_dtype(dtype), precision.grad_dtype(dtype)
        owned = [spec for spec in members if spec.owner is not None]
        if owned:
            slots, ends = _by_owner(owned, shards)
            most = max(end - start for start, end in pairwise((0, *ends)))
            segments.append(Segment(dtype, trainable, slots, shards, most, *dtypes, ends=ends))
        by_element, packed, alone = _kinds([s for s in members if s not in owned], align)
        if by_element:
            slots, slice_numel = _one_behind_the_other(by_element, shards)
            segments.append(Segment(dtype, trainable, slots, shards, slice_numel, *dtypes))
        if packed:
            slots, slice_numel = _packed(packed, shards)
            segments.append(
                Segment(
                    dtype, trainable, slots, shards, slice_numel, *dtypes, by_row=True, packed=True
                )
            )
        for spec in alone:
            slots, slice_numel = (Slot(spec, 0, spec.numel),), chunk_numel(spec, shards)
            segments.append(
                Segment(dtype, trainable, slots, shards, slice_numel, *dtypes, by_row=True)
            )
    return Layout(tuple(segments), shards)


def _kinds(
    members: Sequence[ParamSpec], align: Align
) -> tuple[list[ParamSpec], list[ParamSpec], list[ParamSpec]]:
    """Split into what is cut by element, what is packed, and what has a segment of its own."""
    kinds: tuple[list[ParamSpec], list[ParamSpec], list[ParamSpec]] = ([], [], [])
    for spec in members:
        if align == "element" or not spec.shape:
            kinds[0].append(spec)
        elif spec.cut_dim or (spec.bytes <= PACKED_BYTES and not spec.apart):
            kinds[1].append(spec)
        else:
            kinds[2].append(spec)
    if len(kinds[1]) == 1 and not kinds[1][0].cut_dim:  # it shares the message with nobody
        kinds[2].append(kinds[1].pop())
    return kinds


def _by_owner(specs: Sequence[ParamSpec], shards: int) -> tuple[tuple[Slot, ...], tuple[int, ...]]:
    """Return the slots in the order of owners, and where the slice of each of ``shards`` ends."""
    slots, ends, end = [], [], 0
    for rank in range(shards):
        for spec in specs:
            if spec.owner == rank:
                slots.append(Slot(spec, end, end + spec.numel))
                end = _round_up(end + spec.numel, ALIGN_NUMEL)
        ends.append(end)
    if len(slots) < len(specs):
        lost = [(spec.name, spec.owner) for spec in specs if spec.owner not in range(shards)]
        raise ConfigurationError(f"owners are ranks below {shards}, got {lost}")
    return tuple(slots), tuple(ends)


def _one_behind_the_other(specs: Sequence[ParamSpec], shards: int) -> tuple[tuple[Slot, ...], int]:
    slots, end = [], 0
    for spec in specs:
        slots.append(Slot(spec, end, end + spec.numel))
        end = _round_up(end + spec.numel, ALIGN_NUMEL)
    return tuple(slots), _round_up(-(-end // shards), ALIGN_NUMEL)


def _packed(specs: Sequence[ParamSpec], shards: int) -> tuple[tuple[Slot, ...], int]:
    slots, end = [], 0  # of a slice
    multiple = ALIGN_NUMEL if shards <= _MOST_PADDED_SHARDS else 1
    for spec in specs:
        slots.append(Slot(spec, shards * end, shards * end + spec.numel))
        end = _round_up(end + chunk_numel(spec, shards), multiple)
    return tuple(slots), _round_up(end, ALIGN_NUMEL)
