# SPDX-License-Identifier: Apache-2.0
"""One unit: parameters that are gathered, freed and reduced by one call.

A unit knows its buffers and the state they are in, not when anything should happen: that is decided
by `fullshard.core.schedule` and carried out by `fullshard.torch.runtime`.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.core.layout import Segment, Slot, Span, lay_out
from fullshard.torch.arrivals import Arrivals
from fullshard.torch.buffers import FlatBuffer
from fullshard.torch.comm import Comm, Work
from fullshard.torch.modules import ParamSites
from fullshard.torch.optim import mark_replaced
from fullshard.torch.parameter import Ownership, ShardedParameter

__all__ = ["Ranks", "Unit", "UnitState"]


@dataclass(frozen=True)
class Ranks:
    """Who holds the slices of a unit, and who holds the same slice.

    ``gather`` and ``reduce`` are communicators over the same ranks, so that gathers and reduces
    need not queue behind each other. ``replicas`` joins the ranks with equal slices. Gradients are
    averaged over all of them.
    """

    gather: Comm
    reduce: Comm
    replicas: Comm
    device_mesh: Any = None

    @property
    def size(self) -> int:
        """How many ranks contribute to a gradient."""
        return self.gather.size * self.replicas.size

    @property
    def first(self) -> bool:
        """True on the one rank that speaks for all, and writes files."""
        return self.gather.rank == 0 and self.replicas.rank == 0

    def broadcast(self, tensor: Tensor) -> None:
        """Give all ranks the ``tensor`` of the first one, in place. Collective."""
        for comm in (self.replicas, self.gather):
            comm.broadcast([tensor]).wait()

    def any(self, flag: bool, device: torch.device) -> bool:
        """True on every rank if ``flag`` is true on one of them. Collective."""
        raised = torch.tensor(float(flag), device=device)
        for comm in (self.gather, self.replicas):
            comm.all_reduce([raised], "max").wait()
        return bool(raised.item())


class UnitState(Enum):
    """What a unit has in memory beside its shard."""

    RESTING = "nothing"
    FULL = "full parameters"
    FULL_WITH_GRADS = "full parameters and full gradients"
    GRADS = "full gradients"


_MOVES = {
    ("gather", UnitState.RESTING): UnitState.FULL,
    ("gather", UnitState.GRADS): UnitState.FULL_WITH_GRADS,
    ("free", UnitState.FULL): UnitState.RESTING,
    ("free", UnitState.FULL_WITH_GRADS): UnitState.GRADS,
    ("fill", UnitState.RESTING): UnitState.GRADS,
    ("fill", UnitState.FULL): UnitState.FULL_WITH_GRADS,
    ("reduce", UnitState.GRADS): UnitState.RESTING,
    ("reduce", UnitState.FULL_WITH_GRADS): UnitState.FULL,
    ("drop", UnitState.GRADS): UnitState.RESTING,
    ("drop", UnitState.FULL_WITH_GRADS): UnitState.FULL,
}
"""The only legal moves. A unit whose shard is the whole of it (one slice) is always full."""


@dataclass(frozen=True)
class _Place:
    """Where the layout puts one parameter, and this rank's span of it."""

    segment: Segment
    slot: Slot
    number: int  # of the segment in the layout, and so of its flat view in a buffer
    grad_number: int  # of the segment among the trainable ones, -1 if frozen
    span: Span
    in_slice: slice  # where the span lies in this rank's slice of the segment


