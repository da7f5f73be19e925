# SPDX-License-Identifier: Apache-2.0
"""Fits the planner's constants to published measurements, and says how well they hold.

    python benchmarks/plan_fit.py CSV [CSV ...] [--others CSV ...] [--sources] [--write]

One set of constants for all models and devices, near what physics lets expect: each constant has a
prior, which weighs as much as one row whose prediction is off by one prior deviation. The files
are rows at home, of which all that matters is told; others are rows of further sources, but for
`NEVER` fitted. A row counts the less the more an interval says is unknown of it, and no source
counts for more than `MOST_ROWS` rows. Then each source, device, size of model and length of
sequences is left out of a fit in turn and predicted by the others. The intervals' spread is that
of the rows at home; what another program than theirs adds is the least with which 85% of the rows
of others are inside when their source is left out, each source weighing as much as another.
With --sources a table says for each source, left out of constants and intervals, how far its
rows are off. With --write the constants, the digest of the rows and the outcome replace
src/fullshard/plan/cluster/constants.toml.
"""

import argparse
import hashlib
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from plan_rows import Row, read_rows

from fullshard.plan.cluster.cluster import Constants
from fullshard.plan.memory import MemoryForecast, forecast_memory
from fullshard.plan.step.clock import Step, replay
from fullshard.plan.step.interval import (
    Features,
    Program,
    Unknown,
    cut,
    ends,
    extrapolated,
    features_of,
    unknowns,
)
from fullshard.plan.step.script import Script, write_script

TARGET = Path(__file__).parents[1] / "src/fullshard/plan/cluster/constants.toml"
NOISE = 0.05  # of the logarithm of a measured speed; beyond twice that a row counts less
COVERAGE = 0.92  # of the rows at home
UNSEEN_COVERAGE = 0.87  # of sources that are left out: a little more than 85% when all are joined

# What to expect before looking at the rows: mean, deviation, least, most.
PRIORS: dict[str, tuple[float, float, float, float]] = {
    "matmul_share": (0.92, 0.05, 0.5, 1.1),
    "matmul_ramp": (300.0, 200.0, 0.0, 1500.0),
    "attention_share": (1.0, 0.1, 0.3, 1.5),
    "memory_share": (0.80, 0.06, 0.4, 0.95),
    "inside_share": (0.78, 0.04, 0.2, 0.95),
    "between_share": (0.65, 0.1, 0.2, 0.95),
    "contention": (0.15, 0.1, 0.0, 0.8),
    "kernel_s": (15e-6, 10e-6, 1e-6, 60e-6),
    "step_s": (0.020, 0.006, 0.0, 0.1),
    "straggle_s": (0.006, 0.004, 0.0, 0.03),
    "straggle_share": (0.004, 0.003, 0.0, 0.03),
}


MOST_ROWS = 30  # that a source counts for
# Sources of which no row is ever fitted, nor an interval made: the first eight of all but those at
# home by the SHA-256 of their names. Trial fits of all rows came before the draw; none was kept.
NEVER = frozenset({"SW", "PT", "KF", "MB", "AW", "NA", "VL", "DL"})
_SAME = {"QF": "QW", "QZ": "QW", "TQ": "TT", "KM": "KF", "FX": "FA"}  # in two tables


def source_of(row: Row) -> str:
    """The source of a row: the first letters of its group, or MosaicML's own table."""
    letters = row.group[:2]
    return _SAME.get(letters, letters) if letters.isupper() else "MosaicML"


@dataclass(frozen=True)
class Scripted:
    """A row with the script of its step, which does not depend on the constants.

    ``noise`` is what may be off about it whatever the constants: `NOISE`, and what is unknown.
    """

    row: Row
    script: Script
    memory: MemoryForecast
    features: Features
    noise: float = NOISE

    @classmethod
    def of(cls, row: Row) -> "Scripted":
        script = write_script(row.model, row.run, row.cluster)
        memory = forecast_memory(script, row.model, row.run, row.cluster)
        made = cls(
            row, script, memory, features_of(script, row.run, row.cluster, row.model.context)
        )
        usual = Constants(**{name: mean for name, (mean, *_) in PRIORS.items()})
        sooner, later = ends(0.0, made.error(usual).unknown)
        return replace(made, noise=math.hypot(NOISE, (sooner + later) / 2 / 1.645))

    def log_error(self, constants: Constants) -> float:
        """The logarithm of predicted over measured speed by ``constants``."""
        return self._compare(self._step(constants))

    def error(self, constants: Constants) -> "Error":
        """Compare the prediction by ``constants`` with what was measured, and with its interval."""
        step = self._step(constants)
        share = self.memory.peak_bytes / self.row.cluster.device.memory_bytes
        return Error(self._compare(step), unknowns(step, share))

    def memory_error(self) -> float | None:
        """The predicted peak over the published one, less one; None without a published one."""
        if self.row.memory_gib is None:
            return None
        told = self.memory.allocated_bytes if self.row.allocated else self.memory.reserved_bytes
        return told / 2**30 / self.row.memory_gib - 1

    def _step(self, constants: Constants) -> Step:
        script, run, cluster = self.script, self.row.run, self.row.cluster
        return Step(script, run, cluster, constants, replay(script, run, cluster, constants))

    def _compare(self, step: Step) -> float:
        run = self.row.run
        tokens = run.micro_batch * run.sequence * run.accumulate
        return math.log(tokens / step.step_s / run.tensor_parallel / self.row.tokens)


