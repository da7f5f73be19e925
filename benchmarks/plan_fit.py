# SPDX-License-Identifier: Apache-2.0
"""Fits the planner's constants to published measurements, and says how well they hold.

    python benchmarks/plan_fit.py CSV [CSV ...] [--write]

One set of constants for all models and devices, near what physics lets expect: each constant has a
prior, which weighs as much as one row whose prediction is off by one prior deviation. Then each
source, device, size of model and length of sequences is left out of a fit in turn and predicted by
the others. The intervals' spread is that of the fitted rows; what they grow by with the distance
from fitted rows is the least with which 85% of each left-out group are inside. With --write
the constants, the digest of the rows and the outcome replace
src/fullshard/plan/cluster/constants.toml.
"""

import argparse
import hashlib
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
from plan_rows import Row, read_rows
from scipy.optimize import least_squares

from fullshard.plan.cluster.cluster import Constants
from fullshard.plan.memory import forecast_memory
from fullshard.plan.step.clock import replay
from fullshard.plan.step.interval import (
    Features,
    extrapolated,
    features_of,
    half_width,
    later,
    uncertain,
    unknowns,
)
from fullshard.plan.step.script import Script, write_script

TARGET = Path(__file__).parents[1] / "src/fullshard/plan/cluster/constants.toml"
NOISE = 0.05  # of the logarithm of a measured speed; beyond twice that a row counts less
COVERAGE = 0.92  # of the fitted rows
LEFT_OUT_COVERAGE = 0.85  # of a group that was left out, if it has at least
LEAST_ROWS = 5

# What to expect before looking at the rows: mean, deviation, least, most.
PRIORS: dict[str, tuple[float, float, float, float]] = {
    "matmul_share": (0.92, 0.05, 0.5, 1.1),
    "matmul_ramp": (300.0, 200.0, 0.0, 1500.0),
    "attention_share": (1.0, 0.1, 0.3, 1.5),
    "memory_share": (0.80, 0.06, 0.4, 0.95),
    "inside_share": (0.75, 0.1, 0.2, 0.95),
    "between_share": (0.65, 0.1, 0.2, 0.95),
    "contention": (0.15, 0.1, 0.0, 0.8),
    "kernel_s": (15e-6, 10e-6, 1e-6, 60e-6),
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
    features: Features

    @classmethod
    def of(cls, row: Row) -> "Scripted":
        script = write_script(row.model, row.run, row.cluster)
        memory = forecast_memory(script, row.model, row.run, row.cluster)
        share = memory.peak_bytes / row.cluster.device.memory_bytes
        features = features_of(script, row.run, row.cluster, row.model.context)
        return cls(row, script, share, features)

    def error(self, constants: Constants) -> "Error":
        """Compare the prediction by ``constants`` with what was measured."""
        row = self.row
        timeline = replay(self.script, row.run, row.cluster, constants)
        tokens = row.run.micro_batch * row.run.sequence * row.run.accumulate
        speed = tokens / timeline.step_s / row.run.tensor_parallel
        found = unknowns(timeline, row.run, row.cluster, self.memory_share)
        return Error(math.log(speed / row.tokens), half_width(0.0, found), later(found))


class Error(NamedTuple):
    """The logarithm of predicted over measured speed, beside what an interval knows.

    ``known`` is its part of unknowns, ``later`` the share of a step that these only ever add,
    ``far`` the distance from the rows of the fit.
    """

    log: float
    known: float
    later: float
    far: float = 0.0

    def inside(self, spread: float, away: float) -> bool:
        """True if the measured time lies in the interval."""
        share = uncertain(away, self.far)
        width = math.sqrt(spread**2 + self.known**2 + (1.645 * share) ** 2)
        return -width <= self.log <= math.log(math.exp(width) + self.later)


def tamed(errors: np.ndarray) -> np.ndarray:
    """Errors whose squares grow like themselves when they are large: outliers count less."""
    return np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))


def loss(rows: Sequence[Scripted], constants: Constants) -> float:
    """What a fit makes small: half the squares of rows' errors and of distances from priors."""
    errors = tamed(np.array([each.error(constants).log for each in rows]) / NOISE)
    away = [
        (getattr(constants, name) - mean) / deviation
        for name, (mean, deviation, _, _) in PRIORS.items()
    ]
    return float(np.sum(errors**2) + np.sum(np.square(away))) / 2


def fit(rows: Sequence[Scripted], near: Constants | None = None) -> Constants:
    """The constants that fit ``rows`` best, with their priors; ``near`` is where to begin."""
    names = [field.name for field in fields(Constants)]
    mean, deviation, least, most = (
        np.array(each) for each in zip(*(PRIORS[name] for name in names), strict=True)
    )

    def residuals(at: np.ndarray) -> np.ndarray:
        constants = Constants(*(mean + at * deviation))
        errors = np.array([each.error(constants).log for each in rows]) / NOISE
        return np.concatenate([tamed(errors), at])

    bounds = (least - mean) / deviation, (most - mean) / deviation
    start = np.zeros(len(names))
    if near is not None:
        start = (np.array(list(asdict(near).values())) - mean) / deviation
    found = least_squares(
        residuals,
        np.clip(start, bounds[0] + 1e-6, bounds[1] - 1e-6),
        bounds=bounds,
        diff_step=3e-3,
        x_scale=1.0,
        max_nfev=30 if near is None else 6,
    )
    return Constants(*(float(each) for each in mean + found.x * deviation))