class Unit:
    """Parameters that travel together, sharded over ``ranks.gather``.

    Building one replaces the parameters in their modules by `ShardedParameter`s that hold this
    rank's spans. ``name`` is for people: the path of the unit's module once the root is known.
    """

    def __init__(self, name: str, params: Sequence[ParamSites], ranks: Ranks, device: torch.device):
        self.name = name
        self.ranks = ranks
        self.device = device
        self.layout = lay_out((each.spec for each in params), ranks.gather.size)
        self._trainable = [segment for segment in self.layout.segments if segment.trainable]
        self._places = self._find_places()
        by_name = {each.spec.name: each for each in params}
        self.params = [by_name[place.slot.spec.name] for place in self._places]
        # With one slice the shard is the full unit: it serves as both and is never released.
        self.resident = ranks.gather.size == 1
        self.state = UnitState.FULL if self.resident else UnitState.RESTING

        self._shard = FlatBuffer(self.layout.segments, device, full=False)
        for flat in self._shard.flats:
            flat.zero_()
        self.sharded = [self._make_sharded(i) for i in range(len(self.params))]
        self.arrivals = Arrivals()
        self._full = self._shard
        if not self.resident:
            self._full = FlatBuffer(self.layout.segments, device, full=True)
        self.full = [self._make_full(i) for i in range(len(self.params))]
        if not self.resident:
            self._full.release()
        self._grads: FlatBuffer | None = None
        self._grad_views: dict[int, Tensor] = {}
        self._delivered: set[int] = set()  # parameters that the gradient buffer holds
        self._gathering: Work | None = None
        self._gathered_version = -1
        self._reducing: Work | None = None
        self._reduced: FlatBuffer | None = None
        self.on_gradient: Callable[[int, Tensor], None] = self.deliver
        self.show_sharded()

    # ---- building -------------------------------------------------------------------------------

    def _find_places(self) -> list[_Place]:
        rank = self.ranks.gather.rank
        places = []
        for number, segment in enumerate(self.layout.segments):
            grad_number = self._trainable.index(segment) if segment.trainable else -1
            for slot in segment.slots:
                span, start = segment.span(slot, rank), segment.offset_in_slice(slot, rank)
                in_slice = slice(start, start + span.numel)
                places.append(_Place(segment, slot, number, grad_number, span, in_slice))
        return places

    def _make_sharded(self, index: int) -> ShardedParameter:
        place, original = self._places[index], self.params[index].param
        local = self._shard.flats[place.number][place.in_slice]
        local.copy_(original.detach().reshape(-1)[place.span.start : place.span.stop])
        spec = place.slot.spec
        ownership = Ownership(
            name=spec.name,
            shape=spec.shape,
            spans=place.segment.spans(place.slot),
            comm=self.ranks.gather,
            device_mesh=self.ranks.device_mesh,
        )
        mark_replaced(original, spec.name)
        return ShardedParameter.parameter(local, ownership, requires_grad=spec.trainable)

    def _make_full(self, index: int) -> nn.Parameter:
        place = self._places[index]
        spec = place.slot.spec
        flat = self._full.flats[place.number]
        view = flat[place.slot.start : place.slot.stop].view(spec.shape)
        # .data: a parameter that is a plain view shares its version counter with the buffer, and
        # writing gathered values into the buffer would then trip autograd's in-place check.
        full = nn.Parameter(view.data, requires_grad=spec.trainable)
        if spec.trainable:
            hook = _gradient_hook(weakref.ref(self), index)
            full.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self.arrivals.watch(index, full)
        return full

    def rename(self, name: str) -> None:
        """Take the name by which the whole model knows the unit's module; parameters follow."""
        for place, param in zip(self._places, self.sharded, strict=True):
            full_name = f"{name}.{place.slot.spec.name}" if name else place.slot.spec.name
            param.ownership = replace(param.ownership, name=full_name)
        self.name = name or "(root)"

    @property
    def trainable(self) -> bool:
        """True if any parameter is trained, so that there is something to reduce."""
        return bool(self._trainable)

    # ---- what modules show ----------------------------------------------------------------------

    def show_full(self) -> None:
        """Let the modules use the full parameters."""
        for each, full in zip(self.params, self.full, strict=True):
            each.put(full)

    def show_sharded(self) -> None:
        """Let the modules show the sharded parameters."""
        for each, sharded in zip(self.params, self.sharded, strict=True):
            each.put(sharded)

    # ---- moves ----------------------------------------------------------------------------------

    def _move(self, op: str) -> None:
        after = _MOVES.get((op, self.state))
        if after is None:
            raise UsageError(
                f"unit {self.name!r}: cannot {op} while it holds {self.state.value}; "
                "this is a defect of fullshard's schedule, please report it with a trace"
            )
        self.state = after

    @property
    def transient_bytes(self) -> int:
        """Bytes held now beyond the shards: full parameters, full gradients, reduce scratch."""
        total = 0 if self.resident or not self._full.allocated else self._full.bytes
        if self._grads is not None and self._grads.allocated:
            total += self._grads.bytes
            if self._reducing is not None:
                total += sum(map(self.ranks.reduce.reduce_scratch_bytes, self._grads.flats))
        return total

    @property
    def stale(self) -> bool:
        """True if the full parameters were gathered before the shard was last changed."""
        if self.resident or not self._full.allocated:
            return False
        return self._gathered_version != self._shard_version

    @property
    def _shard_version(self) -> int:
        return sum(flat._version for flat in self._shard.flats)

    def gather(self) -> None:
        """Start to gather the full parameters (collective)."""
        self._move("gather")
        self._full.allocate()
        self._gathered_version = self._shard_version
        pairs = list(zip(self._full.flats, self._shard.flats, strict=True))
        self._gathering = self.ranks.gather.all_gather(pairs)

    def await_gather(self) -> None:
        """Wait until the full parameters are there."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def free(self) -> None:
        """Drop the full parameters."""
        self._move("free")
        self.await_gather()
        self._full.release()

    # ---- gradients ------------------------------------------------------------------------------

    def deliver(self, index: int, grad: Tensor) -> None:
        """Put a parameter's gradient, or a further part of it, into the flat gradient buffer."""
        if grad.layout is not torch.strided:
            raise NotSupportedError(
                f"parameter {self.params[index].spec.name!r} got a {grad.layout} gradient; "
                "only dense gradients can be reduced (use sparse=False in embeddings)"
            )
        if self.state in (UnitState.RESTING, UnitState.FULL):
            self._fill()
        self.arrivals.note(index)
        if index in self._delivered:
            self._grad_views[index].add_(grad)
        else:
            self._grad_views[index].copy_(grad)
            self._delivered.add(index)

    def _fill(self) -> None:
        self.await_reduce()  # a gradient that comes late must not touch a buffer under way
        self._move("fill")
        if self._grads is not None:
            self._grads.allocate()
        else:
            self._grads = FlatBuffer(self._trainable, self.device, full=True)
            self._grad_views = {
                index: self._grads.flats[place.grad_number][
                    place.slot.start : place.slot.stop
                ].view(place.slot.spec.shape)
                for index, place in enumerate(self._places)
                if place.grad_number >= 0
            }

    def _zero_what_did_not_come(self, grads: FlatBuffer) -> None:
        for segment, flat in zip(self._trainable, grads.flats, strict=True):
            end = 0
            for slot in segment.slots:
                if slot.start > end:
                    flat[end : slot.start].zero_()
                end = slot.stop
            flat[end:].zero_()
        for index, view in self._grad_views.items():
            if index not in self._delivered:
                view.zero_()

    def reduce(self) -> None:
        """Start to reduce the full gradients; what did not come counts as zero (collective)."""
        if self.state in (UnitState.RESTING, UnitState.FULL):
            self._fill()
        self._move("reduce")
        grads = self._grads
        assert grads is not None
        self._zero_what_did_not_come(grads)
        self._delivered.clear()
        if self.resident:
            self._reduced = grads
            self._reducing = self.ranks.replicas.all_reduce(grads.flats)
        else:
            self._reduced = FlatBuffer(self._trainable, self.device, full=False)
            pairs = list(zip(self._reduced.flats, grads.flats, strict=True))
            self._reducing = self.ranks.reduce.reduce_scatter(pairs)

    @property
    def reducing(self) -> bool:
        """True while a reduce is under way."""
        return self._reducing is not None

    @property
    def reduce_completed(self) -> bool:
        """True if a reduce is under way whose result is there already."""
        return self._reducing is not None and self._reducing.is_completed()

    def await_reduce(self) -> None:
        """Wait for the reduce and add its result, averaged over the ranks, to ``.grad``."""
        if self._reducing is None:
            return
        self._reducing.wait()
        reduced, self._reducing, self._reduced = self._reduced, None, None
        assert reduced is not None
        assert self._grads is not None
        if self.resident:
            self._grads, self._grad_views = None, {}  # its memory is the shard gradient from now on
        else:
            self._grads.release()
            self.ranks.replicas.all_reduce(reduced.flats).wait()
        for flat in reduced.flats:
            flat.div_(self.ranks.size)
        for place, param in zip(self._places, self.sharded, strict=True):
            if place.grad_number >= 0:
                _accumulate(param, reduced.flats[place.grad_number][place.in_slice])

    def drop_gradients(self) -> None:
        """Forget full gradients, under way or not, after a backward that failed."""
        self._delivered.clear()
        self.arrivals.end_backward()
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing, self._reduced = None, None
        if self.state in (UnitState.GRADS, UnitState.FULL_WITH_GRADS):
            self._move("drop")
        if self._grads is not None:
            self._grads.release()


def _accumulate(param: ShardedParameter, local: Tensor) -> None:
    """Add a reduced gradient to ``param.grad`` as autograd would, users' hooks included."""
    grad: Tensor = ShardedParameter.value(local, param.ownership)
    for hook in (param._backward_hooks or {}).values():
        changed = hook(grad)
        grad = grad if changed is None else changed
    if param.grad is None:
        param.grad = grad
    else:
        param.grad.add_(grad)
    for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(param)


def _gradient_hook(unit: "weakref.ref[Unit]", index: int) -> Callable[[Tensor], None]:
    # Weak, so that a model which is deleted gives its memory back without the garbage collector.
    def take(param: Tensor) -> None:
        grad, param.grad = param.grad, None
        owner = unit()
        if owner is not None and grad is not None:
            owner.on_gradient(index, grad)

    return take
