# SPDX-License-Identifier: Apache-2.0
"""The tables of a report, for the terminal and the page alike."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fullshard.core.text import bytes_text, seconds_text
from fullshard.report.measure import EXPOSED, Wanted
from fullshard.report.summary import RunReport, compare, figures, planned

_ROWS = 8


class ReportTable(NamedTuple):
    """A table of texts; cells may contain anything that a name may."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables_of(report: RunReport, other: RunReport | None = None) -> Iterator[ReportTable]:
    """Yield the tables of a report, and with ``other`` what has changed since that run."""
    parts = (_step, _wall, _ranks, _units, _memory, _plan)
    yield from (table for part in parts for table in part(report))
    if other is not None:
        yield _changes(report, other)


def _text(name: str, value: float) -> str:
    """Return a figure with its unit of measure, which follows from its name."""
    if math.isfinite(value) and name in ("peak memory", "peak_bytes", "transient_peak_bytes"):
        return bytes_text(int(value))
    if not math.isfinite(value):
        return "unknown"
    return f"{value:,.0f}" if name == "tokens a second" else seconds_text(value)


def _step(report: RunReport) -> Iterator[ReportTable]:
    measured, noises = report.measured, figures(report.measured)
    step, steps, ranks = measured.step, len(measured.looked_at), len(measured.ranks)
    title = f"A step: {seconds_text(step.value)} ± {seconds_text(step.noise)} (parts: means of "
    title += f"{steps} step{'s' * (steps > 1)} on {ranks} rank{'s' * (ranks > 1)})"
    rows = []
    for what, seconds in sorted(measured.mean_shares.items(), key=lambda each: -each[1]):
        by_rank = [measured.mean_s(Wanted(what), [rank]) for rank in measured.ranks]
        values = seconds, noises[what].noise, min(by_rank), max(by_rank)
        mean, *others = map(seconds_text, values)
        rows.append((what, mean, f"{seconds / measured.mean_step_s:.1%}", *others))
    yield ReportTable(title, ("part", "mean", "share", "noise", "least rank", "most rank"), rows)


def _wall(report: RunReport) -> Iterator[ReportTable]:
    wall = report.wall
    causes = sorted(wall.seconds.items(), key=lambda each: -each[1])
    rows = [
        (cause, seconds_text(seconds), f"{seconds / wall.wall_s:.1%}")
        for cause, seconds in causes
        if seconds >= 0.0005 * wall.wall_s
    ]
    title = f"Wall time: {seconds_text(wall.wall_s)}, {wall.share:.0%} of it good"
    yield ReportTable(title, ("cause", "mean of ranks", "share"), rows)


def _ranks(report: RunReport) -> Iterator[ReportTable]:
    measured = report.measured
    if not measured.waited:
        return
    rows = [
        (str(rank), seconds_text(measured.waited_for(rank)), seconds_text(own_s))
        for rank in sorted(measured.ranks, key=lambda rank: -measured.waited_for(rank))[:_ROWS]
        for own_s in [measured.mean_s(Wanted(*EXPOSED), [rank])]
    ]
    title = "Ranks by how long the others wait for them in a step"
    yield ReportTable(title, ("rank", "waited for", "waits itself"), rows)


def _units(report: RunReport) -> Iterator[ReportTable]:
    measured = report.measured
    rows = [
        (unit.name, seconds_text(seconds), bytes_text(unit.full_bytes))
        for number, seconds in sorted(measured.exposed.items(), key=lambda each: -each[1])[:_ROWS]
        for unit in [measured.units[number]]
        if seconds > 1e-3 * measured.mean_step_s
    ]
    if rows:
        yield ReportTable(
            "Units by exposed communication in a step", ("unit", "exposed", "full"), rows
        )


def _memory(report: RunReport) -> Iterator[ReportTable]:
    if report.measured.fullest is not None:
        rank, moment = report.measured.fullest
        rows = [(owner, bytes_text(size)) for owner, size in moment.by_owner.items()]
        title = f"Memory by owner, at the fullest recorded moment of rank {rank}"
        yield ReportTable(title, ("owner", "bytes"), rows)


def _plan(report: RunReport) -> Iterator[ReportTable]:
    rows = [
        (name, _text(name, foretold), _text(name, value), f"{value / foretold - 1:+.0%}")
        for name, foretold, value in planned(report.measured)
        if foretold
    ]
    if rows:
        yield ReportTable("The plan", ("figure", "planned", "measured", "off by"), rows)


def _changes(report: RunReport, other: RunReport) -> ReportTable:
    rows = [
        (
            row.name,
            *(
                f"{_text(row.name, each.value)} ± {_text(row.name, each.noise)}"
                for each in (row.before, row.after)
            ),
            f"{row.change:+.1%}",
            "" if row.real else "noise",
        )
        for row in compare(other.measured, report.measured)
    ]
    return ReportTable("Against the other run", ("figure", "other", "this", "change", ""), rows)
