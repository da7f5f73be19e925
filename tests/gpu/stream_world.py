# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads on one device whose collectives are as late as those of a network.

Each rank computes on a CUDA stream of its own, as if it had a GPU of its own. A collective runs on
its communicator's stream, behind what all ranks had issued when they called it: its outputs are
filled with NaN, the stream sleeps, and only then are the inputs read and the outputs written. Who
reads a result before he has waited for it sees NaN, who changes or frees an input too early changes
the result. On a CPU outputs hold NaN until they are waited for.
"""

import time
from contextlib import contextmanager, nullcontext

import torch

from fullshard.testing import LocalComm, LocalWorld
from fullshard.torch.unit import full_parameters, gradients
from fullshard.torch.unit.buffers import FlatBuffer
from fullshard.torch.unit.streams import CopyStream

SLEEP_CYCLES = 5_000_000  # some milliseconds: far longer than a step of a small model computes


def sleep_on(device, cycles=SLEEP_CYCLES):
    """Keep the current stream busy."""
    if device.type == "cuda":
        torch.cuda._sleep(cycles)


@contextmanager
def own_stream(device, *, join=True):
    """Within, a new stream is the current one, behind the one before, which is behind it after.

    Without ``join`` only when the function that it yields is called.
    """
    if device.type != "cuda":
        yield lambda: None
        return
    before, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield lambda: before.wait_stream(stream)
    if join:
        before.wait_stream(stream)


class StreamWorld(LocalWorld):
    """``size`` ranks as threads. Those in ``careless`` do not wait for collectives."""

    def __init__(self, size, device, *, cycles=SLEEP_CYCLES):
        super().__init__(size, timeout_s=60.0)
        self.device, self.cycles = device, cycles
        self.careless = set()
        self.issued = 0
        self._streams = {}

    def run(self, body):
        """``body(comm)`` on every rank; the results in rank order, or the first failure."""

        def on_own_stream(comm):
            with own_stream(self.device):
                return body(StreamComm(self, comm.members, comm.rank))

        return super().run(on_own_stream)

    def exchange(self, key, comm, given, combine):
        """Hand in (inputs, outputs), wait for the other ranks' hosts, and get the `_Exchange`."""
        deadline = time.monotonic() + self.timeout_s
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
                    raise RuntimeError(f"rank {comm.rank} waited {self.timeout_s} s for others")
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
                    output.copy_(result.view_as(output))
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
            output.copy_(result.view_as(output))

    def is_completed(self):
        if self._exchange is None:
            return True
        return self._exchange.done is not None and self._exchange.done.query()


class StreamComm(LocalComm):
    """The `Comm` of one rank of a `StreamWorld`."""

    def subgroup(self, ranks):
        own = super().subgroup(ranks)
        return StreamComm(self.world, own.members, own.rank, own._number)

    def _copied(self, tensor):
        return tensor  # an exchange copies, on its own stream and when it is carried out

    def _issue(self, name, label, inputs, outputs, combine, alike=()):
        inputs = [tensor.detach() for tensor in inputs]
        outputs = [tensor.detach() for tensor in outputs]
        key = ((self._number, *self.members), self._calls)
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


def _safe(tensor, outputs):
    storages = {output.untyped_storage().data_ptr() for output in outputs}
    return tensor.clone() if tensor.untyped_storage().data_ptr() in storages else tensor
