# SPDX-License-Identifier: Apache-2.0
"""The full gradients of one unit: kept as autograd makes them, and turned into what travels.

[Note: Gradients as they are made]
A gradient stays in the memory that autograd gave it until its unit's reduce begins. If a segment is
one parameter, cut into equal slices of rows and reduced in the dtype in which its gradient comes,
it is sent from there: no buffer, no copy. The others are then copied into one buffer, all by one
call. So nothing is held in the dtype of the reduce before it begins, and no gradient twice but in
that moment.

With one slice the full gradients become the slice at rest. Nobody sends them, and holding all of
them twice would be the peak of the step: they are copied as they come, small ones together.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fullshard.core.errors import NotSupportedError
from fullshard.core.layout import aligned_bytes
from fullshard.torch.unit.buffers import FlatBuffer, MemorySource, dtype_of
from fullshard.torch.unit.packing import pieces_of, travelling_pieces
from fullshard.torch.unit.plan import Plan
from fullshard.torch.unit.shards import Shards
from fullshard.torch.unit.streams import Lenders


class FullGradients:
    """The full gradients of a unit, by the index of their parameter.

    See [Note: Gradients as they are made].
    """

    def __init__(self, shards: Shards, plan: Plan):
        self._shards = shards
        self._device = plan.device
        segments = shards.trainable
        # fp16 is divided in place, and values of tensor parallelism may still be on their way.
        divided = any(segment.grad_dtype == "float16" for segment in segments)
        self._as_made = {  # parameters that are sent as they are made, by number of their segment
            place.grad_number: index
            for index, place in enumerate(shards.places)
            if place.grad_number >= 0 and place.segment.sent_as_made and not divided
            if shards.params[index].tensor_parallel is None
        }
        self._sizes = [(each.full_numel, dtype_of(each.grad_dtype)) for each in segments]
        self._buffer_sizes = [
            (0 if number in self._as_made else numel, dtype)
            for number, (numel, dtype) in enumerate(self._sizes)
        ]
        self.trained: list[int] = [
            i for i, place in enumerate(shards.places) if place.grad_number >= 0
        ]
        self._came: set[int] = set()
        self._made: dict[int, Tensor] = {}  # of those, what is not in the buffer yet
        self._added: set[int] = set()  # of these, what is in memory of ours
        self._solo = plan.ranks.gather.size == 1
        total_bytes = sum(numel * dtype.itemsize for numel, dtype in self._sizes)
        self._most_bytes = 0 if plan.device.type == "cpu" else total_bytes // 8
        self._waiting_bytes = 0  # to be copied, with one slice
        self.sent: list[Tensor] = []  # what `send` gave, until it is released
        self.lenders: Lenders | None = Lenders.on(plan.device)
        self._forget_buffer()

    def _forget_buffer(self) -> None:
        self._buffer: FlatBuffer | None = None
        self._views: dict[int, list[Tensor]] = {}  # of each parameter in it, one or `pieces_of`
        # What gradients are seen as to fit in one view; () for those that are taken apart.
        self._seen_as: dict[int, tuple[int, ...]] = {}
        # Those that lie there as they are, then those that are taken apart, with all their views;
        # what they are then seen as, or None if some go into several views.
        self._copies: list[tuple[list[int], list[Tensor], list[tuple[int, ...]] | None]] = []
        self._padding: list[Tensor] = []  # what is zero whatever comes

    @property
    def bytes(self) -> int:
        """Bytes held now, rounded up for each tensor as in a flat buffer."""
        apart = [
            *self._made.values(),
            *(self.sent[number] for number in self._as_made if self.sent),
        ]
        held = sum(aligned_bytes(each.nbytes) for each in apart)
        if self._buffer is not None and self._buffer.allocated:
            held += self._buffer.bytes
        return held

    # ---- gradients come -------------------------------------------------------------------------

    def put(self, index: int, grad: Tensor) -> None:
        """Keep a parameter's gradient, or a further part of it, which nobody may change."""
        if grad.layout is not _STRIDED:
            raise NotSupportedError(
                f"parameter {self._shards.sharded[index].ownership.name!r} got a {grad.layout} "
                "gradient; only dense gradients can be reduced (use sparse=False in embeddings)"
            )
        if self.lenders is not None:
            self._join(self.lenders)
        if index in self._came:
            self._add(index, grad)
            return
        self._came.add(index)
        self._made[index] = grad
        if self._solo:
            self._waiting_bytes += grad.nbytes
            if self._waiting_bytes >= self._most_bytes:
                self._copy()

    def _join(self, lenders: Lenders) -> None:
        """Put the current stream behind those on which gradients were made."""
        if not self._came and not self.sent:
            lenders.forget()  # of the backward before
        lenders.join()

    def _add(self, index: int, grad: Tensor) -> None:
        """Add a further part, in the dtype in which gradients travel."""
        made = self._made.get(index)
        if made is None:
            for view, part in zip(self._views[index], self._parts(index, grad), strict=True):
                view.add_(part)
            return
        if index not in self._added:  # autograd may have given this memory to others, too
            _, dtype = self._sizes[self._shards.places[index].grad_number]
            made = self._made[index] = made.to(dtype, copy=True)
            self._added.add(index)
        made.add_(grad)

    def _parts(self, index: int, grad: Tensor) -> list[Tensor]:
        """Take a gradient apart as the views of its parameter are."""
        seen_as = self._seen_as.get(index)
        if seen_as is None:
            return [grad]
        if seen_as:
            return [grad.reshape(seen_as)]
        place = self._shards.places[index]
        return pieces_of(grad, place.slot, place.segment.shards)

    # ---- the buffer -----------------------------------------------------------------------------

    def _open(self) -> FlatBuffer:
        """Get the memory of the buffer, in which nothing but padding is zero."""
        if self._buffer is None:
            self._buffer = FlatBuffer(self._buffer_sizes, self._device)
            self._look_into(self._buffer)
        elif self._buffer.allocated:
            return self._buffer
        else:
            self._buffer.allocate()
        if self._padding:
            torch._foreach_zero_(self._padding)
        return self._buffer

    def _look_into(self, buffer: FlatBuffer) -> None:
        in_order: list[int] = []
        apart: list[int] = []
        for index, place in enumerate(self._shards.places):
            if place.grad_number < 0 or place.grad_number in self._as_made:
                continue
            flat = buffer.flats[place.grad_number]
            if not place.segment.travels_apart:
                whole = flat[place.slot.start : place.slot.stop].view(place.slot.spec.shape)
                self._views[index] = [whole]
                in_order.append(index)
                continue
            views = self._views[index] = travelling_pieces(flat, place.segment, place.slot)
            in_one = len(views) == 1 and not place.slot.spec.cut_dim
            self._seen_as[index] = views[0].shape if in_one else ()
            apart.append(index)
        for indices in filter(None, (in_order, apart)):
            shapes = [self._seen_as[index] for index in indices if index in self._seen_as]
            every = [view for index in indices for view in self._views[index]]
            self._copies.append((indices, every, shapes if all(shapes) else None))
        for number, (segment, flat) in enumerate(
            zip(self._shards.trainable, buffer.flats, strict=True)
        ):
            if number in self._as_made:
                continue
            if segment.travels_apart:  # small, with holes here and there
                self._padding += [flat] if segment.padding_numel else []
                continue
            ends = [0, *(slot.stop for slot in segment.slots)]
            starts = [*(slot.start for slot in segment.slots), flat.numel()]
            between = zip(ends, starts, strict=True)
            self._padding += [flat[end:start] for end, start in between if end < start]

    def _copy(self) -> FlatBuffer:
        """Copy what belongs into the buffer, what lies in order there apart from what does not."""
        buffer, made = self._open(), self._made
        are_all_here = len(made) == len(self.trained)
        for indices, every, shapes in self._copies:
            if are_all_here and shapes is not None:
                views, parts = every, list(map(made.pop, indices))
                if shapes:
                    parts = list(map(_reshape, parts, shapes))
            else:
                here = [index for index in indices if index in made]
                views = [view for index in here for view in self._views[index]]
                parts = [part for index in here for part in self._parts(index, made.pop(index))]
            if views:
                torch._foreach_copy_(views, parts)
        if self.lenders is not None:
            self.lenders.follow()
        self._waiting_bytes = 0
        return buffer

    # ---- gradients go ---------------------------------------------------------------------------

    def send(self, *, written: bool) -> set[int]:
        """Put into ``sent`` what travels, flat, for each segment; return what did not come.

        That counts as zero. ``written``: somebody may write to what travels.
        """
        if self.lenders is not None:
            self._join(self.lenders)
        came, sizes = self._came, self._sizes
        flats = [_NOTHING] * len(sizes)
        absent = set(self.trained) - came if len(came) < len(self.trained) else set()
        if len(self._as_made) < len(sizes):
            flats = self._copy().flats.copy()
            if absent:
                zeros = [view for index in absent for view in self._views.get(index, ())]
                if zeros:
                    torch._foreach_zero_(zeros)
        for number, index in self._as_made.items():
            flats[number] = self._as_it_was_made(index, *sizes[number], written=written)
        came.clear()
        self._added.clear()
        self.sent = flats
        return absent

    def _as_it_was_made(
        self, index: int, numel: int, dtype: torch.dtype, *, written: bool
    ) -> Tensor:
        grad, ours = self._made.pop(index, None), index in self._added
        source = MemorySource.of(self._device) if MemorySource.is_set else None
        pooled = source is not None and source.everything
        if grad is None or pooled or (written and not ours) or not _is_plain(grad, dtype):
            (flat,) = FlatBuffer([(numel, dtype)], self._device).flats
            return flat.zero_() if grad is None else flat.copy_(grad.reshape(-1))
        return grad.view(-1)

    def by_dtype(self) -> list[Tensor]:
        """Return what was sent as few tensors: with one dtype, all in the buffer as one."""
        assert self._buffer is not None
        return self._buffer.by_dtype

    def give_away(self) -> FlatBuffer:
        """Return the buffer with all that was sent: with one slice, it is the reduced gradients."""
        buffer = self._buffer
        assert buffer is not None
        self.sent = []
        self._forget_buffer()
        return buffer

    def drop(self) -> None:
        """Forget everything, sent or not."""
        self._came.clear()
        self._added.clear()
        self._made.clear()
        self._waiting_bytes = 0
        self.release()

    def release(self) -> None:
        """Let go of what was sent; gradients may have come since."""
        if self.lenders is not None:
            self.lenders.follow()
        self.sent = []
        if self._buffer is not None:
            self._buffer.release()


_reshape = torch.reshape  # the method takes twice as long to read a shape
_STRIDED = torch.strided
_NOTHING = torch.empty(0, device="cpu")


def _is_plain(grad: Tensor, dtype: torch.dtype) -> bool:
    """True if the elements lie in memory as they are to travel."""
    lazy = grad.is_conj() or grad.is_neg() or is_traceable_wrapper_subclass(grad)
    return grad.dtype == dtype and grad.is_contiguous() and not lazy
