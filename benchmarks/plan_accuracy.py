# SPDX-License-Identifier: Apache-2.0
"""How far are the planner's predictions from published measurements?

    python benchmarks/plan_accuracy.py CSV [CSV ...] [--rows]

Each row is predicted from its configuration alone. For each group (a device of MosaicML's table,
a source of the other) and for all rows stand the mean and the median of the absolute error of
tokens/s, its bias (above 0: predicted too fast), the rows inside their 90% interval, and where
memory was published its error. Rows that cannot be predicted are told with the reason.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plan_fsdp2 import HeldByFSDP2
from plan_rows import Row, read_rows

from fullshard.core.errors import FullshardError
from fullshard.plan.memory import forecast_memory
from fullshard.plan.predict import Prediction, predict
from fullshard.plan.step.script import write_script

GIB = 2**30


@dataclass(frozen=True)
class Compared:
    """A row beside its prediction."""

    row: Row
    predicted: Prediction

    @property
    def error(self) -> float:
        """Of predicted tokens/s, as a share of what was measured; above 0 is too fast."""
        return self.predicted.tokens_per_s / self.row.tokens - 1

    @property
    def covered(self) -> bool:
        """True if the measured time lies in the 90% interval."""
        measured_s = self.predicted.step_s * self.predicted.tokens_per_s / self.row.tokens
        return self.predicted.low_s <= measured_s <= self.predicted.high_s

    @property
    def memory_error(self) -> float | None:
        """Of the predicted peak, as a share of the published one, with the engine's own buffers."""
        row = self.row
        if row.memory_gib is None:
            return None
        script = write_script(row.model, row.run, row.cluster)
        theirs = forecast_memory(
            script, row.model, row.run, row.cluster, held=HeldByFSDP2(script.units)
        )
        return theirs.reserved_bytes / GIB / row.memory_gib - 1

    def __str__(self) -> str:
        mark = " " if self.covered else "*"
        return (
            f"{self.row.label[:66]:<66} {self.row.tokens:>9,.0f} "
            f"{self.predicted.tokens_per_s:>9,.0f} {self.error:>+7.1%}{mark}"
        )


def line_of(name: str, compared: Sequence[Compared]) -> str:
    errors = [each.error for each in compared]
    absolute = [abs(error) for error in errors]
    memory = [abs(each.memory_error) for each in compared if each.memory_error is not None]
    told = f"  memory {statistics.fmean(memory):.1%} of {len(memory)}" if memory else ""
    return (
        f"{name:<12} {len(errors):>4} rows  MAPE {statistics.fmean(absolute):>6.1%}  "
        f"median {statistics.median(absolute):>6.1%}  bias {statistics.fmean(errors):>+6.1%}  "
        f"inside {share_covered(compared):>4.0%}{told}"
    )


def share_covered(compared: Sequence[Compared]) -> float:
    return sum(each.covered for each in compared) / len(compared)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="CSV")
    parser.add_argument("--rows", action="store_true", help="print every row, * outside interval")
    given = parser.parse_args()
    compared: list[Compared] = []
    skipped: list[str] = []
    for path in given.files:
        for row in read_rows(path, skipped):
            try:
                compared.append(Compared(row, predict(row.model, row.run, row.cluster)))
            except FullshardError as error:
                print(f"not predicted: {row.label}: {error}")
    for reason in skipped:
        print(f"left out: {reason}")
    if not compared:
        print("no row could be predicted", file=sys.stderr)
        return 1
    for group in dict.fromkeys(each.row.group for each in compared):
        members = [each for each in compared if each.row.group == group]
        if given.rows:
            print(*members, sep="\n")
        print(line_of(group, members))
    absolute = [abs(each.error) for each in compared]
    print(
        f"MAPE {statistics.fmean(absolute):.1%} median {statistics.median(absolute):.1%} "
        f"coverage {share_covered(compared):.0%} over {len(compared)} rows"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
