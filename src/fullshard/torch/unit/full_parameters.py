# SPDX-License-Identifier: Apache-2.0
"""The full parameters of one unit: gathered into one flat buffer, and dropped again.

Every step brings new values into the same storage, see [Note: Storage identity] in
`fullshard.torch.unit.buffers`. What gathers need is made once; a gather is then one call.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.torch.comm.protocol import Comm, Full, Parts, Together, Work, flat_of
from fullshard.torch.tensor.tensor_parallel import held_here
from fullshard.torch.unit.buffers import FlatBuffer, dtype_of
from fullshard.torch.unit.extensions import Extension
from fullshard.torch.unit.guards.freed import Freed
from fullshard.torch.unit.guards.optimizer_steps import await_before_steps
from fullshard.torch.unit.packing import PackedArrival
from fullshard.torch.unit.plan import Plan
from fullshard.torch.unit.shards import Place, Shards
from fullshard.torch.unit.sites import notes_on
from fullshard.torch.unit.streams import CopyStream, EarlyStream, Lenders

CustomGather = Callable[[Tensor, Tensor], Any]
"""A gather that users may set in place of the communicator's: (full, shard) -> work or None."""


class GradientWatch(Protocol):
    """The taker of full parameters' gradients: `fullshard.torch.step.arrivals.Arrivals`."""

    def begin_anew(self) -> None:
        """Forget all parameters: the unit makes others."""

    def watch(self, index: int, param: nn.Parameter) -> None:
        """Take the gradients of ``param``, the one with this index in the unit."""


_NOT_YET = nn.Parameter(torch.empty(0, device="cpu"), requires_grad=False)
"""Stands for a full parameter that is made when it has been gathered for the first time."""


