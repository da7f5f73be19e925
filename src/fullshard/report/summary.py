# SPDX-License-Identifier: Apache-2.0
"""A run in brief: its verdict, its figures with their noise, beside another run and the plan."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.core.errors import ConfigurationError
from fullshard.core.text import seconds_text
from fullshard.report.files import read_run
from fullshard.report.findings import Diagnosis, diagnose
from fullshard.report.goodput import GOOD, WallTime, goodput
from fullshard.report.measure import EXPOSED, Figure, MeasuredRun, Wanted, measure
from fullshard.report.record import RunRecord

_ENOUGH = 2  # steps beyond the first ones


@dataclass(frozen=True)
class RunReport:
    """All that is said of a run; ``diagnoses`` begin with what costs most, none if it is healthy.

    ``failed`` says who ended in an error, ``notes`` are sentences on what the record lacks.
    """

    measured: MeasuredRun
    wall: WallTime
    diagnoses: Sequence[Diagnosis]
    failed: str
    notes: Sequence[str]

    @property
    def verdict(self) -> str:
        """One sentence: who failed, and what limits the run."""
        return f"{self.failed}; until then {self._limit}" if self.failed else self._limit

    @property
    def _limit(self) -> str:
        steps = len(self.measured.looked_at) if self.measured.warm else 0
        if not self.diagnoses and steps < _ENOUGH:
            beyond = f"{steps} step{'' if steps == 1 else 's'} beyond the first two"
            return f"not enough to say: {beyond}, {_ENOUGH} are needed to call a run healthy"
        if not self.diagnoses:
            computing = sum(self.measured.mean_shares.get(what, 0.0) for what in GOOD)
            share = computing / self.measured.mean_step_s
            return f"healthy: {share:.0%} of a step computes, and nothing stands out"
        first = self.diagnoses[0]
        return f"{first.cause}: {first.what}"

    def changes(self, diagnosis: Diagnosis) -> list[str]:
        """Say what to change, the best first, and what that would gain where it is known."""
        # Checkpoints lie between steps.
        between_s = diagnosis.cost_s if diagnosis.cause == "checkpoint stall" else 0.0
        step_s = self.measured.mean_step_s + between_s
        return [
            advice
            if gain_s is None
            else f"{advice}; about {seconds_text(gain_s)} a step ({gain_s / step_s:.0%}) "
            "would be gained"
            for advice, gain_s in [(diagnosis.advice, diagnosis.gain_s), *diagnosis.others]
        ]

    def as_json(self, other: "RunReport | None" = None) -> dict[str, Any]:
        """Return the report for programs; all times are in seconds, ``other`` is compared with."""
        measured = self.measured
        changes = [] if other is None else compare(other.measured, measured)
        return {
            "verdict": self.verdict,
            "diagnoses": [asdict(each) for each in self.diagnoses],
            "figures": {name: _finite(each) for name, each in figures(measured).items()},
            "step_s": measured.mean_shares,
            "wall_s": {"total": self.wall.wall_s, **self.wall.seconds},
            "goodput": self.wall.share,
            "exposed_s": {measured.units[u].name: s for u, s in measured.exposed.items()},
            "waited_for_s": {str(rank): measured.waited_for(rank) for rank in measured.ranks},
            "planned": {name: {"plan": p, "measured": m} for name, p, m in planned(measured)},
            "changes": [
                {"name": row.name, "before": _finite(row.before), "after": _finite(row.after)}
                | {"change": row.change, "real": row.real}
                for row in changes
            ],
            "notes": list(self.notes),
        }


def _finite(figure: Figure) -> dict[str, float | None]:
    noise = figure.noise if math.isfinite(figure.noise) else None
    return {"value": figure.value, "noise": noise}


def report_of(folder: str | Path) -> RunReport:
    """Read and judge the record in ``folder``. Raises `ConfigurationError` if it has no steps."""
    return judge(read_run(folder))


def judge(run: RunRecord) -> RunReport:
    """Judge a record that was read. Raises `ConfigurationError` if it has no steps."""
    failed = _failed(run)
    try:
        measured = measure(run)
    except ConfigurationError as error:
        raise ConfigurationError(f"{failed}; {error}" if failed else str(error)) from error
    notes = list(_notes(run, measured))
    return RunReport(measured, goodput(run, measured), diagnose(measured), failed, notes)


def _failed(run: RunRecord) -> str:
    """Say which rank was the first to end in an error, and in which step."""
    last = [record.attempts[-1] for record in run.ranks.values()]
    ended = [each for each in last if each.ending not in ("", "finished")]
    if not ended:
        return ""
    first = min(ended, key=lambda each: each.wall_s(each.last_s))
    step = f"step {first.steps[-1].step + 1}" if first.steps else "its first step"
    return f"rank {first.facts.rank} ended in {step} by {first.ending.strip(': ')}"


def _notes(run: RunRecord, measured: MeasuredRun) -> Iterator[str]:
    if run.absent:
        yield f"there is no record of {_ranks(run.absent)}: what they did is not known"
    for why in run.unread:
        yield f"left out: {why}"
    damaged = sum(record.damaged for record in run.ranks.values())
    if damaged:
        yield f"{damaged} lines of the record cannot be read, as after a kill; they are left out"
    left_out = sum(each.left_out for each in measured.attempts.values())
    if left_out:
        yield f"{left_out} steps were not recorded: the files had grown to their limit"
    if not measured.by_op:
        yield "no step was recorded op by op, so nothing is known of units and late ranks"
    if measured.cut:
        yield f"of the steps recorded op by op the last {len(measured.detailed)} were looked at"
    if len(measured.looked_at) < 3:
        yield "few steps were looked at: figures are as noisy as those are"
    attempts = max(len(record.attempts) for record in run.ranks.values())
    if attempts > 1:
        yield f"the run was started {attempts} times; steps are those of the last one"
    for what in dict.fromkeys(m for each in measured.attempts.values() for m in each.facts.missing):
        yield f"not recorded: {what}"


def _ranks(ranks: Sequence[int]) -> str:
    some = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {some}"


class FigureChange(NamedTuple):
    """One figure of two runs; ``real`` if they differ by more than twice the noise of both."""

    name: str
    before: Figure
    after: Figure

    @property
    def real(self) -> bool:
        """True if this is more than noise."""
        noise = math.hypot(self.before.noise, self.after.noise)
        return abs(self.after.value - self.before.value) > 2 * noise

    @property
    def change(self) -> float:
        """The change in parts of the first run's figure."""
        value = self.before.value
        return (self.after.value - value) / value if value else 0.0


