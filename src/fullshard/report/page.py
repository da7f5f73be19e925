# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML page that needs no network, and as a picture.

[Note: Bars of a page]
Plotly draws a thousand bars as a thousand elements, but a heatmap as one image, so each lane of a
step is one, as uneven as its ops. Ranks that the report names, and some more, are shown op by op as
long as the page stays small; all others are in the chart of all ranks.
"""

import html
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from fullshard.core.errors import ConfigurationError
from fullshard.core.text import bytes_text, whole_file, write_whole
from fullshard.report.measure import EXPOSED, MeasuredRun, Wanted
from fullshard.report.record import RecordedStep
from fullshard.report.shares import Bid, deal
from fullshard.report.summary import RunReport
from fullshard.report.tables import tables_of

# Colours that stay apart for colour-blind readers (Okabe and Ito 2008).
_COLOURS = {
    "forward": "#0072b2",
    "backward": "#56b4e9",
    "waiting": "#d55e00",
    "gather": "#009e73",
    "reduce": "#cc79a7",
    "optimizer": "#e69f00",
    "data": "#8c6d31",
    "other spans": "#888888",
}
_MOST_BARS = 10_000  # of a step; twice as many of all steps
_MOST_STEPS = 4
_MOST_RANKS = 16
_MOST_UNITS = 60


@dataclass(frozen=True)
class _Chart:
    """One figure of plotly; ``name`` is that of its place on the page."""

    name: str
    title: str
    says: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]


def write_page(report: RunReport, path: Path, other: RunReport | None = None) -> None:
    """Write a report's page, with ``other`` what has changed since; all names are plain text."""
    charts = [chart for draw in _CHARTS for chart in draw(report.measured)]
    charts.append(_wall_time(report))
    environment = Environment(
        loader=PackageLoader("fullshard.report", "."), autoescape=True, undefined=StrictUndefined
    )
    figures: list[dict[str, Any]] = [
        {"name": each.name, "data": each.data, "layout": {**_LAYOUT, **each.layout}}
        for each in charts
    ]
    text = environment.get_template("page.html").render(
        verdict=report.verdict,
        diagnoses=[(each, report.changes(each)) for each in report.diagnoses],
        charts=charts,
        tables=list(tables_of(report, other)),
        notes=report.notes,
        plotly=get_plotlyjs(),
        figures=json.dumps(figures, allow_nan=False).replace("<", "\\u003c"),
    )
    write_whole(path, text)


_LAYOUT: Mapping[str, Any] = {
    "margin": {"l": 90, "r": 20, "t": 10, "b": 45},
    "legend": {"orientation": "h", "y": 1.12},
    "font": {"family": "system-ui, sans-serif"},
    "hovermode": "closest",
}


def _label(text: str) -> str:
    """Return ``text`` so that plotly shows it as it is, and not as markup, formula or template."""
    return html.escape(text, quote=False).replace("$", "&#36;").replace("%", "&#37;")


# ---- a step op by op ----------------------------------------------------------------------------


class _Bar(NamedTuple):
    """Time on a lane; outer things have less ``weight``, and neighbours differ in ``shade``."""

    lane: str
    weight: int
    kind: str
    shade: int
    text: str
    begin_s: float
    end_s: float