class FullParameters:
    """The buffer into which the ``shards`` of all ranks are gathered, and the parameters in it.

    ``params`` are in the order of the layout; none as long as the shards are on the meta device.
    ``watch`` takes the gradients of the trainable ones. A ``resident`` unit is always full: with
    one slice its shard serves as both.
    """

    def __init__(self, name: str, shards: Shards, plan: Plan, watch: GradientWatch):
        self.rename(name)
        self._shards = shards
        # all of it: its version counts what is written there
        self.at_rest: Tensor = shards.buffer.memory
        self._plan = plan
        self._ranks = plan.ranks
        self.gather_by(plan.ranks.gather_of_steps)
        self._watch = watch
        self._copies = plan.offload.to_host and plan.device.type != "cpu"
        self._fetch = CopyStream(plan.device, "to the device")
        self._fetched: FlatBuffer | None = None  # slices as they rest, for a moment
        self._extensions = self._find_extensions()
        segments = shards.layout.segments
        converted = bool(self._extensions) or any(s.full_dtype != s.dtype for s in segments)
        self._as_they_rest = not (converted or plan.offload.to_host)
        self.resident: bool = self._ranks.gather.size == 1 and self._as_they_rest
        away = bool(shards.params) and shards.device != plan.resting_device
        self.out_of_reach: torch.device | None = shards.device if away else None
        self._gathering: Work | None = None
        self._version = -1  # of the shards, when they were gathered
        self._version_begun = -1  # of the shards, when the root's forward began
        self._lenders = Lenders.on(plan.device)
        self.part: FlatBuffer | None = None  # kept from forward to backward, of several slices
        self._packed: PackedArrival | None = None
        self.working: FlatBuffer | None = None  # the shard on the device, if it rests elsewhere
        self.working_version: int = -1
        self.params: list[nn.Parameter] = []
        self.storages: frozenset[int] = frozenset()  # of what `drop` frees, by address
        if shards.device.type != "meta":
            self._make_buffer()
        if not self.resident:
            await_before_steps(plan.ranks.gather, self)

    # ---- building -------------------------------------------------------------------------------

    def _make_buffer(self) -> None:
        shards, segments = self._shards, self._shards.layout.segments
        packed = [number for number, s in enumerate(segments) if s.travels_apart]
        elsewhere = {*packed, *self._extensions}
        sizes = [(s.full_numel, dtype_of(s.full_dtype)) for s in segments]
        own_sizes = [
            (0 if n in elsewhere else size, dtype) for n, (size, dtype) in enumerate(sizes)
        ]
        self._buffer = shards.buffer if self.resident else FlatBuffer(own_sizes, self._plan.device)
        self._flats, travelling = self._buffer.flats.copy(), self._buffer.flats.copy()
        if packed:
            self._packed = PackedArrival([(segments[n], sizes[n][1]) for n in packed], self._plan)
            for number, arrived, there in zip(packed, *self._packed.flats, strict=True):
                travelling[number], self._flats[number] = arrived, there
        self.params = [
            # .data: a parameter that is a plain view shares its version counter with the buffer,
            # and writing gathered values into that would then trip autograd's in-place check.
            _NOT_YET
            if place.number in self._extensions
            else self._as_parameter(index, view_of(self._flats, place).data)
            for index, place in enumerate(shards.places)
        ]
        if not self.resident:
            held = [held_here(param) for param in self.params if param is not _NOT_YET]
            self.storages = frozenset(each.untyped_storage()._cdata for each in held)
        # Views are made once: they stay valid while the memory comes and goes.
        # Extensions make others of them.
        self._freed = Freed([] if self._extensions else self.params)
        rank = self._ranks.gather.rank
        self._own_slices = [
            flat[segment.slice_of(rank)] for flat, segment in zip(travelling, segments, strict=True)
        ]
        self._travelling = [
            flat if segment.unequal is None else Parts(flat, segment.unequal)
            for flat, segment in zip(travelling, segments, strict=True)
        ]
        self._pairs = list(zip(self._travelling, shards.flats, strict=True))
        if not self.resident:
            self._release()
        if self._packed is not None:
            self._packed.arriving.release()
        if self._copies:
            rest = [(flat.numel(), flat.dtype) for flat in shards.flats]
            self._fetched = FlatBuffer(rest, self._plan.device)
            self._fetched.release()

    def _find_extensions(self) -> dict[int, Extension]:
        """The Extension of each segment that has one, by the segment's number."""
        shards = self._shards
        if any(s.slots[0].spec.apart for s in shards.layout.segments) and self._ranks.block:
            raise NotSupportedError(
                f"unit {self._name!r} has parameters with fsdp_pre_all_gather, which go with "
                "reshard_after_forward=True or False, not with a number"
            )
        return {
            place.number: Extension(
                each,
                place.slot,
                self._ranks,
                self._plan.mp_policy,
                dtype_of(place.segment.full_dtype),
            )
            for each, place in zip(shards.params, shards.places, strict=True)
            if each.spec.apart
        }

    def _as_parameter(self, index: int, data: Tensor) -> nn.Parameter:
        sharded, each = self._shards.sharded[index], self._shards.params[index]
        data = data if each.tensor_parallel is None else each.tensor_parallel.dtensor(data)
        full = nn.Parameter(data, requires_grad=sharded.requires_grad)
        full.__dict__.update(notes_on(each.param))
        if sharded.requires_grad:
            self._watch.watch(index, full)
        return full

    def gather_by(self, comm: Comm) -> None:
        """Gather by ``comm`` from now on."""
        self._comm = comm

    def rename(self, name: str, model: str = "") -> None:
        """Take the name of the unit, and what tells its model from others of the same ranks."""
        self._name = name
        self._label = f"gather of unit {name!r}{model}"

    # ---- gather ---------------------------------------------------------------------------------

    def refuse_out_of_reach(self, device: torch.device) -> NoReturn:
        """Raise `UsageError`: shards are on ``device``, from where a gather does not take them."""
        if device.type == "meta":
            raise UsageError(
                f"unit {self._name!r} is on the meta device still: give its module real memory and "
                "values first (to_empty and an initialisation, or load_state_dict(assign=True))"
            )
        raise UsageError(
            f"unit {self._name!r} was moved to {device}: move it back to "
            f"{self._plan.resting_device} before it is used"
        )

    def gather(self, custom: CustomGather | None) -> None:
        """Start to gather, as ``custom`` does it if it is given (collective)."""
        if self._lenders is not None:
            self._lenders.lend()
        if self._buffer.bytes:
            self._buffer.allocate()
        if self._freed.marked:
            self._freed.unmark()
        self._version = self.at_rest._version
        if self.part is not None:
            block = self._ranks.block
            assert block is not None
            if self._packed is not None:
                self._packed.there.allocate()
            pairs = list(zip(self._flats, self.part.flats, strict=True))
            self._gathering = block.all_gather(pairs, label=self._label)
            return
        if self._packed is not None:
            self._packed.arriving.allocate()
        if self._as_they_rest:
            self._gathering = self._all_gather(self._pairs, custom)
        elif not self._plan.offload.to_host:
            self._gathering = self._all_gather(self._converted(self._shards.flats), custom)
        else:
            if not self._plan.offload.params and self.working is None:
                segments = self._shards.layout.segments
                rank = self._ranks.gather.rank
                sizes = [(s.numel_of(rank), dtype_of(s.full_dtype)) for s in segments]
                # On the compute stream, like all; for later steps, too.
                with torch.inference_mode(False):
                    self.working = FlatBuffer(sizes, self._plan.device)
            with self._fetch.behind_compute():
                if self._plan.offload.params:
                    sent = self._converted(self._fetch_slices(), lasting=self._fetched is None)
                else:
                    sent = self._converted(self._refreshed_working())
                if self._fetched is not None:
                    self._fetched.release()
                self._gathering = self._all_gather(sent, custom)

    def note_version(self) -> None:
        """The root's forward begins: what is written to shards from now on is written in it."""
        self._version_begun = self.at_rest._version

    def gather_early(self, early: EarlyStream) -> None:
        """Start to gather beside the computation that is queued already, if that writes no shards.

        See [Note: Gathers that nobody foresaw] in `fullshard.core.schedule.rules`.
        """
        written = self._version_begun != self.at_rest._version
        if written or self.part is not None or self._extensions:
            self.gather(None)
            return
        with early.beside_compute():
            self.gather(None)

    def _all_gather(
        self, pairs: Sequence[tuple[Full, Tensor]], custom: CustomGather | None
    ) -> Work:
        if custom is None:
            return self._comm.all_gather(pairs, label=self._label)
        works: list[Work] = []
        try:
            for full, shard in pairs:
                work = custom(flat_of(full), shard)
                works += [] if work is None else [work]
        except BaseException:  # what has begun writes to memory that is let go next
            Together(works).wait()
            raise
        return Together(works)

    def _converted(
        self, shards: Sequence[Tensor], *, lasting: bool = True
    ) -> list[tuple[Full, Tensor]]:
        """Pairs for a gather; slices in another dtype, or not ``lasting``, are first put in place.

        By one call.
        """
        pairs: list[tuple[Full, Tensor]] = []
        places, slices = [], []
        for number, (full, shard) in enumerate(zip(self._travelling, shards, strict=True)):
            if number in self._extensions:
                if self._lenders is not None:  # it arrives in memory of this stream
                    self._lenders.lend()
                pairs += self._extensions[number].send(shard if lasting else shard.clone())
                continue
            flat = flat_of(full)
            if shard.dtype != flat.dtype or not lasting:
                slices.append(shard)
                places.append(shard := self._own_slices[number])
            pairs.append((full, shard))
        if places:
            torch._foreach_copy_(places, slices)
        return pairs

    def _fetch_slices(self) -> list[Tensor]:
        """Return slices that rest on the host where they are gathered from; one copy brings them.

        As they rest: torch would cast on the host, into memory that is not page-locked.
        """
        if self._fetched is None:
            return self._shards.flats
        self._fetched.allocate()
        self._fetched.memory.copy_(self.at_rest, non_blocking=True)
        return self._fetched.flats

    def _refreshed_working(self) -> list[Tensor]:
        """The shard on the device in the dtype of computation, as of the optimizer's last step."""
        assert self.working is not None
        if self.working_version != self.at_rest._version:
            torch._foreach_copy_(self.working.flats, self._fetch_slices())
            self.working_version = self.at_rest._version
        return self.working.flats

    def wait(self) -> None:
        """Wait until what was gathered is there."""
        if self._gathering is not None:
            self._gathering.wait()
            if self._lenders is not None:
                self._lenders.join()  # casts that no communicator follows
            if self._copies:
                self._fetch.join()
                if self._ranks.compression is not None:  # codes were in memory of that stream
                    self._fetch.follow()
            if self._packed is not None and self.part is None:
                self._packed.unpack()
            self._gathering = self.part = None
            if self._extensions:
                self._receive()
            if self._lenders is not None:
                self._lenders.follow()  # what the gather held beside the buffer is free again

    def reach(self) -> None:
        """Put the current stream behind the gather, if it was another one that waited for it."""
        if self._lenders is not None:
            self._lenders.meet()

    def _receive(self) -> None:
        for index, place in enumerate(self._shards.places):
            extension = self._extensions.get(place.number)
            if extension is not None and extension.receive():
                assert extension.full is not None
                self.params[index] = self._as_parameter(index, extension.full)
                extension.full = self.params[index]
                if type(extension.full) is nn.Parameter:
                    self.storages |= {extension.full.untyped_storage()._cdata}

    # ---- what there is --------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        """Bytes held now beyond the shards."""
        total = sum(extension.bytes for extension in self._extensions.values())
        if not self.resident and self.params and self._buffer.allocated:
            total += self._buffer.bytes
        if self._packed is not None:
            total += self._packed.bytes
        return total + (self.part.bytes if self.part is not None else 0)

    @property
    def outdated(self) -> bool:
        """True if the shards have been changed since they were gathered."""
        return not self.resident and self._version != self.at_rest._version

    # ---- drop -----------------------------------------------------------------------------------

    def shrink(self) -> None:
        """Drop all but this rank's part among those of its block."""
        self.wait()
        block, flats = self._ranks.block, self._flats
        assert block is not None
        sizes = [(flat.numel() // block.size, flat.dtype) for flat in flats]
        self.part = FlatBuffer(sizes, self._plan.device)
        for part, full in zip(self.part.flats, flats, strict=True):
            part.copy_(full[block.rank * part.numel() : (block.rank + 1) * part.numel()])
        self._release()
        self._freed.mark()

    def drop(self) -> bool:
        """Drop everything; False if there was no more than the part that `shrink` had left."""
        if self._gathering is not None:
            self.wait()
        if self.part is not None:
            self.part = None
            return False
        self._release()
        self._freed.mark()
        for extension in self._extensions.values():
            extension.release()
        return True

    def mark_replaced(self) -> None:
        """Have a backward that still needs these parameters fail: their unit gets others."""
        if self.params and not self.resident:
            self._freed.mark_replaced()

    def abandon(self) -> None:
        """Drop what a gather that has failed has taken."""
        self._gathering = self.part = None
        self._release()
        self._freed.mark()
        if self._packed is not None:
            self._packed.arriving.release()
        if self._fetched is not None:
            self._fetched.release()
        for extension in self._extensions.values():
            extension.release()

    def _release(self) -> None:
        if self._lenders is not None:
            self._lenders.join()
            self._lenders.follow()
            self._lenders.forget()
        if self._buffer.bytes:
            self._buffer.release()
        if self._packed is not None:
            self._packed.there.release()

    @property
    def last_fetch(self) -> Any:
        """The event behind which nobody reads shards in the host's memory, or None."""
        return self._fetch.last

    def synchronize(self) -> None:
        """Hold up the host until it may write to shards that rest there."""
        self._fetch.synchronize()


def view_of(flats: Sequence[Tensor], place: Place) -> Tensor:
    """The parameter at ``place`` in full segments."""
    flat = flats[place.number]
    return flat[place.slot.start : place.slot.stop].view(place.slot.spec.shape)
