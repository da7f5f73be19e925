# SPDX-License-Identifier: Apache-2.0
"""Texts that a recorded run leaves when it fails: what is live when memory has run out."""

from collections.abc import Mapping

import torch

from fullshard.core.text import bytes_text, in_columns
from fullshard.report import MemoryByOwner

_NAMED = 8  # units


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if ``error`` says that a device or the host has no memory left."""
    alike = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return alike or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


def live_table(rank: int, memory: MemoryByOwner, units: Mapping[str, tuple[int, int]]) -> str:
    """Write what is live on ``rank``, with the units that hold most.

    What the error has passed through was freed by it. ``units`` has the bytes of full parameters
    and of full gradients by name.
    """
    owners = [
        ("parameters, sharded", memory.parameters_bytes),
        ("gradients, sharded", memory.gradients_bytes),
        ("optimizer state", memory.optimizer_bytes),
        ("full parameters of units", memory.gathered_bytes),
        ("full gradients of units", memory.gradient_buffers_bytes),
        ("activations and all else", memory.activations_bytes),
        ("together", memory.total_bytes),
        ("the most so far", memory.peak_bytes),
        ("there is", memory.limit_bytes),
    ]
    rows = [(name, bytes_text(size)) for name, size in owners if size is not None]
    live = in_columns([("live as the error came out", "bytes"), *rows], right=(1,))
    lines = [f"Out of memory on rank {rank}.", live]
    holding = sorted((u for u in units.items() if sum(u[1])), key=lambda u: -sum(u[1]))
    if holding:
        heads: list[tuple[object, ...]] = [("unit", "full parameters", "full gradients")]
        sizes = [(name, *map(bytes_text, held)) for name, held in holding[:_NAMED]]
        more = f"\n(and {len(holding) - _NAMED} more)" if len(holding) > _NAMED else ""
        lines.append(in_columns([*heads, *sizes], right=(1, 2)) + more)
    lines.append("What to change, in which order: fullshard plan, and the page Out of memory.")
    return "\n".join(lines)
