# SPDX-License-Identifier: Apache-2.0
"""Records of runs: the time and memory of each unit on each rank, and their files.

It loads without torch.
"""

from fullshard.report.files import RecordWriter, read_rank, read_run, record_path
from fullshard.report.record import (
    Attempt,
    Facts,
    MemoryByOwner,
    RankRecord,
    RecordedStep,
    RecordedUnit,
    RunRecord,
    TimedOp,
    TimedOps,
    TimedSpan,
    lane_of,
)

__all__ = [
    "Attempt",
    "Facts",
    "MemoryByOwner",
    "RankRecord",
    "RecordWriter",
    "RecordedStep",
    "RecordedUnit",
    "RunRecord",
    "TimedOp",
    "TimedOps",
    "TimedSpan",
    "lane_of",
    "read_rank",
    "read_run",
    "record_path",
]
