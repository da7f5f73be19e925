# SPDX-License-Identifier: Apache-2.0
"""How far are the planner's predictions from published measurements?

    python benchmarks/plan_accuracy.py CSV [CSV ...] [--rows] [--record] [--draw PICTURE.svg]

Each row is predicted from its configuration alone. For each group (a device of MosaicML's table,
a source of the other) and for all rows stand the mean and the median of the absolute error of
tokens/s, its bias (above 0: predicted too fast), the rows inside their interval, the share told
that would be (90%, or less where a factor of two is too narrow for so many), and where
memory was published its error and the rows inside its interval. Rows that cannot be predicted are
told with the reason. With --record the first row of each group is taken for the record of a
finished run, and corrects the prediction of the others. A last line counts runs that were out of
memory but were told to fit, and runs that were not but were told to be too large.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib import pyplot
from plan_rows import Row, read_rows

from fullshard.core.errors import FullshardError
from fullshard.plan.cluster.cluster import Device
from fullshard.plan.predict import Prediction, predict
from fullshard.plan.record import Record, corrected

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
        """True if the measured time lies in the interval."""
        measured_s = self.predicted.step_s * self.predicted.tokens_per_s / self.row.tokens
        interval = self.predicted.interval
        return interval.low_s <= measured_s <= interval.high_s

    @property
    def memory_covered(self) -> bool:
        """True if the published memory lies in its 90% interval, as far as it is comparable."""
        memory, (low, high) = self.predicted.memory, self.predicted.memory_interval
        other = memory.peak["context and nccl"]
        other += memory.peak["allocator slack"] if self.row.allocated else 0
        return low - other <= (self.row.memory_gib or 0.0) * GIB <= high - other

    @property
    def memory_error(self) -> float | None:
        """The predicted peak over the published one, less one; None without a published one."""
        row = self.row
        if row.memory_gib is None:
            return None
        memory = self.predicted.memory
        told = memory.allocated_bytes if row.allocated else memory.reserved_bytes
        return told / GIB / row.memory_gib - 1

    def __str__(self) -> str:
        mark = " " if self.covered else "*"
        return (
            f"{self.row.label[:66]:<66} {self.row.tokens:>9,.0f} "
            f"{self.predicted.tokens_per_s:>9,.0f} {self.error:>+7.1%}{mark}"
            + ("" if self.memory_error is None else f" {self.memory_error:>+7.1%}")
        )


def line_of(name: str, compared: Sequence[Compared]) -> str:
    errors = [each.error for each in compared]
    absolute = [abs(error) for error in errors]
    memory = [each.memory_error for each in compared if each.memory_error is not None]
    told = ""
    if memory:
        mean = statistics.fmean(map(abs, memory))
        told = f"  memory {mean:.1%} of {len(memory)}, bias {statistics.fmean(memory):+.1%}"
        measured = [each for each in compared if each.memory_error is not None]
        told += f", inside {sum(each.memory_covered for each in measured) / len(measured):.0%}"
    return (
        f"{name:<12} {len(errors):>4} rows  MAPE {statistics.fmean(absolute):>6.1%}  "
        f"median {statistics.median(absolute):>6.1%}  bias {statistics.fmean(errors):>+6.1%}  "
        f"inside {share_covered(compared):>4.0%} "
        f"(told {statistics.fmean(each.predicted.interval.share for each in compared):.0%}){told}"
    )


def share_covered(compared: Sequence[Compared]) -> float:
    return sum(each.covered for each in compared) / len(compared)


def predicted(row: Row, device: Device | None = None) -> Prediction | None:
    """The prediction of a row, on ``device`` if it is given; None, and told, if there is none."""
    cluster = row.cluster if device is None else replace(row.cluster, device=device)
    try:
        return predict(row.model, row.run, cluster)
    except FullshardError as error:
        print(f"not predicted: {row.label}: {error}")
        return None


def by_record(rows: Sequence[Row]) -> list[Compared]:
    """Each group's rows but the first, predicted by what the first reached on its device.

    A row that no such run can have reached is no record, and the next one is taken.
    """
    told: dict[str, Device] = {}
    compared = []
    for row in rows:
        device = row.cluster.device
        key = f"{row.group} {device.key}"
        if key not in told:
            reserved = row.memory_gib * GIB if row.memory_gib and not row.allocated else None
            try:
                record = Record(row.model, row.run, row.cluster, row.tokens, reserved)
                told[key] = corrected(record)
            except FullshardError as error:
                print(f"no record: {row.label}: {error}")
            continue
        found = predicted(row, told[key])
        compared += [] if found is None else [Compared(row, found)]
    return compared


def draw(compared: Sequence[Compared], path: Path) -> None:
    """Write a scatter picture: predicted over measured tokens/s of each row."""
    figure, axes = pyplot.subplots(figsize=(7, 7), layout="constrained")
    for number, group in enumerate(dict.fromkeys(each.row.group for each in compared)):
        members = [each for each in compared if each.row.group == group]
        measured = [each.row.tokens for each in members]
        told = [each.predicted.tokens_per_s for each in members]
        axes.plot(measured, told, "o^sDv"[number // 10 % 5], ms=4, label=group)  # ten colours each
    ends = axes.get_xlim()[0] * 0.9 + 100, axes.get_xlim()[1]
    for share, style in ((1.0, "-"), (0.8, ":"), (1.2, ":")):
        axes.plot(ends, [share * each for each in ends], style, color="grey", lw=1)
    axes.set(xscale="log", yscale="log", xlabel="measured", ylabel="predicted")
    axes.set_title("tokens/s of a device; dotted: 20% off", fontsize=10)
    figure.legend(fontsize=7, ncols=9, loc="outside lower center", frameon=False)
    figure.savefig(path, metadata={"Date": None})


def told_wrong(compared: Sequence[Compared], failed: Sequence[Row]) -> str:
    """Count what memory was told wrong about whether a run fits."""
    fits = [found.fits for row in failed if (found := predicted(row)) is not None]
    large = sum(not each.predicted.fits for each in compared)
    return (
        f"of {len(fits)} out of memory {sum(fits)} told to fit; "
        f"of {len(compared)} that fitted {large} told to be too large"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="CSV")
    parser.add_argument("--rows", action="store_true", help="print every row, * outside interval")
    parser.add_argument("--record", action="store_true", help="give the first row of each group")
    parser.add_argument("--draw", type=Path, metavar="PICTURE", help="predicted over measured")
    given = parser.parse_args()
    compared: list[Compared] = []
    skipped: list[str] = []
    failed: list[Row] = []
    for path in given.files:
        try:
            rows = read_rows(path, skipped, failed)
        except (FullshardError, OSError) as error:
            skipped.append(str(error))
            continue
        if given.record:
            compared += by_record(rows)
            continue
        for row in rows:
            found = predicted(row)
            compared += [] if found is None else [Compared(row, found)]
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
    if given.draw is not None:
        draw(compared, given.draw)
    print(told_wrong(compared, failed))
    absolute = [abs(each.error) for each in compared]
    print(
        f"MAPE {statistics.fmean(absolute):.1%} median {statistics.median(absolute):.1%} "
        f"coverage {share_covered(compared):.0%} over {len(compared)} rows"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
