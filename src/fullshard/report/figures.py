# SPDX-License-Identifier: Apache-2.0
"""Figures of a run with their noise, beside those of another run and of the plan."""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fullshard.report.measure import EXPOSED, Figure, MeasuredRun, Wanted

__all__ = ["FigureChange", "compare", "figures", "planned"]


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
    found = {"step": measured.step}
    for what in measured.mean_shares:
        by_step = (
            sum(measured.of_step(rank, step, Wanted(what)) for rank in measured.ranks)
            / len(measured.ranks)
            for step in measured.detailed
        )
        found[what] = Figure.of(by_step)
    tokens = [
        step.tokens / step.duration_s for step in measured.steady if step.tokens and step.duration_s
    ]
    if tokens:
        found["tokens a second"] = Figure.of(tokens)
    if (peak := measured.peak_bytes) is not None:
        found["peak memory"] = Figure(float(peak), 0.0)
    return found


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