class Error(NamedTuple):
    """The logarithm of predicted over measured speed, beside what an interval knows.

    ``far`` is the distance from the rows at home.
    """

    log: float
    unknown: Sequence[Unknown] = ()
    far: float = 0.0

    def ends(self, spread: float, program: Program) -> tuple[float, float]:
        """By how much the step may take less and more, as logarithms of its time."""
        return ends(spread, [*self.unknown, program.unknown("program", self.far)])

    def inside(self, spread: float, program: Program) -> bool:
        """True if the measured time lies in the 90% interval."""
        sooner, later = self.ends(spread, program)
        return -sooner <= self.log <= later


def counted(rows: Sequence[Scripted]) -> np.ndarray:
    """Return the weight of each row: below one where its source has more than `MOST_ROWS`."""
    sources = [source_of(each.row) for each in rows]
    counts = Counter(sources)
    return np.array([min(1.0, MOST_ROWS / counts[each]) for each in sources])


def tamed(errors: np.ndarray) -> np.ndarray:
    """Return squares of errors, tamed to grow linearly where they are large."""
    return 2 * (np.sqrt(1 + errors**2) - 1)


def loss(rows: Sequence[Scripted], constants: Constants) -> float:
    """Return what a fit makes small: half of squared errors of rows and distances from priors."""
    errors = np.array([each.log_error(constants) / each.noise for each in rows])
    away = [
        (getattr(constants, name) - mean) / deviation
        for name, (mean, deviation, _, _) in PRIORS.items()
    ]
    return float(np.sum(counted(rows) * tamed(errors)) + np.sum(np.square(away))) / 2


class Slopes(NamedTuple):
    """Errors of rows at some constants, and how they change with each constant.

    Constants are ``at`` prior deviations from their priors' means; ``errors`` are logarithms.
    """

    rows: Sequence[Scripted]
    at: np.ndarray
    errors: np.ndarray
    slopes: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Scripted], at: np.ndarray) -> "Slopes":
        def errors(moved: np.ndarray) -> np.ndarray:
            constants = constants_at(moved)
            return np.array([each.log_error(constants) for each in rows])

        here, step = errors(at), 0.05
        columns = [(errors(at + step * each) - here) / step for each in np.eye(len(at))]
        return cls(rows, at, here, np.stack(columns, 1))

    def best(self, kept: np.ndarray) -> np.ndarray:
        """Where the rows that are ``kept`` are least off, as far as slopes are straight."""
        noise = np.array([each.noise for each in self.rows])
        weighs = np.zeros(len(self.rows))
        weighs[kept] = counted([each for each, keep in zip(self.rows, kept, strict=True) if keep])
        at = self.at
        for _ in range(20):
            errors = self.moved(at)
            weights = weighs / noise**2 / np.sqrt(1 + (errors / noise) ** 2)
            weighed = self.slopes.T * weights
            wanted = weighed @ (self.slopes @ at - errors)
            at = _bounded(np.linalg.solve(weighed @ self.slopes + np.eye(len(at)), wanted))
        return at

    def moved(self, at: np.ndarray) -> np.ndarray:
        """The errors at other constants, as far as slopes are straight."""
        return self.errors + self.slopes @ (at - self.at)


def constants_at(at: np.ndarray) -> Constants:
    """Constants so many prior deviations from their priors' means."""
    mean, deviation, *_ = np.array(list(PRIORS.values())).T
    return Constants(*map(float, mean + at * deviation))


def deviations_of(constants: Constants) -> np.ndarray:
    """How many prior deviations constants are from their priors' means."""
    mean, deviation, *_ = np.array(list(PRIORS.values())).T
    return (np.array([getattr(constants, name) for name in PRIORS]) - mean) / deviation


