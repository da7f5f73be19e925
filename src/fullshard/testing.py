# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of one process, so that sharded code can be tested in milliseconds.

A `LocalWorld` runs one function on every rank. What that function gets as its communicator is
passed to `fully_shard` as ``mesh``, to `FullyShardedDataParallel` as ``process_group``. Values are
real, and nothing needs a launcher, a port or a second process:

    def body(comm):
        model = fully_shard(MyModel(), mesh=comm)
        ...

    results = LocalWorld(4).run(body)

What a real network does rarely, this world does always: a collective completes as late as the
engine lets it, outputs hold NaN until they are waited for, an input that changes while it is in
flight is reported, and so are ranks that disagree about what they are doing. When one rank fails
or ends, the ranks that wait for it fail too.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor

from fullshard.core.errors import ConfigurationError, FullshardError
from fullshard.torch.comm.protocol import (
    Comm,
    Done,
    Full,
    Parts,
    ReduceOp,
    Work,
    flat_of,
    rank_order_sum,
    slices_of,
)

__all__ = ["LocalComm", "LocalWorld", "LocalWorldError"]

T = TypeVar("T")

_Channel = tuple[int, ...]  # the ranks of a group, and which of their communicators it is
_Key = tuple[_Channel, int]


class LocalWorldError(FullshardError, RuntimeError):
    """The ranks of a local world disagree, or one of them has failed."""


@dataclass
class _Exchange:
    """One collective: the inputs of every rank, and the results once all inputs are there."""

    signature: tuple[object, ...]
    inputs: dict[int, list[Tensor]] = field(default_factory=dict)
    # On a GPU: the events that a stream must wait for before it reads inputs, or later results.
    ready: list[torch.cuda.Event] = field(default_factory=list)
    results: list[list[Tensor]] | None = None


