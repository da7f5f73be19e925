# SPDX-License-Identifier: Apache-2.0
"""Fits the planner's constants to published measurements, and says how well they hold.

    python benchmarks/plan_fit.py CSV [CSV ...] [--unseen CSV ...] [--write]

One set of constants for all models and devices, near what physics lets expect: each constant has a
prior, which weighs as much as one row whose prediction is off by one prior deviation. Then each
source, device, size of model and length of sequences is left out of a fit in turn and predicted by
the others. The intervals' spread is that of the fitted rows; what another program than theirs adds
is the least with which 85% of the unseen rows are inside, each source weighing as much as another.
No constant is fitted to those. With --write
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
from fullshard.plan.step.clock import Step, replay
from fullshard.plan.step.interval import (
    Features,
    Unknown,
    by_distance,
    ends,
    extrapolated,
    features_of,
    unknowns,
)
from fullshard.plan.step.script import Script, write_script

TARGET = Path(__file__).parents[1] / "src/fullshard/plan/cluster/constants.toml"
NOISE = 0.05  # of the logarithm of a measured speed; beyond twice that a row counts less
COVERAGE = 0.92  # of the fitted rows
UNSEEN_COVERAGE = 0.85  # of sources that no constant is fitted to

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

    def log_error(self, constants: Constants) -> float:
        """The logarithm of predicted over measured speed by ``constants``."""
        return self._compare(self._step(constants))

    def error(self, constants: Constants) -> "Error":
        """Compare the prediction by ``constants`` with what was measured, and with its interval."""
        step = self._step(constants)
        return Error(self._compare(step), unknowns(step, self.memory_share))

    def _step(self, constants: Constants) -> Step:
        script, run, cluster = self.script, self.row.run, self.row.cluster
        return Step(script, run, cluster, constants, replay(script, run, cluster, constants))

    def _compare(self, step: Step) -> float:
        run = self.row.run
        tokens = run.micro_batch * run.sequence * run.accumulate
        return math.log(tokens / step.step_s / run.tensor_parallel / self.row.tokens)


class Error(NamedTuple):
    """The logarithm of predicted over measured speed, beside what an interval knows.

    ``far`` is the distance from the rows of the fit.
    """

    log: float
    unknown: Sequence[Unknown] = ()
    far: float = 0.0

    def inside(self, spread: float, program: float) -> bool:
        """True if the measured time lies in the interval."""
        end = by_distance(self.far, program)
        sooner, later = ends(spread, [*self.unknown, Unknown("program", end, end)])
        return -sooner <= self.log <= later


def tamed(errors: np.ndarray) -> np.ndarray:
    """Errors whose squares grow like themselves when they are large: outliers count less."""
    return np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))


def loss(rows: Sequence[Scripted], constants: Constants) -> float:
    """What a fit makes small: half the squares of rows' errors and of distances from priors."""
    errors = tamed(np.array([each.log_error(constants) for each in rows]) / NOISE)
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
        errors = np.array([each.log_error(constants) for each in rows]) / NOISE
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
    billions = 2 ** each.features.sizes[0] / 1e9
    return next((f"under {limit}B" for limit in (2, 5, 10, 20, 40) if billions < limit), "larger")


def _length(each: Scripted) -> str:
    tokens = round(2 ** each.features.sizes[1])
    limits = (1024, 2048, 4096, 8192, 32_768)
    return next((f"up to {limit}" for limit in limits if tokens <= limit), "longer")


GROUPS: dict[str, Callable[[Scripted], str]] = {
    "source": lambda each: each.row.group[:2] if each.row.group[:2].isupper() else "MosaicML",
    "device": lambda each: each.row.cluster.device.key,
    "size": _size,
    "length": _length,
}


def left_out(
    rows: Sequence[Scripted], group: Callable[[Scripted], str], near: Constants
) -> dict[str, list[float]]:
    """Errors of each group's rows by a fit to the rows of other groups."""
    found = {}
    for name in sorted({group(each) for each in rows}):
        constants = fit([each for each in rows if group(each) != name], near)
        found[name] = [each.log_error(constants) for each in rows if group(each) == name]
        print(f"left out {name}: {mape(found[name]):.1%}")
    return found


def mape(errors: Sequence[float]) -> float:
    """The mean of the absolute errors of speed, which are given as logarithms."""
    return statistics.fmean(abs(math.expm1(each)) for each in errors)


def spread_of(errors: Sequence[Error]) -> float:
    """The least spread with which intervals cover `COVERAGE` of the fitted rows."""
    tried = (number / 1000 for number in range(1, 1000))
    return next(each for each in tried if _share_inside(errors, each, 0.0) >= COVERAGE)


