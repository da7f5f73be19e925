# SPDX-License-Identifier: Apache-2.0
"""Records of runs: the time and memory of each unit on each rank, and their files.

It loads without torch, which `recording` brings along when it is called.
"""

import importlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fullshard.report.files import RecordWriter, read_rank, read_run, record_path
from fullshard.report.record import (
    AWAITED,
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
)
from fullshard.report.trace_events import write_trace_events

__all__ = [
    "AWAITED", "Attempt", "Facts", "MemoryByOwner", "RankRecord", "RecordWriter", "RecordedStep",
    "RecordedUnit", "RunRecord", "TimedOp", "TimedOps", "TimedSpan", "read_rank", "read_run",
    "record_path", "recording", "write_report", "write_trace_events",
]  # fmt: skip


def write_report(folder: str | Path) -> tuple[str, Path | None]:
    """Write the page of a run as ``report.html`` into its folder; return its verdict, and the path.

    The path is None where the extra ``report`` is not installed. Raises `ConfigurationError` for a
    folder without a record, or one without steps.
    """
    report = importlib.import_module("fullshard.report.summary").report_of(folder)
    try:
        page = importlib.import_module("fullshard.report.page")
    except ModuleNotFoundError:
        return report.verdict, None
    page.write_page(report, path := Path(folder) / "report.html")
    return report.verdict, path


def recording(
    folder: str | Path, model: Any, optimizer: Any = None, **options: Any
) -> AbstractContextManager[Any]:
    """Record within what the steps of ``model`` do; see `fullshard.torch.recording`."""
    engine = importlib.import_module("fullshard.torch.inspection.run_record")
    recorded: AbstractContextManager[Any] = engine.recording(folder, model, optimizer, **options)
    return recorded