def figures(measured: MeasuredRun) -> dict[str, Figure]:
    """Return the figures of a run: seconds of a step and its parts, tokens a second, bytes."""
    known = {"step": measured.step}
    for what in measured.mean_shares:
        by_step = (
            sum(measured.of_step(rank, step, Wanted(what)) for rank in measured.ranks)
            / len(measured.ranks)
            for step in measured.looked_at
        )
        known[what] = Figure.of(by_step)
    tokens = [
        step.tokens / step.duration_s for step in measured.steady if step.tokens and step.duration_s
    ]
    if tokens:
        known["tokens a second"] = Figure.of(tokens)
    if (peak := measured.peak_bytes) is not None:
        known["peak memory"] = Figure(float(peak), 0.0)
    return known


def compare(before: MeasuredRun, after: MeasuredRun) -> list[FigureChange]:
    """Return the figures that two runs have in common."""
    first, second = figures(before), figures(after)
    return [FigureChange(name, first[name], second[name]) for name in first if name in second]


def planned(measured: MeasuredRun) -> Iterator[tuple[str, float, float]]:
    """Yield what the plan foretold and what was measured, by name."""
    forecast: Mapping[str, float] = measured.first.facts.forecast
    known = {
        "step_s": measured.step.value,
        "exposed_s": measured.mean_s(Wanted(*EXPOSED)),
        "peak_bytes": measured.peak_bytes,
        "transient_peak_bytes": measured.transient_peak_bytes,
    }
    for name, value in known.items():
        if name in forecast and value is not None:
            yield name, forecast[name], float(value)
