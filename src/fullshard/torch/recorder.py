# SPDX-License-Identifier: Apache-2.0
"""Measures ops as they are carried out and gives them as a `fullshard.core.trace.Trace`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fullshard.core.trace import Trace, TraceRecord
from fullshard.torch.streams import DeviceClock

if TYPE_CHECKING:
    from fullshard.torch.unit import Unit

__all__ = ["TraceRecorder"]


class TraceRecorder:
    """Collects ops with marks of the device's clock; `fill` turns the marks into seconds."""

    def __init__(self, device: torch.device):
        self._clock = DeviceClock(device)
        self._notes: list[tuple[str, str, Any, int, int]] = []

    def note(self, op: str, unit: "Unit", live_bytes: Callable[[], int]) -> None:
        """One op on ``unit`` has just been issued."""
        size = unit.layout.full_bytes
        if op in ("fill", "reduce", "await_reduce"):
            size = unit.layout.grad_full_bytes
        self._notes.append((op, unit.name, self._clock.mark(), size, live_bytes()))

    def fill(self, trace: Trace) -> None:
        """Append what was recorded to ``trace``, in order."""
        for op, unit, mark, size, live in self._notes:
            at_s = self._clock.elapsed_s(self._clock.start, mark)
            trace.records.append(TraceRecord(op, unit, at_s, size, live))
        self._notes.clear()
