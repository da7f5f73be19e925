# SPDX-License-Identifier: Apache-2.0
"""Show units by their names in torch.profiler: the gather, forward, backward and reduce of each."""

from typing import Any

import torch
from torch.autograd.profiler import record_function

__all__ = ["UnitMarks", "profiler_runs"]

profiler_runs = torch._C._autograd._profiler_enabled
"""True while a profiler runs. Ask this first: a mark costs more than the op it marks."""


class UnitMarks:
    """Marks the work of units as ranges in a profile."""

    def __init__(self) -> None:
        self.open: dict[tuple[str, Any], record_function] = {}

    def begin(self, what: str, unit: Any) -> None:
        """Open a range named after the unit and ``what`` it does."""
        if (what, unit) not in self.open:
            mark = record_function(f"fullshard: {what} {unit.name}")
            mark.__enter__()  # type: ignore[no-untyped-call]
            self.open[what, unit] = mark

    def end(self, what: str, unit: Any) -> None:
        """Close the range again, if it was opened."""
        mark = self.open.pop((what, unit), None)
        if mark is not None:
            mark.__exit__(None, None, None)

    def forget(self) -> None:
        """Close all ranges: the step that they belong to has failed."""
        for mark in self.open.values():
            mark.__exit__(None, None, None)
        self.open.clear()