def _bounded(at: np.ndarray) -> np.ndarray:
    mean, deviation, least, most = np.array(list(PRIORS.values())).T
    return np.clip(at, (least - mean) / deviation, (most - mean) / deviation)


def fit(rows: Sequence[Scripted]) -> Slopes:
    """The slopes at the constants that fit ``rows`` best, with their priors."""
    found = Slopes.of(rows, np.zeros(len(PRIORS)))
    for _ in range(8):
        at = found.best(np.ones(len(rows), bool))
        if np.max(np.abs(at - found.at)) < 0.02:
            break
        found = Slopes.of(rows, at)
    return found


def _size(each: Scripted) -> str:
    billions = 2 ** each.features.sizes[0] / 1e9
    return next((f"under {limit}B" for limit in (2, 5, 10, 20, 40) if billions < limit), "larger")


def _length(each: Scripted) -> str:
    tokens = round(2 ** each.features.sizes[1])
    limits = (1024, 2048, 4096, 8192, 32_768)
    return next((f"up to {limit}" for limit in limits if tokens <= limit), "longer")


GROUPS: dict[str, Callable[[Scripted], str]] = {
    "source": lambda each: source_of(each.row),
    "device": lambda each: each.row.cluster.device.key,
    "size": _size,
    "length": _length,
}


def left_out(found: Slopes, group: Callable[[Scripted], str]) -> dict[str, np.ndarray]:
    """Errors of each group's rows by a fit to the rows of other groups."""
    names = np.array([group(each) for each in found.rows])
    return {
        str(name): found.moved(found.best(names != name))[names == name]
        for name in np.unique(names)
    }


def mape(errors: Sequence[float]) -> float:
    """The mean of the absolute errors of speed, which are given as logarithms."""
    return statistics.fmean(abs(math.expm1(each)) for each in errors)


def spread_of(errors: Sequence[Error]) -> float:
    """The least spread with which intervals cover `COVERAGE` of the rows at home."""
    tried = (number / 1000 for number in range(1, 1000))
    nothing = Program(0.0, 0.0)
    return next(each for each in tried if covered([errors], each, nothing) >= COVERAGE)


def program_of(sources: Sequence[Sequence[Error]], spread: float) -> Program:
    """The least that another program adds to each end with which `UNSEEN_COVERAGE` are inside.

    Half of the others lie beyond one end, half beyond the other.
    """
    missed, tried = (1 - UNSEEN_COVERAGE) / 2, [number / 100 for number in range(100)]

    def least(beyond: Callable[[Error, Program], bool]) -> float:
        def share(end: float) -> float:
            each_one = Program(end, end)
            return statistics.fmean(
                statistics.fmean(beyond(error, each_one) for error in errors) for errors in sources
            )

        return next((each for each in tried if share(each) <= missed), 1.0)

    return Program(
        least(lambda error, program: error.log < -error.ends(spread, program)[0]),
        least(lambda error, program: error.log > error.ends(spread, program)[1]),
    )


def covered(sources: Sequence[Sequence[Error]], spread: float, program: Program) -> float:
    """The share of rows inside, each source weighing as much as another."""
    return statistics.fmean(
        statistics.fmean(each.inside(spread, program) for each in errors) for errors in sources
    )


def by_source(
    others: Sequence[Scripted], home: Sequence[Features], constants: Callable[[str], Constants]
) -> dict[str, list[Error]]:
    """The errors of rows that are not at home, by the ``constants`` of their source."""
    sources: dict[str, list[Error]] = {}
    for each in others:
        source = source_of(each.row)
        far, _ = extrapolated(each.features, home)
        found = each.error(constants(source))._replace(far=far)
        sources.setdefault(source, []).append(found)
    return sources


