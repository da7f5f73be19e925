# SPDX-License-Identifier: Apache-2.0
"""Fits the planner's constants to published measurements, and says how well they hold.

    python benchmarks/plan_fit.py CSV [CSV ...] [--write]

One set of constants for all models and devices, near what physics lets expect: each constant has a
prior, which weighs as much as one row whose prediction is off by one prior deviation. Then each
model, each device and each source is left out of a fit in turn and predicted by the others; the
intervals' spread comes from those predictions. With --write the constants, the digest of the rows
and the outcome replace src/fullshard/plan/cluster/constants.toml.
"""

import argparse
import hashlib
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from plan_rows import Row, read_rows
from scipy.optimize import least_squares

from fullshard.plan.cluster.cluster import Constants
from fullshard.plan.memory import forecast_memory
from fullshard.plan.step.clock import replay
from fullshard.plan.step.interval import half_width, unknowns
from fullshard.plan.step.script import Script, write_script

TARGET = Path(__file__).parents[1] / "src/fullshard/plan/cluster/constants.toml"
NOISE = 0.05  # of the logarithm of a measured speed; beyond twice that a row counts less
COVERAGE = 0.9

# What to expect before looking at the rows: mean, deviation, least, most.
PRIORS: dict[str, tuple[float, float, float, float]] = {
    "matmul_share": (0.92, 0.05, 0.5, 1.1),
    "matmul_ramp": (300.0, 200.0, 0.0, 1500.0),
    "attention_share": (1.0, 0.1, 0.3, 1.5),
    "memory_share": (0.80, 0.06, 0.4, 0.95),
    "inside_share": (0.75, 0.1, 0.2, 0.95),
    "between_share": (0.65, 0.1, 0.2, 0.95),
    "contention": (0.15, 0.1, 0.0, 0.8),
    "kernel_s": (6e-6, 3e-6, 1e-6, 20e-6),
    "step_s": (0.015, 0.015, 0.0, 0.1),
    "straggle_s": (0.006, 0.004, 0.0, 0.03),
    "straggle_share": (0.004, 0.003, 0.0, 0.03),
}


@dataclass(frozen=True)
class Scripted:
    """A row with the script of its step, which does not depend on the constants."""

    row: Row
    script: Script
    memory_share: float

    @classmethod
    def of(cls, row: Row) -> "Scripted":
        script = write_script(row.model, row.run, row.cluster)
        memory = forecast_memory(script, row.model, row.run, row.cluster)
        return cls(row, script, memory.peak_bytes / row.cluster.device.memory_bytes)

    def error(self, constants: Constants) -> tuple[float, float]:
        """The logarithm of predicted over measured speed, and the interval's part of unknowns."""
        row = self.row
        timeline = replay(self.script, row.run, row.cluster, constants)
        tokens = row.run.micro_batch * row.run.sequence * row.run.accumulate
        speed = tokens / timeline.step_s / row.run.tensor_parallel
        found = unknowns(timeline, row.run, row.cluster, self.memory_share)
        return math.log(speed / row.tokens), half_width(0.0, found)


def tamed(errors: np.ndarray) -> np.ndarray:
    """Errors whose squares grow like themselves when they are large: outliers count less."""
    return np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))


def loss(rows: Sequence[Scripted], constants: Constants) -> float:
    """What a fit makes small: half the squares of rows' errors and of distances from priors."""
    errors = tamed(np.array([each.error(constants)[0] for each in rows]) / NOISE)
    away = [
        (getattr(constants, name) - mean) / deviation
        for name, (mean, deviation, _, _) in PRIORS.items()
    ]
    return float(np.sum(errors**2) + np.sum(np.square(away))) / 2