class LocalWorld:
    """A world of ``size`` ranks, each of them a thread.

    With ``eager=True`` every collective is complete when it is issued; otherwise it completes as
    late as the engine lets it, when it is waited for. ``timeout_s`` bounds every wait, in seconds.
    Models must be built inside the function that `run` calls: ranks must not share tensors.

    Raises:
        ConfigurationError: if ``size`` is less than 1.
    """

    def __init__(self, size: int, *, eager: bool = False, timeout_s: float = 30.0):
        if size < 1:
            raise ConfigurationError(f"a local world needs at least 1 rank, got {size}")
        self.size = size
        self.eager = eager
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._exchanges: dict[_Key, _Exchange] = {}
        self._waiting: dict[int, tuple[object, ...]] = {}  # what each rank waits in
        self._failure: BaseException | None = None
        self._ended: set[int] = set()  # ranks whose bodies have returned

    def run(self, body: Callable[["LocalComm"], T]) -> list[T]:
        """Call ``body(comm)`` on every rank and return the results in rank order.

        A world may run several bodies, one after the other. The first exception of any rank is
        raised here, after all threads have ended.
        """
        results: list[Any] = [None] * self.size
        self._failure = None
        self._exchanges.clear()
        self._waiting.clear()
        self._ended.clear()

        cores = torch.get_num_threads()

        def rank_main(rank: int) -> None:
            torch.set_num_threads(cores)  # MKL knows it by thread, and rounds otherwise with others
            try:
                # Autograd has one thread for each GPU, in which ranks would wait for each other.
                with torch.autograd.set_multithreading_enabled(False):
                    results[rank] = body(LocalComm(self, range(self.size), rank))
            except BaseException as error:  # handed to the caller below
                self._fail(error)
            with self._changed:
                self._ended.add(rank)
                self._changed.notify_all()

        threads = [
            threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return results

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()

    def _post(
        self, key: _Key, comm: "LocalComm", signature: tuple[object, ...], inputs: list[Tensor]
    ) -> _Exchange:
        with self._changed:
            exchange = self._exchanges.setdefault(key, _Exchange(signature))
            if exchange.signature != signature:
                raise LocalWorldError(
                    f"rank {comm.rank} calls {signature} where another rank calls "
                    f"{exchange.signature} (call {key[1]} of channel {key[0]})"
                )
            exchange.inputs[comm.rank] = inputs
            exchange.ready += _marks(inputs)
            if len(exchange.inputs) == comm.size:
                del self._exchanges[key]
            self._changed.notify_all()
            return exchange

    def _late(self, exchange: _Exchange, comm: "LocalComm") -> LocalWorldError:
        missing = sorted(set(range(comm.size)) - exchange.inputs.keys())
        elsewhere = "".join(
            f"; rank {rank} waits in {self._waiting[comm.members[rank]]}"
            for rank in missing
            if comm.members[rank] in self._waiting
        )
        return LocalWorldError(
            f"rank {comm.rank} waited {self.timeout_s} s in {exchange.signature} "
            f"for ranks {missing}{elsewhere}"
        )

    def _complete(
        self,
        exchange: _Exchange,
        combine: Callable[[list[list[Tensor]]], list[list[Tensor]]],
        comm: "LocalComm",
    ) -> list[Tensor]:
        deadline = time.monotonic() + self.timeout_s
        me = comm.members[comm.rank]
        with self._changed:
            while len(exchange.inputs) < comm.size:
                if self._failure is not None:
                    raise LocalWorldError(f"rank {comm.rank} waits for a rank that has failed")
                gone = [r for r in comm.members if r in self._ended]
                if any(comm.members.index(r) not in exchange.inputs for r in gone):
                    raise LocalWorldError(
                        f"rank {comm.rank} waits in {exchange.signature}, and of its ranks {gone} "
                        "have ended"
                    )
                self._waiting[me] = exchange.signature
                if not self._changed.wait(deadline - time.monotonic()):
                    raise self._late(exchange, comm)
            self._waiting.pop(me, None)
            for event in exchange.ready:
                event.wait()
            if exchange.results is None:
                _keep(each for inputs in exchange.inputs.values() for each in inputs)
                exchange.results = combine([exchange.inputs[r] for r in range(comm.size)])
                exchange.ready = _marks(exchange.results[0])
            _keep(exchange.results[comm.rank])
            return exchange.results[comm.rank]


class LocalComm(Comm):
    """The communicator of rank ``rank`` of ``size`` of a `LocalWorld`; all of it is collective."""

    def __init__(self, world: LocalWorld, members: Sequence[int], rank: int, number: int = 0):
        self.members: tuple[int, ...] = tuple(members)
        self.rank = rank
        self.size: int = len(self.members)
        self.world = world
        self._number = number
        self._calls = 0
        self._derived = 0

    def duplicate(self) -> "LocalComm":
        """Return a further channel between the same threads."""
        return self.subgroup(range(self.size))

    def block(self, size: int) -> "LocalComm":
        first = self.rank // size * size
        return self.subgroup(range(first, first + size))

    def subgroup(self, ranks: Sequence[int]) -> "LocalComm":
        """Return a channel between ``ranks`` of this communicator; only they call this."""
        self._derived += 1
        members = [self.members[rank] for rank in ranks]
        number = self._number * 100 + self._derived
        return LocalComm(self.world, members, list(ranks).index(self.rank), number)

    def all_gather(self, pairs: Sequence[tuple[Full, Tensor]], label: str = "") -> Work:
        def combine(inputs: list[list[Tensor]]) -> list[list[Tensor]]:
            gathered = []
            for shards in zip(*inputs, strict=True):
                full = _unseen_empty((sum(each.numel() for each in shards),), shards[0])
                places = torch.split(full, [each.numel() for each in shards])
                for place, shard in zip(places, shards, strict=True):
                    place.copy_(shard.flatten())
                gathered.append(full)
            return [gathered] * self.size

        fulls = [full for full, _ in pairs]
        self._check_sizes("all_gather", [(shard, full) for full, shard in pairs])
        # A shard may lie inside the output, which holds NaN until the gather is waited for.
        shards = [
            self._copied(shard)
            if shard.untyped_storage().data_ptr() == flat_of(full).untyped_storage().data_ptr()
            else shard
            for full, shard in pairs
        ]
        alike = [
            full.flat if isinstance(full, Parts) else shard
            for full, shard in zip(fulls, shards, strict=True)
        ]
        return self._issue("all_gather", label, shards, list(map(flat_of, fulls)), combine, alike)

    def reduce_scatter(self, pairs: Sequence[tuple[Tensor, Full]], label: str = "") -> Work:
        fulls = [full for _, full in pairs]
        self._check_sizes("reduce_scatter", pairs)

        def combine(inputs: list[list[Tensor]]) -> list[list[Tensor]]:
            sums = [self._sum(column) for column in zip(*inputs, strict=True)]
            sliced = [
                slices_of(
                    Parts(total, full.numels) if isinstance(full, Parts) else total, self.size
                )
                for total, full in zip(sums, fulls, strict=True)
            ]
            return [[slices[rank] for slices in sliced] for rank in range(self.size)]

        flats = list(map(flat_of, fulls))
        return self._issue("reduce_scatter", label, flats, [shard for shard, _ in pairs], combine)

    def _check_sizes(self, name: str, pairs: Sequence[tuple[Tensor, Full]]) -> None:
        for shard, full in pairs:
            flat = flat_of(full)
            numels = full.numels if isinstance(full, Parts) else [shard.numel()] * self.size
            fits = len(numels) == self.size and flat.numel() == sum(numels)
            if not fits or shard.numel() != numels[self.rank] or shard.dtype != flat.dtype:
                raise LocalWorldError(
                    f"rank {self.rank}: {name} of slices of {numels} elements, with {shard.shape} "
                    f"{shard.dtype} and {flat.shape} {flat.dtype}"
                )

    def all_reduce(self, tensors: Sequence[Tensor], op: ReduceOp = "sum", label: str = "") -> Work:
        def combine(inputs: list[list[Tensor]]) -> list[list[Tensor]]:
            columns = list(zip(*inputs, strict=True))
            if op == "sum":
                reduced = [self._sum(column) for column in columns]
            else:
                extreme = torch.amax if op == "max" else torch.amin
                reduced = [extreme(torch.stack(column), 0) for column in columns]
            return [reduced] * self.size

        inputs = [self._copied(tensor) for tensor in tensors]
        return self._issue(f"all_reduce {op}", label, inputs, list(tensors), combine)

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> Work:
        def combine(inputs: list[list[Tensor]]) -> list[list[Tensor]]:
            return [inputs[source]] * self.size

        inputs = [self._copied(tensor) for tensor in tensors]
        return self._issue(f"broadcast from {source}", "", inputs, list(tensors), combine)

    def all_to_all(self, received: Parts, sent: Parts, label: str = "") -> Work:
        def combine(inputs: list[list[Tensor]]) -> list[list[Tensor]]:
            parts = [torch.split(flat, numels.tolist()) for flat, numels in inputs]
            return [[torch.cat([row[rank] for row in parts])] for rank in range(self.size)]

        inputs = [sent.flat, torch.tensor(sent.numels, device="cpu")]
        return self._issue("all_to_all", label, inputs, [received.flat], combine, inputs[1:])

    def reduce_scratch_bytes(self, full: Tensor) -> int:
        """Return 0: threads read each other's memory."""
        return 0

    def _copied(self, tensor: Tensor) -> Tensor:
        """Return what is left of an input when outputs are written that lie in its memory."""
        return _unseen_copy(tensor)

    @staticmethod
    def _sum(column: Sequence[Tensor]) -> Tensor:
        total = _unseen_empty(column[0].shape, column[0])
        rank_order_sum(column, total)
        return total

    def _issue(
        self,
        name: str,
        label: str,
        inputs: list[Tensor],
        outputs: list[Tensor],
        combine: Callable[[list[list[Tensor]]], list[list[Tensor]]],
        alike: Sequence[Tensor] = (),
    ) -> Work:
        """Post ``inputs``; ``alike`` have equal shapes on all ranks, if these have not."""
        if not inputs:  # process groups fail, too
            raise LocalWorldError(f"rank {self.rank}: {name} ({label}) of no tensors")
        signature = (name, label, *((tuple(t.shape), t.dtype) for t in alike or inputs))
        key = ((self._number, *self.members), self._calls)
        self._calls += 1
        inputs = [tensor.detach() for tensor in inputs]
        outputs = [tensor.detach() for tensor in outputs]
        for output in outputs:
            _poison(output)
        exchange = self.world._post(key, self, signature, inputs)
        work = _LateWork(self, exchange, inputs, outputs, combine)
        if self.world.eager:
            work.wait()
            return Done()
        return work


class _LateWork:
    """A collective that completes when it is waited for, not before."""

    def __init__(
        self,
        comm: LocalComm,
        exchange: _Exchange,
        inputs: list[Tensor],
        outputs: list[Tensor],
        combine: Callable[[list[list[Tensor]]], list[list[Tensor]]],
    ):
        self._comm = comm
        self._exchange: _Exchange | None = exchange
        self._inputs = inputs
        self._at_issue = [_unseen_copy(tensor) for tensor in inputs]
        self._issued = _marks(inputs)
        self._outputs = outputs
        self._combine = combine

    def wait(self) -> None:
        if self._exchange is None:
            return
        comm = self._comm
        for event in self._issued:
            event.wait()
        results = comm.world._complete(self._exchange, self._combine, comm)
        for now, before in zip(self._inputs, self._at_issue, strict=True):
            if now.untyped_storage().nbytes() == 0 < before.numel() or not _same_bits(now, before):
                raise LocalWorldError(
                    f"rank {comm.rank}: an input of {self._exchange.signature} was changed "
                    "or freed before the collective was waited for"
                )
        for output, result in zip(self._outputs, results, strict=True):
            output.copy_(result.view_as(output))
        self._exchange = None
        self._inputs = self._at_issue = self._outputs = []

    def is_completed(self) -> bool:
        return self._exchange is None


def _marks(tensors: Sequence[Tensor]) -> list[torch.cuda.Event]:
    """Record where the current CUDA stream is now, if any of ``tensors`` is on a GPU."""
    if not any(tensor.is_cuda for tensor in tensors):
        return []
    return [torch.cuda.current_stream().record_event()]


def _keep(tensors: Iterable[Tensor]) -> None:
    """Let nobody have the memory of ``tensors`` before the current CUDA stream is done with it.

    They come from the streams of other ranks, and may be freed as soon as those have read them.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _unseen_empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Allocate memory that torch's memory profiler does not count, on the device of ``like``."""
    if like.device.type != "cpu":
        return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
    dtype, numel = like.dtype, math.prod(shape)
    memory = numpy.empty(max(1, numel) * dtype.itemsize, dtype=numpy.uint8)
    return torch.from_numpy(memory).view(dtype)[:numel].view(tuple(shape))


def _unseen_copy(tensor: Tensor) -> Tensor:
    return _unseen_empty(tensor.shape, tensor).copy_(tensor.detach())


def _poison(tensor: Tensor) -> None:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dim() == 0:
        a, b = a.reshape(1), b.reshape(1)
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
