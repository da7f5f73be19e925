# SPDX-License-Identifier: Apache-2.0
"""The communicator on torch.distributed; no other file of the engine calls collectives."""

import zlib
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from fullshard.core.errors import NotSupportedError
from fullshard.torch.comm.protocol import (
    Comm,
    Done,
    Full,
    Parts,
    ReduceOp,
    Work,
    flat_of,
    innermost,
    rank_order_sum,
    slices_of,
)
from fullshard.torch.comm.sibling_groups import backend_of, sibling_group, timeout_s_of
from fullshard.torch.comm.watch.watchdog import Witness


class _Pending:
    """Several works of torch.distributed as one, and the last step that completes their outputs."""

    def __init__(
        self,
        witness: Witness,
        what: str,
        works: Sequence[dist.Work],
        finish: Callable[[], None] | None = None,
        device: torch.device | None = None,
    ):
        self._witness = witness
        self._device = device
        self._what = what
        self._works = works
        self._finish = finish

    def wait(self) -> None:
        works = self._works
        if works:
            self._witness.waits(self._what, works)
            # They hold their outputs; the witness looks at a mark instead.
            late, self._works = self._witness.pending, ()
            if late is not None and late[2] is works:
                mark = _Mark.of(self._device)
                self._witness.pending = None if mark is None else (*late[:2], (mark,))
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def is_completed(self) -> bool:
        return all([work.is_completed() for work in self._works])  # noqa: C419 - at every event


class _Mark:
    """The present place of a CUDA stream, which the stream reaches when its waits are over."""

    def __init__(self, event: torch.cuda.Event):
        self._event = event

    @classmethod
    def of(cls, device: torch.device | None) -> "_Mark | None":
        """A mark on the current stream; None where to wait has held up the host."""
        if device is None or device.type != "cuda":
            return None
        return cls(torch.cuda.current_stream(device).record_event())

    def is_completed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class _Route(NamedTuple):
    """The way that tensors of one kind of device travel."""

    carrier: str | None  # the device from which they are sent, None for their own
    on_gloo: bool
    together: bool  # several tensors go by one call


# torch 2.13 renamed the methods of process groups that take one tensor of all ranks, and those that
# take several of one dtype, as NCCL makes them, in one call. What torch.distributed wraps around
# the first costs the host as much as they do.
_RENAMED = hasattr(dist.ProcessGroup, "all_gather_single")
_GATHER = "all_gather_single" if _RENAMED else "_allgather_base"
_REDUCE = "reduce_scatter_single" if _RENAMED else "_reduce_scatter_base"
_GATHERS = "all_gather_single_coalesced" if _RENAMED else "allgather_into_tensor_coalesced"
_REDUCES = "reduce_scatter_single_coalesced" if _RENAMED else "reduce_scatter_tensor_coalesced"
_SEVERAL_IN_ONE = ("nccl", "fake")  # the backends that have these
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


_host_families: list[str] = []


def _asynchronous(single: str) -> AllgatherOptions | ReduceScatterOptions:
    """The options of calls that the host does not wait for."""
    options = AllgatherOptions() if single is _GATHER else ReduceScatterOptions()
    options.asyncOp = True
    return options