def _size(each: Scripted) -> str:
    billions = 2**each.features.parameters / 1e9
    return next((f"under {limit}B" for limit in (2, 5, 10, 20, 40) if billions < limit), "larger")


def _length(each: Scripted) -> str:
    tokens = round(2**each.features.sequence)
    limits = (1024, 2048, 4096, 8192, 32_768)
    return next((f"up to {limit}" for limit in limits if tokens <= limit), "longer")


GROUPS: dict[str, Callable[[Scripted], str]] = {
    "source": lambda each: each.row.group[:2] if each.row.group[:2].isupper() else "MosaicML",
    "device": lambda each: each.row.cluster.device.key,
    "size": _size,
    "length": _length,
}


def leave_out(
    rows: Sequence[Scripted], group: Callable[[Scripted], str], near: Constants
) -> list[tuple[str, Error]]:
    """Errors of all rows beside their group, each by a fit to the rows of other groups."""
    errors: dict[int, tuple[str, Error]] = {}
    for name in sorted({group(each) for each in rows}):
        others = [each for each in rows if group(each) != name]
        constants = fit(others, near)
        fitted = [each.features for each in others]
        for number, each in enumerate(rows):
            if group(each) == name:
                far, _ = extrapolated(each.features, fitted)
                errors[number] = name, each.error(constants)._replace(far=far)
        print(f"left out {name}: {mape([e for n, e in errors.values() if n == name]):.1%}")
    return [errors[number] for number in range(len(rows))]


def mape(errors: Sequence[Error]) -> float:
    """The mean of the absolute errors of speed."""
    return statistics.fmean(abs(math.expm1(each.log)) for each in errors)


def spread_of(errors: Sequence[Error]) -> float:
    """The least spread with which intervals cover `COVERAGE` of the fitted rows."""
    tried = (number / 1000 for number in range(1, 1000))
    inside = (each for each in tried if _share_inside(errors, each, 0.0) >= COVERAGE)
    return next(inside)


def away_of(left_out: Sequence[Sequence[tuple[str, Error]]], spread: float) -> float:
    """The least uncertainty of a distance of 1 with which left-out groups are inside."""
    groups = [
        [error for name, error in errors if name == wanted]
        for errors in left_out
        for wanted in sorted({name for name, _ in errors})
    ]
    large = [each for each in groups if len(each) >= LEAST_ROWS]
    tried = (number / 1000 for number in range(500))
    return next(
        away
        for away in tried
        if all(_share_inside(each, spread, away) >= LEFT_OUT_COVERAGE for each in large)
    )


def _share_inside(errors: Sequence[Error], spread: float, away: float) -> float:
    return sum(each.inside(spread, away) for each in errors) / len(errors)


def digest(paths: Sequence[Path]) -> dict[str, str]:
    """The SHA-256 of each file by its name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="CSV")
    parser.add_argument("--write", action="store_true", help="replace the package's constants")
    given = parser.parse_args()
    rows = [Scripted.of(row) for path in given.files for row in read_rows(path)]
    constants = fit(rows)
    fitted = [each.error(constants) for each in rows]
    left = {name: leave_out(rows, group, constants) for name, group in GROUPS.items()}
    spread = spread_of(fitted)
    away = away_of(list(left.values()), spread)
    lines = [f"fit: {mape(fitted):.1%} off, {_share_inside(fitted, spread, away):.0%} inside"]
    for name, errors in left.items():
        for group in sorted({each for each, _ in errors}):
            those = [error for each, error in errors if each == group]
            lines.append(
                f"{name} left out, {group}: {len(those)} rows, {mape(those):.1%} off, "
                f"{_share_inside(those, spread, away):.0%} inside"
            )
    seen = sorted({_rounded(each.features) for each in rows})
    text = written(constants, (spread, away, seen), digest(given.files), len(rows), lines)
    print(text)
    if given.write:
        TARGET.write_text(text, encoding="utf-8")
    return 0


def _rounded(features: Features) -> Features:
    """To quarters of a doubling: rows that are near are one."""
    sizes = (round(4 * size) / 4 for size in features[1:4])
    return Features(features.device, *sizes, *features[4:])


def written(
    constants: Constants,
    interval: tuple[float, float, Sequence[Features]],
    files: dict[str, str],
    rows: int,
    lines: Sequence[str],
) -> str:
    """The file of constants, with what they were fitted to and how well they hold."""
    runs: dict[str, list[list[float]]] = {}
    for each in interval[2]:
        runs.setdefault(each.kind, []).append(list(each[1:4]))
    text = [
        "# SPDX-License-Identifier: Apache-2.0",
        "# Constants of the time model, one set for all devices, as benchmarks/plan_fit.py printed",
        "# them for the files below. fullshard.plan.cluster.cluster.Constants says what they mean.",
        "",
        "[constants]",
        *(f"{name} = {value:.6g}" for name, value in asdict(constants).items()),
        "",
        "[interval]",
        f"spread = {interval[0]:.4f}",
        f"away = {interval[1]:.4f}",
        "",
        "[interval.runs]  # parameters, sequence, tokens of a micro-batch as powers of 2, by kind",
        *(line for kind, sizes in runs.items() for line in _listed(kind, sizes)),
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


def _listed(kind: str, sizes: list[list[float]]) -> list[str]:
    rows = (sizes[start : start + 4] for start in range(0, len(sizes), 4))
    return [f'"{kind}" = [', *(f"    {', '.join(map(str, row))}," for row in rows), "]"]


if __name__ == "__main__":
    sys.exit(main())