def program_of(sources: Sequence[Sequence[Error]], spread: float) -> float:
    """The least that another program adds to an end with which `UNSEEN_COVERAGE` are inside."""
    tried = (number / 100 for number in range(100))
    return next((each for each in tried if covered(sources, spread, each) >= UNSEEN_COVERAGE), 1.0)


def covered(sources: Sequence[Sequence[Error]], spread: float, program: float) -> float:
    """The share of rows inside, each source weighing as much as another."""
    return statistics.fmean(_share_inside(each, spread, program) for each in sources)


def by_source(
    unseen: Sequence[Scripted], fitted: Sequence[Features], constants: Constants
) -> list[list[Error]]:
    """The errors of rows to which no constant is fitted."""
    sources: dict[str, list[Error]] = {}
    for each in unseen:
        far, _ = extrapolated(each.features, fitted)
        found = each.error(constants)._replace(far=far)
        sources.setdefault(each.row.group, []).append(found)
    return list(sources.values())


def _share_inside(errors: Sequence[Error], spread: float, program: float) -> float:
    return sum(each.inside(spread, program) for each in errors) / len(errors)


def digest(paths: Sequence[Path]) -> dict[str, str]:
    """The SHA-256 of each file by its name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="CSV")
    parser.add_argument("--unseen", nargs="*", type=Path, default=[], metavar="CSV")
    parser.add_argument("--write", action="store_true", help="replace the package's constants")
    given = parser.parse_args()
    rows, unseen = (
        [Scripted.of(row) for path in paths for row in read_rows(path)]
        for paths in (given.files, given.unseen)
    )
    constants = fit(rows)
    errors = [each.log_error(constants) for each in rows]
    lines = [f"fit: {mape(errors):.1%} off"]
    for name, group in GROUPS.items():
        for left, found in left_out(rows, group, constants).items():
            lines.append(f"{name} left out, {left}: {len(found)} rows, {mape(found):.1%} off")
    seen = sorted({_rounded(each.features) for each in rows})
    text = written(constants, interval_of(rows, unseen, constants), seen)
    text += outcome(lines, len(rows), given.files, given.unseen)
    print(text)
    if given.write:
        TARGET.write_text(text, encoding="utf-8")
    return 0


def interval_of(
    rows: Sequence[Scripted], unseen: Sequence[Scripted], constants: Constants
) -> dict[str, float]:
    """The spread of the fitted rows, and what another program than theirs adds."""
    seen = sorted({_rounded(each.features) for each in rows})
    spread = spread_of([each.error(constants) for each in rows])
    return {"spread": spread, "program": program_of(by_source(unseen, seen, constants), spread)}


def _rounded(features: Features) -> Features:
    """To quarters of a doubling: rows that are near are one."""
    return features._replace(sizes=tuple(round(4 * size) / 4 for size in features.sizes))


def written(constants: Constants, interval: dict[str, float], seen: Sequence[Features]) -> str:
    """The file of constants."""
    runs: dict[str, list[list[float]]] = {}
    for each in seen:
        runs.setdefault(each.kind, []).append(list(each.sizes))
    return "\n".join(
        [
            "# SPDX-License-Identifier: Apache-2.0",
            "# Constants of the time model, one set for all devices, as benchmarks/plan_fit.py",
            "# printed them. fullshard.plan.cluster.cluster.Constants says what they mean.",
            "",
            "[constants]",
            *(f"{name} = {value:.6g}" for name, value in asdict(constants).items()),
            "",
            "[interval]",
            *(f"{name} = {value:.4f}" for name, value in interval.items()),
            "",
            "[interval.runs]  # parameters, sequence, tokens of a micro-batch as powers of 2",
            *(line for kind, sizes in runs.items() for line in _listed(kind, sizes)),
            "",
        ]
    )


def outcome(lines: Sequence[str], rows: int, files: Sequence[Path], unseen: Sequence[Path]) -> str:
    """The part of the file that says what the constants were fitted to and how well they hold."""
    text = [
        "",
        "[fit]",
        f"rows = {rows}",
        "outcome = [",
        *(f'    "{line}",' for line in lines),
        "]",
    ]
    for name, paths in (("sha256", files), ("unseen_sha256", unseen)):
        text += ["", f"[fit.{name}]"]
        text += [f'"{each}" = "{value}"' for each, value in digest(paths).items()]
    return "\n".join([*text, ""])


def _listed(kind: str, sizes: list[list[float]]) -> list[str]:
    rows = (sizes[start : start + 4] for start in range(0, len(sizes), 4))
    return [f'"{kind}" = [', *(f"    {', '.join(map(str, row))}," for row in rows), "]"]


if __name__ == "__main__":
    sys.exit(main())
