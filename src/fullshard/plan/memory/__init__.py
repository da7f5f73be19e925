# SPDX-License-Identifier: Apache-2.0
"""The device memory that a step holds: by category, over its lines, at its peak."""

from fullshard.plan.memory.forecast import (
    CATEGORIES,
    MemoryForecast,
    Sample,
    forecast_memory,
    memory_timeline,
)
from fullshard.plan.memory.resting import RestingMemory, resting_memory

__all__ = [
    "CATEGORIES", "MemoryForecast", "RestingMemory", "Sample", "forecast_memory", "memory_timeline",
    "resting_memory",
]  # fmt: skip
