# SPDX-License-Identifier: Apache-2.0
"""What a model holds and sends."""

from fullshard.torch.inspection.describe import (
    DescribedParameter,
    DescribedUnit,
    Description,
    describe,
)
from fullshard.torch.inspection.memory import (
    MemoryOfRank,
    MemoryOfRanks,
    memory_of_rank,
    memory_of_ranks,
)
from fullshard.torch.inspection.memory_summary import (
    Bytes,
    MemorySummary,
    RestingBytes,
    memory_summary,
    resting_bytes,
)
from fullshard.torch.inspection.traffic import Communication, Counted, communication, tracing

__all__ = [
    "Bytes",
    "Communication",
    "Counted",
    "DescribedParameter",
    "DescribedUnit",
    "Description",
    "MemoryOfRank",
    "MemoryOfRanks",
    "MemorySummary",
    "RestingBytes",
    "communication",
    "describe",
    "memory_of_rank",
    "memory_of_ranks",
    "memory_summary",
    "resting_bytes",
    "tracing",
]
