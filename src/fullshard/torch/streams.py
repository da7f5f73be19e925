# SPDX-License-Identifier: Apache-2.0
"""Time on a device: CUDA events in the stream's own time, or the host's clock on a CPU.

The engine needs no streams of its own for now: a collective issued with ``async_op=True`` runs on
the communicator's stream behind what the compute stream has been given so far, ``wait()`` puts the
compute stream behind the collective, and all buffers are allocated and released on the compute
stream. So nothing outlives its owner, and no buffer needs ``record_stream``.
"""

import time

import torch

__all__ = ["DeviceClock"]


class DeviceClock:
    """Marks moments without holding up the device; reads them when asked, later."""

    def __init__(self, device: torch.device):
        self._on_cuda = device.type == "cuda"
        self.start = self.mark()

    def mark(self) -> "float | torch.cuda.Event":
        """A moment: now on the host, or when the current CUDA stream gets here."""
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def elapsed_s(
        self, begin: "float | torch.cuda.Event", end: "float | torch.cuda.Event"
    ) -> float:
        """Seconds from one mark to another; on CUDA this waits for the later one."""
        if isinstance(begin, float) and isinstance(end, float):
            return end - begin
        assert not isinstance(begin, float)
        assert not isinstance(end, float)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