def fit(rows: Sequence[Scripted]) -> Constants:
    """The constants that fit ``rows`` best, with their priors."""
    names = [field.name for field in fields(Constants)]
    mean, deviation, least, most = (
        np.array(each) for each in zip(*(PRIORS[name] for name in names), strict=True)
    )

    def residuals(at: np.ndarray) -> np.ndarray:
        constants = Constants(*(mean + (at - 1) * deviation))
        errors = np.array([each.error(constants)[0] for each in rows]) / NOISE
        return np.concatenate([tamed(errors), at - 1])

    bounds = 1 + (least - mean) / deviation, 1 + (most - mean) / deviation
    found = least_squares(
        residuals, np.ones(len(names)), bounds=bounds, diff_step=3e-3, max_nfev=30
    )
    return Constants(*(float(each) for each in mean + (found.x - 1) * deviation))


def leave_out(rows: Sequence[Scripted], group: Callable[[Row], str]) -> list[tuple[float, float]]:
    """Errors of all rows, each by a fit to the rows of other groups."""
    errors: dict[int, tuple[float, float]] = {}
    for name in sorted({group(each.row) for each in rows}):
        constants = fit([each for each in rows if group(each.row) != name])
        for number, each in enumerate(rows):
            if group(each.row) == name:
                errors[number] = each.error(constants)
    return [errors[number] for number in range(len(rows))]


def spread_of(errors: Sequence[tuple[float, float]]) -> float:
    """The least spread with which intervals cover `COVERAGE` of the errors."""
    needed = [max(0.0, error**2 - known**2) for error, known in errors]
    place = math.ceil(COVERAGE * len(needed)) - 1
    return math.sqrt(sorted(needed)[place])


def digest(paths: Sequence[Path]) -> dict[str, str]:
    """The SHA-256 of each file by its name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def summary(errors: Sequence[tuple[float, float]], rows: Sequence[Scripted], source: str) -> str:
    """MAPE and median of the rows of one file."""
    wanted = [
        abs(math.expm1(error))
        for (error, _), each in zip(errors, rows, strict=True)
        if each.row.source == source
    ]
    return (
        f"MAPE {100 * statistics.fmean(wanted):.2f}% median {100 * statistics.median(wanted):.2f}%"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="CSV")
    parser.add_argument("--write", action="store_true", help="replace the package's constants")
    given = parser.parse_args()
    rows = [Scripted.of(row) for path in given.files for row in read_rows(path)]
    constants = fit(rows)
    outcomes = {
        "fit": [each.error(constants) for each in rows],
        "model left out": leave_out(rows, lambda row: row.model.name),
        "device left out": leave_out(rows, lambda row: row.cluster.device.key),
        "source left out": leave_out(rows, lambda row: row.group[:2]),
    }
    lines = [
        f"{path.name}, {name}: {summary(errors, rows, path.name)}"
        for path in given.files
        for name, errors in outcomes.items()
    ]
    spread = spread_of(outcomes["model left out"] + outcomes["device left out"])
    text = written(constants, spread, digest(given.files), len(rows), lines)
    print(text)
    if given.write:
        TARGET.write_text(text, encoding="utf-8")
    return 0


def written(
    constants: Constants, spread: float, files: dict[str, str], rows: int, lines: Sequence[str]
) -> str:
    """The file of constants, with what they were fitted to and how well they hold."""
    text = [
        "# SPDX-License-Identifier: Apache-2.0",
        "# Constants of the time model, one set for all devices, as benchmarks/plan_fit.py printed",
        "# them for the files below. fullshard.plan.cluster.read.Constants tells what they mean.",
        "",
        "[constants]",
        *(f"{name} = {value:.6g}" for name, value in asdict(constants).items()),
        "",
        "[interval]",
        f"spread = {spread:.4f}",
        "",
        "[fit]",
        f"rows = {rows}",
        "outcome = [",
        *(f'    "{line}",' for line in lines),
        "]",
        "",
        "[fit.sha256]",
        *(f'"{name}" = "{value}"' for name, value in files.items()),
        "",
    ]
    return "\n".join(text)


if __name__ == "__main__":
    sys.exit(main())
