# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads on one device whose collectives are as late as those of a network.

Each rank computes on a CUDA stream of its own, as if it had a GPU of its own. A collective runs on
its communicator's stream, behind what all ranks had issued when they called it: its outputs are
filled with NaN, the stream sleeps, and only then are the inputs read and the outputs written. Who
reads a result before he has waited for it sees NaN, who changes or frees an input too early changes
the result. On a CPU outputs hold NaN until they are waited for.

[Note: One autograd thread a device]
Autograd runs all backwards on a GPU in one thread of its own. Ranks that are threads would wait for
each other in it for ever; so multithreading is switched off, and each rank runs its own backward.
"""

import threading
import time
from contextlib import contextmanager, nullcontext

import torch

from fullshard.torch.comm.protocol import rank_order_sum
from fullshard.torch.unit import full_parameters, gradients
from fullshard.torch.unit.buffers import FlatBuffer
from fullshard.torch.unit.streams import CopyStream

SLEEP_CYCLES = 5_000_000  # some milliseconds: far longer than a step of a small model computes
TIMEOUT_S = 60.0


def sleep_on(device, cycles=SLEEP_CYCLES):
    """Keep the current stream busy."""
    if device.type == "cuda":
        torch.cuda._sleep(cycles)


@contextmanager
def own_stream(device):
    """Within, a new stream is the current one, behind the one before, which is behind it after."""
    if device.type != "cuda":
        yield
        return
    before, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield
    before.wait_stream(stream)


class StreamWorld:
    """``size`` ranks as threads. Those in ``careless`` do not wait for collectives."""

    def __init__(self, size, device, *, cycles=SLEEP_CYCLES):
        self.size, self.device, self.cycles = size, device, cycles
        self.careless = set()
        self.issued = 0
        self._changed = threading.Condition()
        self._exchanges = {}
        self._streams = {}
        self._failure = None

    def run(self, body):
        """``body(comm)`` on every rank; the results in rank order, or the first failure."""
        results = [None] * self.size

        def rank_main(rank):
            try:
                # See [Note: One autograd thread a device].
                with torch.autograd.set_multithreading_enabled(False), own_stream(self.device):
                    results[rank] = body(StreamComm(self, tuple(range(self.size)), rank, ()))
            except BaseException as error:
                with self._changed:
                    self._failure = self._failure or error
                    self._changed.notify_all()

        threads = [
            threading.Thread(target=rank_main, args=(rank,), daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return results

    def exchange(self, key, comm, given, combine):
        """Hand in (inputs, outputs), wait for the other ranks' hosts, and get the `_Exchange`."""
        deadline = time.monotonic() + TIMEOUT_S
        with self._changed:
            exchange = self._exchanges.setdefault(key, _Exchange(self))
            exchange.add(comm.rank, *given)
            if len(exchange.given) == comm.size:
                del self._exchanges[key]
                self.issued += 1
                exchange.carry_out(self._stream_of(key[0]), combine)
                self._changed.notify_all()
            while not exchange.carried_out:
                if self._failure is not None:
                    raise RuntimeError(f"rank {comm.rank} waits for one that has failed")
                if not self._changed.wait(deadline - time.monotonic()):
                    raise RuntimeError(f"rank {comm.rank} waited {TIMEOUT_S} s for others")
        return exchange

    def _stream_of(self, channel):
        if self.device.type != "cuda":
            return None
        if channel not in self._streams:
            # Streams of this priority come from another pool than the engine's and the ranks'.
            self._streams[channel] = torch.cuda.Stream(self.device, priority=-1)
        return self._streams[channel]


class _Exchange:
    """One collective."""

    def __init__(self, world):
        self.world = world
        self.given = {}
        self.carried_out = False
        self.done = None
        self.late = {}  # on a CPU: what is written when it is waited for

    def add(self, rank, inputs, outputs):
        event = None
        if self.world.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        self.given[rank] = (inputs, outputs, event)

    def carry_out(self, stream, combine):
        ranks = sorted(self.given)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for rank in ranks:
                if stream is not None:
                    stream.wait_event(self.given[rank][2])
            # An input that lies in an output would not survive the NaNs.
            inputs = {
                rank: [_safe(tensor, self.given[rank][1]) for tensor in self.given[rank][0]]
                for rank in ranks
            }
            for rank in ranks:
                for output in self.given[rank][1]:
                    poison(output)
            sleep_on(self.world.device, self.world.cycles)
            results = combine([inputs[rank] for rank in ranks])
            for rank, mine in zip(ranks, results, strict=True):
                if stream is None:
                    self.late[rank] = [result.clone() for result in mine]
                    continue
                for output, result in zip(self.given[rank][1], mine, strict=True):
                    output.copy_(result)
            if stream is not None:
                self.done = stream.record_event()
        self.given.clear()
        self.carried_out = True