class ProcessGroupComm(Comm):
    """The communicator over a process group of torch.distributed (NCCL, Gloo, ...).

    A collective that fails raises `CommunicationError`, which names what the other ranks are doing,
    and makes the group's other ranks fail at their next one. ``family`` is the name under which
    derived communicators do so together, else the group's own.
    """

    def __init__(self, group: dist.ProcessGroup, family: str | None = None):
        if not group._device_types:
            raise NotSupportedError(
                f"a {type(group).__name__} has no backend of c10d, as the process group of torch's "
                "MultiThreadedTestCase, whose ranks are threads: use a group of Gloo or NCCL, or "
                "fullshard.testing.LocalWorld for ranks as threads"
            )
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.members: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        self._family = family or group.group_name
        self.witness: Witness = Witness(self._family, self.members, timeout_s_of(group), group)
        self._exchanges = 0
        # By device, since a group may have Gloo for the host and NCCL for CUDA at the same time.
        self._routes: dict[torch.device, _Route] = {}
        self._options = {single: _asynchronous(single) for single in (_GATHER, _REDUCE)}

    def _route_of(self, tensor: Tensor) -> _Route:
        """Return how ``tensor`` travels: NCCL reaches no host memory, and Gloo only that."""
        device = tensor.device
        route = self._routes.get(device)
        if route is None:
            backend, carrier = backend_of(self.group, device), None
            if backend is None:
                others = (each.type for each in self.group._device_types if each.type != "cpu")
                carrier = next(others, "cuda") if device.type == "cpu" else "cpu"
            elif backend == dist.Backend.GLOO and device.type != "cpu":
                carrier = "cpu"
            sender = backend_of(self.group, carrier) if carrier else backend
            on_gloo = sender == dist.Backend.GLOO
            route = self._routes[device] = _Route(carrier, on_gloo, sender in _SEVERAL_IN_ONE)
        return route

    def duplicate(self) -> "ProcessGroupComm":
        """Return a communicator over a new process group of the same ranks, made by them alone.

        It has the group's options, and on NCCL streams of high priority: what it is made for is
        waited for, and needs few of the device's processors, which kernels already there leave
        late. Beside a device's backend there is no Gloo: what is in host memory travels by the
        device.
        """
        group = sibling_group(self.group, self.members, "duplicate", high_priority=True)
        return ProcessGroupComm(group, self._family)

    def on_host(self) -> "ProcessGroupComm":
        """Return one for host memory and any one thread; its failures are its own. Collective."""
        number = len(_host_families)
        group = sibling_group(self.group, self.members, "host", "gloo")
        family = f"{self.group.group_name}/host/{number}"
        _host_families.append(family)
        return ProcessGroupComm(group, family)

    def block(self, size: int) -> "ProcessGroupComm":
        """See `Comm.block`. A new process group, made by this communicator's ranks alone."""
        first = self.rank // size * size
        members = self.members[first : first + size]
        group = sibling_group(self.group, members, f"block-of-{size}-from-{first}")
        return ProcessGroupComm(group, self._family)

    def _start(
        self,
        what: str,
        tensors: Sequence[Tensor],
        start: Callable[[Sequence[Tensor], _Route], Sequence[dist.Work]],
        finish: Callable[[], None] | None = None,
        inputs_between: bool = True,
    ) -> Work:
        """Issue what ``start`` does with ``tensors``, or with copies that the backend can reach.

        These are outputs, with an input behind each of them if there are ``inputs_between``.
        ``start`` is told their route, too.
        """
        reachable, done = tensors, finish
        route = self._route_of(tensors[0])
        if route.carrier is not None:
            reachable = [
                torch.empty_like(tensor, device=route.carrier)
                if inputs_between and place % 2 == 0  # which is written whole
                else tensor.to(route.carrier, copy=True)
                for place, tensor in enumerate(tensors)
            ]

            def done() -> None:
                if finish is not None:
                    finish()
                step = 2 if inputs_between else 1  # inputs stay untouched: shards count writes
                for output, copy in zip(tensors[::step], reachable[::step], strict=True):
                    output.copy_(copy)

        works = self._issue(what, start, reachable, route)
        if not route.on_gloo:
            self.witness.leaves_pending(what, works)
        return _Pending(self.witness, what, works, done, reachable[0].device)

    def _issue(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        self.witness.issues(what)
        try:
            return call(*args)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self.witness.failure(what, error) from error

    def all_gather(self, pairs: Sequence[tuple[Full, Tensor]], label: str = "") -> Work:
        return self._send(_GATHER, label or "all_gather", pairs)

    def reduce_scatter(self, pairs: Sequence[tuple[Tensor, Full]], label: str = "") -> Work:
        return self._send(_REDUCE, label or "reduce_scatter", pairs)

    def _send(self, single: str, what: str, pairs: Sequence[tuple[Full, Full]]) -> Work:
        """Gather into outputs, or reduce to them, what the inputs behind them hold."""
        output, held = pairs[0]
        if len(pairs) == 1 and isinstance(output, Tensor) and isinstance(held, Tensor):
            route = self._route_of(output)
            if route.carrier is None and not (route.on_gloo or output.is_complex()):  # as mostly
                call = getattr(self.group, single)
                works = (self._issue(what, call, output, held, self._options[single]),)
                self.witness.leaves_pending(what, works)
                return _Pending(self.witness, what, works, None, output.device)
        if single is _REDUCE and self._route_of(flat_of(output)).on_gloo:
            return self._reduce_scatter_by_exchange(what, pairs)

        def start(tensors: Sequence[Tensor], route: _Route) -> list[dist.Work]:
            fulls = [pair[single is _REDUCE] for pair in pairs]
            if route.on_gloo:
                moved = _moved(fulls, tensors[::2])
                return self._all_gather_by_exchange(what, moved, tensors[1::2])
            return self._by_pairs(single, route, tensors, fulls)

        return self._start(what, [flat_of(each) for pair in pairs for each in pair], start)

    def _by_pairs(
        self, single: str, route: _Route, tensors: Sequence[Tensor], fulls: Sequence[Full]
    ) -> list[dist.Work]:
        """Send an output and an input a call; where that is made all of a dtype in one.

        Unequal slices go by a call of their own for each of ``fulls`` that has such.
        """
        gathers, options = single is _GATHER, self._options[single]
        if any(map(torch.is_complex, tensors)):
            # NCCL knows no complex numbers; a sum of them is one of their parts.
            tensors = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
        works: list[dist.Work] = []
        outputs, inputs = tensors[::2], tensors[1::2]
        if Parts in map(type, fulls):
            equal = [not isinstance(full, Parts) for full in fulls]
            for full, output, held in zip(fulls, outputs, inputs, strict=True):
                if isinstance(full, Parts) and gathers:
                    slices = list(torch.split(output, full.numels))
                    works.append(self.group.allgather([slices], [held], options))
                elif isinstance(full, Parts):
                    slices = list(torch.split(held, full.numels))
                    works.append(self.group.reduce_scatter([output], [slices], options))
            outputs, inputs = list(compress(outputs, equal)), list(compress(inputs, equal))
        if len(outputs) < 2 or not route.together:
            call = getattr(self.group, single)
            return works + [call(*each, options) for each in zip(outputs, inputs, strict=True)]
        call = getattr(self.group, _GATHERS if gathers else _REDUCES)
        dtypes = [output.dtype for output in outputs]
        for dtype in dict.fromkeys(dtypes):
            alike = [each is dtype for each in dtypes]
            pairs = [list(compress(each, alike)) for each in (outputs, inputs)]
            works.append(call(*pairs, options))
        return works

    # [Note: Direct exchange]
    # Gloo's all-gather goes through a flat buffer of its own, twice the memory and a copy, and its
    # reduce-scatter is an all-reduce underneath, which sends twice what is needed and adds in an
    # order of its own. So ranks send each other slices directly: a gather receives every slice in
    # its place; a reduce receives the other ranks' parts of this rank's slice and adds them in rank
    # order, in fp32 for low precision. Both send (N-1)/N of the buffer, the least possible.

    def _all_gather_by_exchange(
        self, what: str, fulls: Sequence[Full], shards: Sequence[Tensor]
    ) -> list[dist.Work]:
        received = [slices_of(full, self.size) for full in fulls]
        works = self._exchange(what, [[shard] * self.size for shard in shards], received)
        for slices, shard in zip(received, shards, strict=True):
            if slices[self.rank].data_ptr() != shard.data_ptr():
                slices[self.rank].copy_(shard)  # while the others' are on their way
        return works

    def _reduce_scatter_by_exchange(self, what: str, pairs: Sequence[tuple[Full, Full]]) -> Work:
        sums: list[tuple[list[Tensor], Tensor]] = []

        def start(tensors: Sequence[Tensor], _: _Route) -> list[dist.Work]:
            fulls = _moved([full for _, full in pairs], tensors[1::2])
            sent = [slices_of(full, self.size) for full in fulls]
            for slices, shard in zip(sent, tensors[::2], strict=True):
                parts = [
                    slices[rank] if rank == self.rank else torch.empty_like(shard)
                    for rank in range(self.size)
                ]
                sums.append((parts, shard))
            return self._exchange(what, sent, [parts for parts, _ in sums])

        def add_up() -> None:
            for parts, shard in sums:
                rank_order_sum(parts, shard)
            sums.clear()

        tensors = [flat_of(each) for pair in pairs for each in pair]
        return self._start(what, tensors, start, add_up)

    def _exchange(
        self, what: str, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[Tensor]]
    ) -> list[dist.Work]:
        """Send each ``outgoing[r]`` to each other rank r, receive each ``incoming[r]`` from it."""
        # Several exchanges may be under way between two ranks: the lower bits tell them apart. The
        # upper bits keep ranks that are in different units from taking each other's slices.
        base = zlib.crc32(what.encode()) % 2**19 << 12
        tags = [base | (self._exchanges + number) % 2**12 for number in range(1, len(outgoing) + 1)]
        self._exchanges = tags[-1] % 2**12
        works: list[dist.Work | None] = []
        # Gloo tells the sender of a receive on the same connection: behind the first slices that
        # leave, it would come late, and the other rank would wait with its next slices for it.
        for step in range(1, self.size):
            source = (self.rank - step) % self.size
            for parts, tag in zip(incoming, tags, strict=True):
                if parts[source].numel():
                    works.append(
                        dist.irecv(parts[source], group=self.group, group_src=source, tag=tag)
                    )
        for step in range(1, self.size):
            target = (self.rank + step) % self.size
            for slices, tag in zip(outgoing, tags, strict=True):
                if slices[target].numel():
                    works.append(
                        dist.isend(slices[target], group=self.group, group_dst=target, tag=tag)
                    )
        return [work for work in works if work is not None]

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp = "sum", label: str = "") -> Work:
        what = label or "all_reduce"
        if op != "sum" and self._route_of(tensors[0]).on_gloo and tensors[0].device.type == "cpu":
            return self._extremes_by_rounds(what, tensors, op)

        def start(tensors: Sequence[Tensor], _: _Route) -> list[dist.Work]:
            return [
                dist.all_reduce(tensor, op=_REDUCE_OPS[op], group=self.group, async_op=True)
                for tensor in tensors
            ]

        return self._start(what, tensors, start, inputs_between=False)

    # [Note: Rounds]
    # Gloo's all-reduce goes round a ring: 2(N - 1) hops one after the other, at the end of every
    # backward. A maximum may count a rank twice, so after a round in which all tell the next rank,
    # one in which they tell the next but one, the next but three, ... each has heard of all: that
    # takes log2(N) hops, rounded up. It is done when it has been issued.

    def _extremes_by_rounds(self, what: str, tensors: Sequence[Tensor], op: ReduceOp) -> Work:
        combine = torch.maximum if op == "max" else torch.minimum
        self.witness.issues(what)
        tag = zlib.crc32(what.encode()) % 2**19 << 12
        distance = 1
        while distance < self.size:
            ahead, behind = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            sent = [tensor.contiguous() for tensor in tensors]
            received = [torch.empty_like(tensor) for tensor in sent]
            works = []
            try:
                for mine, theirs in zip(sent, received, strict=True):
                    if not mine.numel():
                        continue
                    works += [
                        dist.irecv(theirs, group=self.group, group_src=behind, tag=tag),
                        dist.isend(mine, group=self.group, group_dst=ahead, tag=tag),
                    ]
            except RuntimeError as error:
                raise self.witness.failure(what, error) from error
            self.witness.waits(what, [work for work in works if work is not None])
            for tensor, theirs in zip(tensors, received, strict=True):
                combine(tensor, theirs, out=tensor)
            distance *= 2
        return Done()

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> Work:
        def start(tensors: Sequence[Tensor], _: _Route) -> list[dist.Work]:
            return [
                dist.broadcast(tensor, group=self.group, group_src=source, async_op=True)
                for tensor in tensors
            ]

        return self._start("broadcast", tensors, start, inputs_between=False)

    def all_to_all(self, received: Parts, sent: Parts, label: str = "") -> Work:
        what = label or "all_to_all"

        def start(tensors: Sequence[Tensor], route: _Route) -> list[dist.Work]:
            into, of = tensors
            numels = received.numels, sent.numels
            if not route.on_gloo:
                work = dist.all_to_all_single(into, of, *numels, group=self.group, async_op=True)
                return [work]
            incoming, outgoing = torch.split(into, received.numels), torch.split(of, sent.numels)
            incoming[self.rank].copy_(outgoing[self.rank])
            return self._exchange(what, [outgoing], [incoming])

        return self._start(what, [received.flat, sent.flat], start)

    def reduce_scratch_bytes(self, full: Tensor) -> int:
        """Return the bytes of the other ranks' parts if reduces are exchanges, else 0."""
        on_host = full.device.type == "cpu" and self._route_of(full).on_gloo
        return full.nbytes * (self.size - 1) // self.size if on_host else 0


def _moved(fulls: Sequence[Full], flats: Sequence[Tensor]) -> list[Full]:
    """Return ``fulls`` with ``flats``, which the backend can reach, in their places."""
    return [
        Parts(flat, full.numels) if isinstance(full, Parts) else flat
        for full, flat in zip(fulls, flats, strict=True)
    ]


def forget_destroyed(known: WeakKeyDictionary[Any, Any]) -> None:
    """Drop destroyed groups from ``known``: what is kept of one keeps its connections."""
    alive = dist.distributed_c10d._world.pg_map
    for reference in known.keyrefs():  # a copy: ranks that are threads add to it meanwhile
        group = reference()
        if isinstance(group, dist.ProcessGroup) and group not in alive:
            known.pop(group, None)


def group_of(comm: Comm) -> dist.ProcessGroup | None:
    """Return the process group in which ``comm`` sends, or None if it uses none."""
    sender = innermost(comm)
    return sender.group if isinstance(sender, ProcessGroupComm) else None


def witness_of(comm: Comm) -> Witness | None:
    """Return what tells people about the calls of ``comm``, or None without a process group."""
    sender = innermost(comm)
    return sender.witness if isinstance(sender, ProcessGroupComm) else None