def _shown_ranks(measured: MeasuredRun, bars: int) -> list[int]:
    """Return the ranks to show op by op if each has so many bars; see [Note: Bars of a page]."""
    most = max(1, min(_MOST_RANKS, _MOST_BARS // max(1, bars)))
    by_cost = sorted(measured.ranks, key=lambda rank: -measured.waited_for(rank))
    chosen = list(dict.fromkeys([*by_cost[: (most + 1) // 2], *measured.ranks]))[:most]
    return chosen if most < len(measured.ranks) else sorted(chosen)


def _step_of(measured: MeasuredRun, rank: int, number: int) -> RecordedStep:
    return next(each for each in measured.attempts[rank].steps if each.step == number)


def _bars(measured: MeasuredRun, rank: int, number: int) -> Iterator[_Bar]:
    """Yield all that takes time in a step of a rank."""
    step, units = _step_of(measured, rank, number), measured.units
    computes, link = f"rank {rank}", f"rank {rank} link"
    for op in step.ops or ():
        waits = op.op in EXPOSED
        kind = "waiting" if waits else "reduce" if op.op == "all_reduce" else op.op
        if kind in _COLOURS and op.end_s > op.begin_s:
            size = f", {bytes_text(op.bytes)}" if op.bytes else ""
            by = "" if op.waiter is None else f", by {units[op.waiter].name}"
            text = f"{op.op} {units[op.unit].name}{by}{size}"
            lane = link if kind in ("gather", "reduce") else computes
            yield _Bar(lane, 2 * waits, kind, op.unit % 2, text, op.begin_s, op.end_s)
    for what, begin_s, end_s in step.spans:
        kind = what if what in _COLOURS else "other spans"
        yield _Bar(computes, 1, kind, 0, what, begin_s, end_s)


def _lanes(bars: Iterable[_Bar]) -> dict[str, list[tuple[_Bar | None, float]]]:
    """Cut each lane into parts, each moment once: the bar that takes it or None, and its end.

    The first part has no bar, and ends where the first bar begins.
    """
    lanes: dict[str, list[_Bar]] = {}
    for bar in bars:
        lanes.setdefault(bar.lane, []).append(bar)
    cut: dict[str, list[tuple[_Bar | None, float]]] = {}
    for lane, mine in lanes.items():
        bids = [
            Bid(bar.begin_s, bar.end_s, bar.weight, (bar.kind, number))
            for number, bar in enumerate(mine)
        ]
        begin_s, end_s = min(bid.begin_s for bid in bids), max(bid.end_s for bid in bids)
        parts = [
            (None if part.share[1] is None else mine[part.share[1]], part.end_s)
            for part in deal(bids, begin_s, end_s)
        ]
        cut[lane] = [(None, begin_s), *parts]
    return cut


def _gantt(measured: MeasuredRun) -> Iterator[_Chart]:
    if not (measured.by_op and measured.detailed):
        return
    count = sum(1 for _ in _bars(measured, measured.ranks[0], measured.detailed[-1]))
    ranks = _shown_ranks(measured, count)
    fit = max(1, min(_MOST_STEPS, 2 * _MOST_BARS // max(1, count * len(ranks))))
    numbers = measured.detailed[-fit:]
    names = [lane for rank in ranks for lane in (f"rank {rank}", f"rank {rank} link")]
    steps = {number: list(_step_data(measured, ranks, names, number)) for number in numbers}
    data: list[Mapping[str, Any]] = [
        {**each, "visible": number == numbers[-1]} for number in numbers for each in steps[number]
    ]
    data += [  # a legend, which heatmaps have not
        {
            **{"type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": kind},
            "marker": {"symbol": "square", "size": 12, "color": colour},
        }
        for kind, colour in _COLOURS.items()
    ]
    choices = [
        {"label": f"step {number}", "method": "restyle", "args": [{"visible": shown}]}
        for number in numbers
        for chosen in [[number == other for other in numbers for _ in steps[other]]]
        for shown in [chosen + [True] * len(_COLOURS)]
    ]
    menu = {"type": "buttons", "direction": "right", "buttons": choices, "active": len(numbers) - 1}
    shades = [shade for colour in _COLOURS.values() for shade in (colour, _paler(colour))]
    scale = [[(k + end) / len(shades), each] for k, each in enumerate(shades) for end in (0, 1)]
    layout = {
        "dragmode": "zoom",
        "height": 150 + 34 * len(names),
        "coloraxis": {"colorscale": scale, "cmin": 0, "cmax": len(shades), "showscale": False},
        "legend": {**_LAYOUT["legend"], "itemclick": False, "itemdoubleclick": False},
        "yaxis": {
            **{"range": [len(names) - 0.5, -0.5], "fixedrange": True, "zeroline": False},
            **{"tickvals": [*range(len(names))], "ticktext": names},
        },
        "xaxis": {"title": {"text": "milliseconds since the step began"}, "zeroline": False},
        "updatemenus": [{**menu, "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"}],
    }
    some = f": {len(ranks)} ranks of {len(measured.ranks)}" * (len(ranks) < len(measured.ranks))
    title = f"Step{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}{some}"
    says = (
        "Each rank's computation, and below it what its link carries. Choose a step; drag to zoom, "
        "twice to reset."
    )
    yield _Chart("gantt", title, says, data, layout)


def _paler(colour: str) -> str:
    """Return a colour (``#rrggbb``) with a third of white."""
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{(2 * part + 255) // 3:02x}" for part in parts)


def _step_data(
    measured: MeasuredRun, ranks: Sequence[int], names: Sequence[str], number: int
) -> Iterator[Mapping[str, Any]]:
    """Yield a step's lanes, each as a heatmap of one row, which plotly draws as one image."""
    begin_s = min(
        measured.attempts[rank].wall_s(_step_of(measured, rank, number).begin_s) for rank in ranks
    )
    kinds = [*_COLOURS]
    for rank in ranks:
        zero_s = begin_s - measured.attempts[rank].wall_s(0.0)
        for lane, ((_, first_s), *parts) in _lanes(_bars(measured, rank, number)).items():
            place = names.index(lane)
            codes, texts = [], []
            for bar, _ in parts:
                codes.append(None if bar is None else 2 * kinds.index(bar.kind) + bar.shade + 0.5)
                texts.append("" if bar is None else _told(bar, zero_s))
            edges = [first_s, *(end_s for _, end_s in parts)]
            yield {
                **{"type": "heatmap", "y": [place - 0.4, place + 0.4], "coloraxis": "coloraxis"},
                "x": [round((at_s - zero_s) * 1e3, 4) for at_s in edges],
                **{"z": [codes], "text": [texts], "hoverongaps": False},
                "hovertemplate": f"{lane}<br>%{{text}}<extra></extra>",
            }


def _told(bar: _Bar, zero_s: float) -> str:
    lasts_ms, from_ms = (bar.end_s - bar.begin_s) * 1e3, (bar.begin_s - zero_s) * 1e3
    return f"{_label(bar.text)}<br>{lasts_ms:.3f} ms from {from_ms:.3f} ms"


# ---- sums ---------------------------------------------------------------------------------------


def _all_ranks(measured: MeasuredRun) -> Iterator[_Chart]:
    if len(measured.ranks) < 2:
        return
    whats = [what for what in measured.mean_shares if measured.mean_shares[what] > 0]
    rows = [
        [round(measured.mean_s(Wanted(what), [rank]) * 1e3, 4) for rank in measured.ranks]
        for what in whats
    ]
    # Beside the median of the same row, or one row would set the colours of all.
    beside = [[each - sorted(row)[len(row) // 2] for each in row] for row in rows]
    data = [
        {
            **{
                "type": "heatmap",
                "z": beside,
                "customdata": rows,
                "x": [*map(str, measured.ranks)],
            },
            **{"y": [_label(what) for what in whats], "colorscale": "RdBu", "zmid": 0},
            "colorbar": {"title": {"text": "ms beside<br>the median"}},
            "hovertemplate": "rank %{x}, %{y}: %{customdata:.3f} ms<extra></extra>",
        }
    ]
    layout = {
        "height": 160 + 28 * len(whats),
        "xaxis": {"title": {"text": "rank"}, "type": "category", "nticks": 20},
    }
    says = "What each rank does longer (red) or shorter (blue) than the rank in the middle."
    yield _Chart("ranks", "Ranks beside each other", says, data, layout)


def _exposed(measured: MeasuredRun) -> Iterator[_Chart]:
    exposed = sorted(measured.exposed.items(), key=lambda each: -each[1])
    if not exposed:
        return
    shown = dict(exposed[:_MOST_UNITS])
    late: dict[int, float] = {}
    for each in measured.collectives:
        late[each.unit] = late.get(each.unit, 0.0) + each.exposed_s(late=True)
    late_ms = {u: min(s, late.get(u, 0.0) / len(measured.detailed)) * 1e3 for u, s in shown.items()}
    names = [_label(measured.units[unit].name) for unit in shown]
    link = [round(s * 1e3 - late_ms[unit], 4) for unit, s in shown.items()]
    data = [
        {"type": "bar", "name": "the link", "x": names, "y": link, "marker": {"color": "#009e73"}},
        {
            **{"type": "bar", "name": "a late rank", "x": names},
            **{"y": [round(each, 4) for each in late_ms.values()], "marker": {"color": "#d55e00"}},
        },
    ]
    layout = {"barmode": "stack", "height": 380, "yaxis": {"title": {"text": "ms of a step"}}}
    says = "How long computation waited for each unit, the mean of all ranks, each moment once."
    yield _Chart("exposed", "Exposed communication by unit", says, data, layout)


def _memory(measured: MeasuredRun) -> Iterator[_Chart]:
    fullest = measured.fullest
    if fullest is None:
        return
    rank, moment = fullest
    steps = [step for step in measured.attempts[rank].steps if moment in step.memory]
    step = max(steps, key=lambda step: len(step.memory))
    times = [round((each.at_s - step.begin_s) * 1e3, 3) for each in step.memory]
    data: list[dict[str, Any]] = [
        {
            **{"type": "scatter", "stackgroup": "one", "name": owner, "x": times},
            "y": [each.by_owner.get(owner, 0) / 2**20 for each in step.memory],
            "hovertemplate": "%{y:.1f} MiB",
        }
        for owner in moment.by_owner
    ]
    foretold = measured.first.facts.forecast.get("peak_bytes")
    if foretold:
        line = {
            "type": "scatter",
            "mode": "lines",
            "name": "planned peak",
            "line": {"dash": "dash"},
        }
        data.append({**line, "x": [times[0], times[-1]], "y": [foretold / 2**20] * 2})
    layout = {
        "height": 380,
        "hovermode": "x unified",
        "xaxis": {"title": {"text": "milliseconds since the step began"}},
        "yaxis": {"title": {"text": "MiB"}, "rangemode": "tozero"},
    }
    says = f"What rank {rank}, the fullest, held in step {step.step}, by owner."
    yield _Chart("memory", "Memory over a step", says, data, layout)


def _progress(measured: MeasuredRun) -> Iterator[_Chart]:
    steps = measured.first.steps
    losses = [(step.step, step.loss) for step in steps if step.loss is not None]
    took = [(step.step, step.duration_s * 1e3) for step in steps]
    data = [
        {
            **{"type": "scatter", "name": name, "yaxis": axis},
            **{"x": [step for step, _ in points], "y": [value for _, value in points]},
        }
        for name, axis, points in (("ms a step", "y", took), ("loss", "y2", losses))
        if points
    ]
    layout = {
        "height": 320,
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": "ms a step"}, "rangemode": "tozero"},
        "yaxis2": {"title": {"text": "loss"}, "overlaying": "y", "side": "right"},
        "margin": {"l": 70, "r": 70, "t": 10, "b": 45},
    }
    yield _Chart("progress", "Steps and loss", "All steps that were recorded.", data, layout)


def _wall_time(report: RunReport) -> _Chart:
    causes = [*report.wall.good, *report.wall.badput]
    data = [
        {
            **{"type": "bar", "orientation": "h", "y": [""], "x": [seconds], "name": _label(cause)},
            "hovertemplate": f"%{{x:.3g}} s<extra>{_label(cause)}</extra>",
        }
        for cause, seconds in causes
    ]
    layout = {"barmode": "stack", "height": 220, "xaxis": {"title": {"text": "seconds"}}}
    says = (
        f"{report.wall.share:.0%} of the time was good: the first {len(report.wall.good)} causes."
    )
    return _Chart("wall", "Wall time by cause", says, data, layout)


_CHARTS = (_gantt, _all_ranks, _exposed, _memory, _progress)


# ---- a picture ----------------------------------------------------------------------------------


def draw_report(report: RunReport, path: Path) -> None:
    """Draw a step and its exposed units. Raises `ConfigurationError` for an unknown suffix."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - half a second, for pages in vain

    measured = report.measured
    number = measured.detailed[-1] if measured.by_op and measured.detailed else None
    ranks = [] if number is None else _shown_ranks(measured, 400)
    picture = Figure(figsize=(11, 3.6 + 0.45 * len(ranks)), layout="constrained")
    top, bottom = picture.subplots(2, height_ratios=[1 + len(ranks) * 0.5, 2.2])
    picture.suptitle(_wrapped(report.verdict), fontsize=10)
    for place, rank in enumerate(ranks):
        assert number is not None
        begin_s = _step_of(measured, rank, number).begin_s
        for bar in _bars(measured, rank, number):
            y = 2 * place + (0.9 if bar.lane.endswith("link") else 0.0)
            left, width = (bar.begin_s - begin_s) * 1e3, (bar.end_s - bar.begin_s) * 1e3
            look = {"color": _COLOURS[bar.kind], "ec": "white", "lw": 0.3, "height": 0.8}
            top.barh(y, width, left=left, zorder=2 + bar.weight, **look)
    top.set_yticks([2 * place + 0.45 for place in range(len(ranks))], [f"rank {r}" for r in ranks])
    top.invert_yaxis()
    top.set_xlabel("milliseconds since the step began")
    top.legend(
        handles=[top.barh(0, 0, color=colour, label=kind) for kind, colour in _COLOURS.items()],
        **{"ncols": len(_COLOURS), "fontsize": 7, "loc": "lower center"},
        bbox_to_anchor=(0.5, 1.0),
    )
    shown = sorted(measured.mean_shares.items(), key=lambda each: each[1])
    names = [what.replace("$", r"\$") for what, _ in shown]
    bottom.barh(names, [seconds * 1e3 for _, seconds in shown], color="#0072b2")
    bottom.set_xlabel("milliseconds of a step, mean of all ranks")
    try:
        with whole_file(path) as staged:
            picture.savefig(staged, dpi=150, format=path.suffix[1:] or "png")
    except ValueError as error:
        raise ConfigurationError(f"cannot draw to {str(path)!r}: {error}") from error


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text.replace("$", r"\$"), 110))