def digest(paths: Sequence[Path]) -> dict[str, str]:
    """The SHA-256 of each file by its name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="CSV")
    parser.add_argument("--others", nargs="*", type=Path, default=[], metavar="CSV")
    parser.add_argument("--sources", action="store_true", help="print a table of left-out sources")
    parser.add_argument("--write", action="store_true", help="replace the package's constants")
    given = parser.parse_args()
    home, others = (
        [Scripted.of(row) for path in paths for row in read_rows(path)]
        for paths in (given.files, given.others)
    )
    rows = fitted_of(home, others)
    found = fit(rows)
    constants = constants_at(found.at)
    lines = [
        f"fit: {mape(found.errors):.1%} off",
        f"rows at home: {mape(found.errors[: len(home)]):.1%} off",
    ]
    left = [
        f"{name} left out, {part}: {len(errors)} rows, {mape(errors):.1%} off"
        for name, group in GROUPS.items()
        for part, errors in left_out(found, group).items()
    ]
    seen = sorted({_rounded(each.features) for each in home})
    spread, sources = interval_of(home, others, found)
    program = program_of([each for name, each in sources.items() if name not in NEVER], spread)
    if given.sources:
        print(table(others, sources, spread))
    interval = {"spread": spread, "sooner": program.sooner, "later": program.later}
    text = written(constants, interval, seen)
    text += outcome(lines, len(rows), given.files, given.others)
    print(*left, text, sep="\n")
    if given.write:
        TARGET.write_text(text, encoding="utf-8")
    return 0


def fitted_of(home: Sequence[Scripted], others: Sequence[Scripted]) -> list[Scripted]:
    """The rows that constants are fitted to."""
    return [*home, *(each for each in others if source_of(each.row) not in NEVER)]


def interval_of(
    home: Sequence[Scripted], others: Sequence[Scripted], found: Slopes
) -> tuple[float, dict[str, list[Error]]]:
    """The spread of the rows at home, and the errors of other sources, each left out of the fit."""
    seen = sorted({_rounded(each.features) for each in home})
    spread = spread_of([each.error(constants_at(found.at)) for each in home])
    names = np.array([source_of(each.row) for each in found.rows])

    @cache
    def without(source: str) -> Constants:
        return constants_at(found.best(names != source))

    return spread, by_source(others, seen, without)


def table(others: Sequence[Scripted], sources: Mapping[str, Sequence[Error]], spread: float) -> str:
    """A line for each source left out, of the fit and of intervals, and for all of them."""
    told: list[tuple[str, bool, list[tuple[float, bool, float]], list[float]]] = []
    for source, errors in sources.items():
        known = [each for name, each in sources.items() if name not in {source, *NEVER}]
        program = program_of(known, spread)
        cuts = [cut(*each.ends(spread, program)) for each in errors]
        rows = [
            (each.log, -sooner <= each.log <= later, share)
            for each, (sooner, later, share) in zip(errors, cuts, strict=True)
        ]
        mine = (each.memory_error() for each in others if source_of(each.row) == source)
        told.append((source, source in NEVER, rows, [each for each in mine if each is not None]))
    lines = [_line(f"{name}{' never' if never else ''}", *rest) for name, never, *rest in told]
    for name, kept in (("all", (True, False)), ("never fitted", (True,))):
        chosen = [each for each in told if each[1] in kept]
        joined = [[one for each in chosen for one in each[place]] for place in (2, 3)]
        means = [statistics.fmean(abs(math.expm1(log)) for log, *_ in each[2]) for each in chosen]
        inside = [statistics.fmean(ok for _, ok, _ in each[2]) for each in chosen]
        lines.append(
            f"{_line(name, *joined)}; by source {statistics.fmean(means):.1%}, "
            f"inside {statistics.fmean(inside):.0%}"
        )
    return "\n".join(lines)


def _line(name: str, rows: list[tuple[float, bool, float]], memory: list[float]) -> str:
    errors = [math.expm1(log) for log, *_ in rows]
    shares = [share for *_, share in rows]
    line = (
        f"{name:<12} {len(rows):>4} rows {statistics.fmean(map(abs, errors)):>6.1%} "
        f"bias {statistics.fmean(errors):>+6.1%} "
        f"inside {statistics.fmean(ok for _, ok, _ in rows):>4.0%}, told "
        f"{statistics.fmean(shares):.0%}, {sum(each < 0.899 for each in shares)} less than 90%"
    )
    if memory:
        line += (
            f", memory {statistics.fmean(map(abs, memory)):.1%} "
            f"{statistics.fmean(memory):+.1%} of {len(memory)}"
        )
    return line


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


def outcome(lines: Sequence[str], rows: int, files: Sequence[Path], others: Sequence[Path]) -> str:
    """The part of the file that says what the constants were fitted to and how well they hold."""
    text = [
        "",
        "[fit]",
        f"rows = {rows}",
        "outcome = [",
        *(f'    "{line}",' for line in lines),
        "]",
    ]
    for name, paths in (("sha256", files), ("others_sha256", others)):
        text += ["", f"[fit.{name}]"]
        text += [f'"{each}" = "{value}"' for each, value in digest(paths).items()]
    return "\n".join([*text, ""])


def _listed(kind: str, sizes: list[list[float]]) -> list[str]:
    rows = (sizes[start : start + 4] for start in range(0, len(sizes), 4))
    return [f'"{kind}" = [', *(f"    {', '.join(map(str, row))}," for row in rows), "]"]


if __name__ == "__main__":
    sys.exit(main())
