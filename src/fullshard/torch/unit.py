# SPDX-License-Identifier: Apache-2.0
"""One unit: parameters that are gathered, freed and reduced by one call.

A unit knows its buffers and the state they are in, not when anything should happen: that is decided
by `fullshard.core.schedule` and carried out by `fullshard.torch.runtime`. What rests is in
`fullshard.torch.shards`, the way of gradients in `fullshard.torch.gradients`.
"""

import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.core.layout import lay_out
from fullshard.torch.buffers import FlatBuffer, dtype_of
from fullshard.torch.comm import Work
from fullshard.torch.extensions import Extension
from fullshard.torch.gradients import Gradients, ReduceSettings
from fullshard.torch.modules import ParamSites, notes_on, set_owner
from fullshard.torch.plan import Plan, own_value
from fullshard.torch.shards import Place, Shards
from fullshard.torch.streams import CopyStream

__all__ = ["Unit", "UnitState"]


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
"""The only legal moves. A unit whose shard serves as its full parameters is always full."""

_NOT_YET = nn.Parameter(torch.empty(0), requires_grad=False)
"""Stands for a full parameter that is made when it has been gathered for the first time."""

_FULL_STATES = (UnitState.FULL, UnitState.FULL_WITH_GRADS)
_STATES_WITHOUT_GRADS = (UnitState.RESTING, UnitState.FULL)


