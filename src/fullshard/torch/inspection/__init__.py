# SPDX-License-Identifier: Apache-2.0
"""Looks at a sharded model: what it holds, what it sends, what its steps do.

None of these functions changes the model; only `memory_of_ranks` is collective.
"""

from fullshard.core.trace import Trace
from fullshard.torch.inspection.describe import (
    DescribedParameter,
    DescribedUnit,
    Description,
    describe,
)
from fullshard.torch.inspection.memory import (
    Bytes,
    MemoryOfRank,
    MemoryOfRanks,
    MemorySummary,
    memory_of_rank,
    memory_of_ranks,
    memory_summary,
    resting_bytes,
)
from fullshard.torch.inspection.run_record import RunRecording, recording
from fullshard.torch.inspection.traffic import Communication, Counted, communication, tracing
from fullshard.torch.inspection.trainer_callback import RecordingCallback

RestingBytes = Bytes  # the name of earlier versions

__all__ = [
    "Bytes", "Communication", "Counted", "DescribedParameter", "DescribedUnit", "Description",
    "MemoryOfRank", "MemoryOfRanks", "MemorySummary", "RecordingCallback", "RestingBytes",
    "RunRecording", "Trace", "communication", "describe", "memory_of_rank", "memory_of_ranks",
    "memory_summary", "recording", "resting_bytes", "tracing",
]  # fmt: skip