class _Work:
    def __init__(self, exchange, comm, outputs, held):
        self._exchange, self._comm, self._outputs, self._held = exchange, comm, outputs, held

    def wait(self):
        exchange, self._exchange, self._held = self._exchange, None, None
        comm = self._comm
        if exchange is None or comm.members[comm.rank] in comm.world.careless:
            return
        if exchange.done is not None:
            exchange.done.wait()
            return
        for output, result in zip(self._outputs, exchange.late.pop(comm.rank), strict=True):
            output.copy_(result)

    def is_completed(self):
        if self._exchange is None:
            return True
        return self._exchange.done is not None and self._exchange.done.query()


class StreamComm:
    """The `Comm` of one rank of a `StreamWorld`."""

    def __init__(self, world, members, rank, channel):
        self.world, self.members, self.rank, self.size = world, members, rank, len(members)
        self._channel = channel
        self._calls = self._derived = 0

    def duplicate(self):
        return self.subgroup(range(self.size))

    def block(self, size):
        first = self.rank // size * size
        return self.subgroup(range(first, first + size))

    def subgroup(self, ranks):
        self._derived += 1
        members = tuple(self.members[rank] for rank in ranks)
        channel = (*self._channel, self._derived)
        return StreamComm(self.world, members, list(ranks).index(self.rank), channel)

    def all_gather(self, pairs, label=""):
        def combine(inputs):
            return [[torch.cat(shards) for shards in zip(*inputs, strict=True)]] * self.size

        return self._issue([s for _, s in pairs], [f for f, _ in pairs], combine)

    def reduce_scatter(self, pairs, label=""):
        def combine(inputs):
            sums = [_sum(fulls) for fulls in zip(*inputs, strict=True)]
            return [[total.chunk(self.size)[rank] for total in sums] for rank in range(self.size)]

        return self._issue([f for _, f in pairs], [s for s, _ in pairs], combine)

    def all_reduce(self, tensors, op="sum", label=""):
        def combine(inputs):
            columns = list(zip(*inputs, strict=True))
            if op == "sum":
                return [[_sum(column) for column in columns]] * self.size
            extreme = torch.amax if op == "max" else torch.amin
            return [[extreme(torch.stack(column), 0) for column in columns]] * self.size

        return self._issue(list(tensors), list(tensors), combine)

    def broadcast(self, tensors, source=0):
        return self._issue(
            list(tensors), list(tensors), lambda inputs: [inputs[source]] * self.size
        )

    def all_to_all(self, received, sent, label=""):
        def combine(inputs):
            parts = [flat.split(numels.tolist()) for flat, numels in inputs]
            return [[torch.cat([row[rank] for row in parts])] for rank in range(self.size)]

        return self._issue([sent.flat, torch.tensor(sent.numels)], [received.flat], combine)

    def reduce_scratch_bytes(self, full):
        return 0

    def _issue(self, inputs, outputs, combine):
        inputs = [tensor.detach() for tensor in inputs]
        outputs = [tensor.detach() for tensor in outputs]
        key = ((self._channel, self.members), self._calls)
        self._calls += 1
        exchange = self.world.exchange(key, self, (inputs, outputs), combine)
        # As NCCL's works do: what travels stays referenced until it is waited for.
        return _Work(exchange, self, outputs, inputs)


class LateCopies:
    """Lets the streams of the engine's copies between host and device lag behind by a sleep."""

    def __init__(self, monkeypatch, device, cycles=SLEEP_CYCLES):
        self.count = 0
        behind_compute = CopyStream.behind_compute

        @contextmanager
        def late(stream):
            with behind_compute(stream):
                self.count += 1
                sleep_on(device, cycles)
                yield

        monkeypatch.setattr(CopyStream, "behind_compute", late)


def poison(tensor):
    """Fill with NaN, or with the largest number there is."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def poison_buffers(monkeypatch):
    """Let flat buffers hold NaN when they get memory, and leave NaN when they give it back."""

    class PoisonedBuffer(FlatBuffer):
        def __init__(self, sizes, device, *, pin=False):
            super().__init__(sizes, device, pin=pin)
            self._poison()

        def allocate(self):
            new = not self.allocated
            super().allocate()
            if new:
                self._poison()

        def release(self):
            if self.allocated:
                self._poison()
            super().release()

        @torch.no_grad()
        def _poison(self):
            for flat in self.flats:
                poison(flat)

    monkeypatch.setattr(full_parameters, "FlatBuffer", PoisonedBuffer)
    monkeypatch.setattr(gradients, "FlatBuffer", PoisonedBuffer)


def _sum(column):
    total = torch.empty_like(column[0])
    rank_order_sum(column, total)
    return total


def _safe(tensor, outputs):
    storages = {output.untyped_storage().data_ptr() for output in outputs}
    return tensor.clone() if tensor.untyped_storage().data_ptr() in storages else tensor
