# SPDX-License-Identifier: Apache-2.0
"""Order and time on a device: its streams and events, or nothing and the host's clock on a CPU.

A collective issued with ``async_op=True`` runs on the communicator's stream behind what the current
stream has been given so far, and ``wait()`` puts the current stream behind the collective. Buffers
are allocated and released on the compute stream. So nothing outlives its owner, and no buffer needs
``record_stream``. The engine's own streams are for copies between host and device.

[Note: Whose memory]
The allocator gives what was freed to the stream that had taken it, in that stream's order alone.
That is not always the stream that used it last: gathers may begin early, on a stream of their own,
and a model may run parts of itself on streams of its own, where backward follows. So a unit knows
the streams that its memory came from and those that waited for it. Before the memory goes back, it
puts the current one behind them, and them behind the current one; and it puts the current one
behind those on which its gradients were made.

[Note: Other accelerators]
The streams are those of the module that torch has for the kind of device (``torch.cuda``,
``torch.xpu``, ``torch.npu`` of its plugin, ...), which have the same names everywhere. A device
whose module has none (``torch.mps``) runs everything but offload: a copy that leaves it would have
nobody to say when it has arrived.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

Direction = Literal["to the device", "to the host"]

# One stream for each way: a device has one copy engine for it, and what the allocator caches for a
# stream no other stream gets.
_streams: dict[tuple[torch.device, Direction], Any] = {}
try:
    _raw_stream: Any = torch._C._cuda_getCurrentRawStream
except AttributeError:  # not a build for CUDA
    _raw_stream = None


def has_streams(device: torch.device) -> bool:
    """True if copies can run beside computation on ``device``. See [Note: Other accelerators]."""
    if device.type in ("cpu", "meta"):
        return False
    module = torch.get_device_module(device)
    return all(hasattr(module, name) for name in ("Stream", "stream", "current_stream"))


def _stream_for(device: torch.device, direction: Direction) -> Any:
    key = device, direction
    if key not in _streams:
        _streams[key] = torch.get_device_module(device).Stream(device)
    return _streams[key]


class CopyStream:
    """One unit's copies in one direction, beside the compute stream; on a CPU, no stream."""

    def __init__(self, device: torch.device, direction: Direction):
        self._device = device
        self._module = torch.get_device_module(device) if has_streams(device) else None
        self._direction = direction
        self.last: Any = None  # an event behind what was issued last, until the host has waited

    @contextmanager
    def behind_compute(self) -> Iterator[None]:
        """Issue copies within; they start when the compute stream gets here, and run beside it."""
        if self._module is None:
            yield
            return
        stream = _stream_for(self._device, self._direction)
        stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(stream):
            try:
                yield
            finally:
                self.last = stream.record_event()

    def join(self) -> None:
        """Put the compute stream behind what was issued last."""
        if self.last is not None:
            assert self._module is not None
            self.last.wait(self._module.current_stream(self._device))

    def follow(self) -> None:
        """Put what is issued next behind the compute stream, which has used memory of copies."""
        if self._module is not None:
            stream = _stream_for(self._device, self._direction)
            stream.wait_stream(self._module.current_stream(self._device))

    def synchronize(self) -> None:
        """Hold up the host until all that was issued is done."""
        if self.last is not None:
            self.last.synchronize()
            self.last = None


@dataclass(frozen=True)
class CopiesUnderWay:
    """Copies between host and device, for any thread to ask after."""

    device: torch.device
    events: Sequence[Any]

    def are_done(self) -> bool:
        """Return True if they are. A thread that is new makes no context on the first device."""
        if self.device.index is not None:
            torch.get_device_module(self.device).set_device(self.device)
        return all(event.query() for event in self.events)


class EarlyStream:
    """The stream from which gathers are issued that must not wait for queued computation.

    Their memory is of this stream, too. What they read was there when `begin` was called last. Each
    model has one of its own: threads that train two would give each other memory that the first has
    freed before its stream is told so.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._begun: Any = None

    def begin(self) -> None:
        """Note that what the compute stream has been given so far comes before gathers."""
        self._begun = self._module.current_stream(self._device).record_event()

    @contextmanager
    def beside_compute(self) -> Iterator[None]:
        """Issue gathers within; they start behind what came before `begin`."""
        self._stream.wait_event(self._begun)
        with self._module.stream(self._stream):
            yield


class Lenders:
    """The streams whose memory a unit has. See [Note: Whose memory]."""

    def __init__(self, device: torch.device):
        self._device = device
        self._module = torch.get_device_module(device)
        self._streams: dict[Any, Any] = {}  # by what tells them apart

    @classmethod
    def on(cls, device: torch.device) -> "Lenders | None":
        """Return those of a unit that computes on ``device``; None where there are no streams."""
        return cls(device) if has_streams(device) else None

    def _key(self) -> Any:
        if self._device.type == "cuda" and _raw_stream is not None:
            return _raw_stream(self._device.index or 0)  # twenty times faster than a Stream
        return self._module.current_stream(self._device)

    def lend(self) -> None:
        """Note that memory is taken on the current stream."""
        if (key := self._key()) not in self._streams:
            self._streams[key] = self._module.current_stream(self._device)

    def follow(self) -> None:
        """Put all behind what the current stream, which lends too, has been given so far."""
        if self._are_several():
            current = self._streams[key := self._key()]
            for other, stream in self._streams.items():
                if other != key:
                    stream.wait_stream(current)

    def join(self) -> None:
        """Put the current stream, which lends too, behind what all have been given so far."""
        if self._are_several():
            current = self._streams[key := self._key()]
            for other, stream in self._streams.items():
                if other != key:
                    current.wait_stream(stream)

    def meet(self) -> None:
        """`join` if others lend and the current stream does not: no gather's end has put it."""
        if self._streams and self._key() not in self._streams:
            self.join()

    def _are_several(self) -> bool:
        self.lend()
        return len(self._streams) > 1

    def forget(self) -> None:
        """Note that everything has been given back."""
        self._streams.clear()


class DeviceClock:
    """Marks moments without holding up the device; reads them when asked, later."""

    def __init__(self, device: torch.device):
        self._device = device
        self.on_host: bool = device.type != "cuda"
        self.start: float | torch.cuda.Event = self.mark()

    def mark(self) -> "float | torch.cuda.Event":
        """Mark a moment: now on the host, or when the current CUDA stream gets here."""
        if self.on_host:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def elapsed_s(
        self, begin: "float | torch.cuda.Event", end: "float | torch.cuda.Event"
    ) -> float:
        """Return the seconds from one mark to another; on CUDA this waits for the later one."""
        if isinstance(begin, float) and isinstance(end, float):
            return end - begin
        assert not isinstance(begin, float)
        assert not isinstance(end, float)
        begin.synchronize()  # the two may have been marked on different streams
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