class Unit:
    """Parameters that travel together, sharded over ``plan.ranks.gather``.

    Building one replaces the parameters in their modules by `ShardedParameter`s that hold this
    rank's spans. ``name`` is for people: the path of the unit's module once the root is known.
    """

    def __init__(self, name: str, params: Sequence[ParamSites], plan: Plan):
        self.name = name
        self.plan = plan
        self.ranks = plan.ranks
        self.device = plan.device
        self.on_gradient: Callable[[int, Tensor], None] = self.deliver
        self.settings = ReduceSettings()
        # What users may set instead of the communicator's gather: (full, shard) -> work.
        self.custom_gather: Callable[[Tensor, Tensor], Any] | None = None
        self.unchecked = False  # was on a meta device, and nobody has looked for values since
        self._fetch = CopyStream(plan.device, "to the device")
        layout = lay_out((each.spec for each in params), self.ranks.gather.size, plan.precision)
        on_meta = plan.values is own_value and any(each.param.is_meta for each in params)
        device = torch.device("meta") if on_meta else plan.resting_device
        for each in params:
            set_owner(each.param, self, each.spec.name)
        self.rest_in(Shards(params, layout, plan, device, {}))

    # ---- building -------------------------------------------------------------------------------

    def rest_in(self, shards: Shards) -> None:
        """Rest in ``shards``; make what they are gathered into, and what gradients need."""
        self.shards = shards
        self.layout = shards.layout
        self.params, self.sharded = self.shards.params, self.shards.sharded
        segments = self.layout.segments
        cast = any(segment.full_dtype != segment.dtype for segment in segments)
        # With one slice the shard is the full unit: it serves as both and is never released.
        one_slice = self.ranks.gather.size == 1
        self._extensions = self._find_extensions()
        converted = cast or bool(self._extensions)
        self.resident = one_slice and not converted and not self.plan.offload.to_host
        self.state = UnitState.FULL if self.resident else UnitState.RESTING
        self._gathering: Work | None = None
        self._gathered_version = -1
        self._part: FlatBuffer | None = None  # kept from forward to backward, of several slices
        self._working: FlatBuffer | None = None  # the shard on the device, if it rests elsewhere
        self._working_version = -1
        self.gradients = Gradients(self.name, self.shards, self.plan, self.settings)
        self.full: list[nn.Parameter] = []
        if self.shards.device.type != "meta":
            sizes = [
                (0 if number in self._extensions else s.full_numel, dtype_of(s.full_dtype))
                for number, s in enumerate(segments)
            ]
            self._full = self.shards.buffer if self.resident else FlatBuffer(sizes, self.device)
            self.full = [
                _NOT_YET if place.number in self._extensions else self._make_full(index)
                for index, place in enumerate(self.shards.places)
            ]
            if not self.resident:
                self._full.release()
        self.show_sharded()

    def _find_extensions(self) -> dict[int, Extension]:
        """By number of segment, what decides about its gathers."""
        if any(s.slots[0].spec.apart for s in self.layout.segments) and self.ranks.block:
            raise NotSupportedError(
                f"unit {self.name!r} has parameters with fsdp_pre_all_gather, which go with "
                "reshard_after_forward=True or False, not with a number"
            )
        return {
            place.number: Extension(
                each.param,
                place.slot,
                self.ranks.gather.size,
                self.ranks.device_mesh,
                dtype_of(place.segment.full_dtype),
            )
            for each, place in zip(self.params, self.shards.places, strict=True)
            if each.spec.apart
        }

    def _make_full(self, index: int) -> nn.Parameter:
        # .data: a parameter that is a plain view shares its version counter with the buffer, and
        # writing gathered values into the buffer would then trip autograd's in-place check.
        return self._as_parameter(index, _view(self._full, self.shards.places[index]).data)

    def _as_parameter(self, index: int, data: Tensor) -> nn.Parameter:
        sharded, cut = self.sharded[index], self.params[index].tensor_parallel
        data = data if cut is None else cut.dtensor(data)
        full = nn.Parameter(data, requires_grad=sharded.requires_grad)
        full.__dict__.update(notes_on(self.params[index].param))
        if sharded.requires_grad:
            hook = _gradient_hook(weakref.ref(self), index)
            full.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self.gradients.arrivals.watch(index, full)
        return full

    def rename(self, name: str) -> None:
        """Take the name by which the whole model knows the unit's module; parameters follow."""
        self.shards.rename(name)
        self.name = self.gradients.name = name or "(root)"

    @property
    def trainable(self) -> bool:
        """True if any parameter is trained, so that there is something to reduce."""
        return any(self.shards.seen_trainable)

    # ---- what modules show ----------------------------------------------------------------------

    def show_full(self) -> None:
        """Let the modules use the full parameters."""
        for each, full in zip(self.params, self.full, strict=True):
            each.put(full)

    def show_sharded(self) -> None:
        """Let the modules show the sharded parameters."""
        for each, sharded in zip(self.params, self.sharded, strict=True):
            each.put(sharded)

    # ---- gather and free ------------------------------------------------------------------------

    def _move(self, op: str) -> None:
        after = _MOVES.get((op, self.state))
        if after is None:
            raise UsageError(
                f"unit {self.name!r}: cannot {op} while it holds {self.state.value}; "
                "this is a defect of fullshard's schedule, please report it with a trace"
            )
        self.state = after

    @property
    def is_full(self) -> bool:
        """True if the full parameters are there, or on their way."""
        return self.state in _FULL_STATES

    @property
    def shrunk(self) -> bool:
        """True if `shrink` has left a part."""
        return self._part is not None

    @property
    def transient_bytes(self) -> int:
        """Bytes held now beyond the shards: full parameters, full gradients, reduce scratch."""
        total = self.gradients.transient_bytes
        if not self.resident and self.full and self._full.allocated:
            total += self._full.bytes
        total += sum(extension.bytes for extension in self._extensions.values())
        return total + (self._part.bytes if self._part is not None else 0)

    @property
    def stale(self) -> bool:
        """True if the full parameters were gathered before the shard was last changed."""
        if self.resident or not (self.is_full or self._part is not None):
            return False
        return self._gathered_version != self.shards.version

    def gather(self) -> None:
        """Start to gather the full parameters (collective)."""
        if not self.full and self.params:
            raise UsageError(
                f"unit {self.name!r} is on the meta device still: give its module real memory and "
                "values first (to_empty and an initialisation, or load_state_dict(assign=True))"
            )
        self._move("gather")
        self._full.allocate()
        self._gathered_version = self.shards.version
        label = f"gather of unit {self.name!r}"
        if self._part is not None:
            assert self.ranks.block is not None
            pairs = list(zip(self._full.flats, self._part.flats, strict=True))
            self._gathering = self.ranks.block.all_gather(pairs, label=label)
            return
        if not self.plan.offload.to_host:
            self._gathering = self._gather_from(self.shards.flats, label)
            return
        if not self.plan.offload.params and self._working is None:
            sizes = [(s.slice_numel, dtype_of(s.full_dtype)) for s in self.layout.segments]
            self._working = FlatBuffer(sizes, self.device)  # on the compute stream, like all
        with self._fetch.behind_compute():
            source = self.shards.flats if self.plan.offload.params else self._refreshed_working()
            self._gathering = self._gather_from(source, label)

    def _gather_from(self, shards: Sequence[Tensor], label: str) -> Work:
        rank, pairs = self.ranks.gather.rank, []
        for number, (full, shard) in enumerate(zip(self._full.flats, shards, strict=True)):
            if number in self._extensions:
                pairs += self._extensions[number].send(shard.to(self.device))
                continue
            if shard.dtype != full.dtype or shard.device != full.device:
                numel = shard.numel()
                mine = full[rank * numel : (rank + 1) * numel]
                # First across, then into the other dtype: torch casts on the host, unpinned.
                shard = mine.copy_(shard.to(full.device, non_blocking=True))
            pairs.append((full, shard))
        if self.custom_gather is None:
            return self.ranks.gather.all_gather(pairs, label=label)
        return _Works([self.custom_gather(full, shard) for full, shard in pairs])

    def _refreshed_working(self) -> list[Tensor]:
        """The shard on the device in the dtype of computation, as of the optimizer's last step."""
        assert self._working is not None
        if self._working_version != self.shards.version:
            self._working_version = self.shards.version
            for to, shard in zip(self._working.flats, self.shards.flats, strict=True):
                to.copy_(shard.to(self.device, non_blocking=True))
        return self._working.flats

    def await_gather(self) -> None:
        """Wait until the full parameters are there."""
        if self._gathering is not None:
            self._gathering.wait()
            self._fetch.join()
            self._gathering = self._part = None
            if self._extensions:
                self._receive()

    def _receive(self) -> None:
        for index, place in enumerate(self.shards.places):
            extension = self._extensions.get(place.number)
            if extension is not None and extension.receive():
                assert extension.full is not None
                self.full[index] = self._as_parameter(index, extension.full)
                extension.full = self.full[index]

    def shrink(self) -> None:
        """Drop the full parameters but for this rank's part among those of its block."""
        self._move("free")
        self.await_gather()
        block = self.ranks.block
        assert block is not None
        numels = [flat.numel() // block.size for flat in self._full.flats]
        dtypes = [flat.dtype for flat in self._full.flats]
        self._part = FlatBuffer(zip(numels, dtypes, strict=True), self.device)
        for part, full, numel in zip(self._part.flats, self._full.flats, numels, strict=True):
            part.copy_(full[block.rank * numel : (block.rank + 1) * numel])
        self._full.release()

    def free(self) -> None:
        """Drop the full parameters, or the part that `shrink` has left."""
        self.await_gather()
        if self._part is not None:
            self._part = None
            return
        self._move("free")
        self._full.release()
        for extension in self._extensions.values():
            extension.release()

    # ---- gradients ------------------------------------------------------------------------------

    def deliver(self, index: int, grad: Tensor) -> None:
        """Take a parameter's gradient, or a further part of it."""
        if self.state in _STATES_WITHOUT_GRADS:
            self._fill()
        cut = self.params[index].tensor_parallel
        if cut is not None:
            grad = cut.part_of_dtensor(grad)
        self.gradients.deliver(index, grad)

    def _fill(self) -> None:
        self.gradients.fill()
        self._move("fill")

    def reduce(self) -> None:
        """Start to reduce the full gradients; what did not come counts as zero (collective)."""
        if self.state in _STATES_WITHOUT_GRADS:
            self._fill()
        self._move("reduce")
        self.gradients.reduce()

    def all_reduce(self) -> None:
        """Await the sum over slices and start the one over replicas (collective)."""
        self.gradients.all_reduce()

    def await_reduce(self) -> None:
        """Wait for the reduce and add its result, averaged over the ranks, to ``.grad``."""
        self.gradients.await_all()

    def drop_gradients(self) -> None:
        """Forget full gradients, under way or not, after a backward that failed."""
        self.gradients.drop()
        if self.state not in _STATES_WITHOUT_GRADS:
            self._move("drop")

    def synchronize(self) -> None:
        """Hold up the host until it may read gradients and write shards that rest there."""
        self._fetch.synchronize()
        self.gradients.synchronize()

    # ---- between steps --------------------------------------------------------------------------

    @torch.no_grad()
    def gather_values(self) -> FlatBuffer:
        """All segments in full, in the dtypes in which they rest, in new memory. Collective."""
        sizes = [(s.full_numel, dtype_of(s.dtype)) for s in self.layout.segments]
        if self.shards.device.type == "meta":
            return FlatBuffer(sizes, self.shards.device)
        full, rank, pairs = FlatBuffer(sizes, self.device), self.ranks.gather.rank, []
        for flat, shard in zip(full.flats, self.shards.flats, strict=True):
            mine = flat[rank * shard.numel() : (rank + 1) * shard.numel()]
            pairs.append((flat, mine.copy_(shard)))
        if pairs:
            label = f"gather of values of unit {self.name!r}"
            self.ranks.gather.all_gather(pairs, label=label).wait()
        return full

    def full_views(self, full: FlatBuffer) -> list[Tensor]:
        """The parameters in what `gather_values` gave, in the order of ``params``."""
        views = [_view(full, place) for place in self.shards.places]
        cuts = [each.tensor_parallel for each in self.params]
        return [v if c is None else c.dtensor(v) for v, c in zip(views, cuts, strict=True)]


class _Works:
    """The works of a custom collective as one."""

    def __init__(self, works: Sequence[Any]):
        self._works = [work for work in works if work is not None]

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _view(buffer: FlatBuffer, place: Place) -> Tensor:
    flat = buffer.flats[place.number]
    return flat[place.slot.start : place.slot.stop].view(place.slot.spec.shape)


def _gradient_hook(unit: "weakref.ref[Unit]", index: int) -> Callable[[Tensor], None]:
    # Weak, so that a model which is deleted gives its memory back without the garbage collector.
    def take(param: Tensor) -> None:
        grad, param.grad = param.grad, None
        owner = unit()
        if owner is not None and grad is not None:
            owner.on_gradient(index, grad)

    return take
