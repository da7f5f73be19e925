# SPDX-License-Identifier: Apache-2.0
"""Plans as pictures: memory, streams and scaling over devices, by matplotlib (extra ``plots``)."""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.core.errors import ConfigurationError
from fullshard.core.text import bytes_text, whole_file
from fullshard.plan.memory.forecast import Sample
from fullshard.plan.scale import ScalePoint
from fullshard.plan.step.clock import Busy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that stay apart for colour-blind readers (Okabe and Ito 2008), and two greys.
CATEGORY_COLOURS = {
    "context and nccl": "#888888",
    "parameters": "#0072b2",
    "optimizer": "#56b4e9",
    "gradients": "#d55e00",
    "unit buffers": "#e69f00",
    "activations": "#009e73",
    "logits and loss": "#cc79a7",
    "allocator slack": "#bbbbbb",
}
"""In the order in which they are stacked: what stays lies below what comes and goes."""

KIND_COLOURS = {
    "forward": "#0072b2",
    "again": "#56b4e9",
    "backward": "#d55e00",
    "gather": "#009e73",
    "reduce": "#cc79a7",
}
"""The colours of the kinds of work on streams."""

_COLUMNS = 160
_AROUND = 6  # lines of the step shown on each side of the peak
_SHADES = (0.95, 0.6)  # neighbouring units differ
_LIMIT = "#b00020"
_UPRIGHT: dict[str, Any] = {"rotation": 90, "ha": "center", "va": "center", "fontsize": 6}


def _figure(title: str, width: float, height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ConfigurationError(
            "pictures need matplotlib: pip install matplotlib, or the extra plots"
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=12, fontweight="bold")
    return figure


def write_picture(figure: "Figure", path: str | Path) -> None:
    """Write a picture as what the ending of ``path`` says: SVG, PNG or PDF.

    An SVG of one plan has the same bytes each time.
    """
    from matplotlib import rc_context  # noqa: PLC0415 - optional

    kind = Path(path).suffix[1:] or "png"
    undated = {"Date": None} if kind == "svg" else None
    with rc_context({"svg.hashsalt": "fullshard"}), whole_file(path) as staged:
        figure.savefig(staged, dpi=150, format=kind, metadata=undated)


def draw_memory(
    samples: Sequence[Sample], title: str, *, capacity_bytes: int | None = None
) -> "Figure":
    """Draw bytes by category over the lines of a step, and the lines around the peak by name.

    Of many lines neighbours share a column, which shows the largest of them.
    """
    figure = _figure(title, 12, 5)
    whole, near = figure.subplots(1, 2, width_ratios=(3, 1.2))
    peak = max(samples, key=lambda each: each.total_bytes)
    at, scale = samples.index(peak), 2.0**30 if peak.total_bytes >= 2**30 else 2.0**20
    columns = largest_of_each(samples, min(_COLUMNS, len(samples)))
    _stack(whole, columns, scale, peak, capacity_bytes)
    around = samples[max(0, at - _AROUND) : at + _AROUND + 1]
    left = [0.0] * len(around)
    for name, colour in CATEGORY_COLOURS.items():
        values = [each.bytes.get(name, 0) / scale for each in around]
        near.barh(range(len(around)), values, left=left, color=colour)
        left = [low + value for low, value in zip(left, values, strict=True)]
    near.set_yticks(range(len(around)), [each.label for each in around], fontsize=7)
    near.invert_yaxis()
    near.set_title("around the peak", fontsize=10)
    near.set_xlabel("GiB" if scale == 2**30 else "MiB")
    handles, labels = whole.get_legend_handles_labels()
    looks: dict[str, Any] = {"loc": "outside lower center", "fontsize": 8, "frameon": False}
    figure.legend(handles[::-1], labels[::-1], title="bytes at the peak", ncols=5, **looks)
    return figure


def largest_of_each(samples: Sequence[Sample], columns: int) -> list[Sample]:
    """Cut ``samples`` into so many columns; returns the largest of each."""
    edges = [number * len(samples) // columns for number in range(columns + 1)]
    return [
        max(samples[first:last], key=lambda each: each.total_bytes)
        for first, last in pairwise(edges)
    ]


def _stack(
    axes: "Axes", columns: Sequence[Sample], scale: float, peak: Sample, capacity_bytes: int | None
) -> None:
    names = [name for name in CATEGORY_COLOURS if any(each.bytes.get(name) for each in columns)]
    below = [0.0] * len(columns)
    for name in names:
        above = [
            low + each.bytes.get(name, 0) / scale for low, each in zip(below, columns, strict=True)
        ]
        told = f"{name}: {bytes_text(peak.bytes.get(name, 0))}"
        edges = range(len(columns) + 1)
        axes.stairs(
            above, edges, baseline=below, fill=True, color=CATEGORY_COLOURS[name], label=told
        )
        below = above
    if capacity_bytes is not None:
        told = f"device: {bytes_text(capacity_bytes)}"
        axes.axhline(capacity_bytes / scale, color=_LIMIT, linestyle="--", label=told)
    axes.set_title(f"peak {bytes_text(peak.total_bytes)}: {peak.label}", fontsize=10)
    axes.set_ylabel("GiB" if scale == 2**30 else "MiB")
    axes.margins(x=0)
    backward = first_backward(columns)
    if backward:
        axes.axvline(backward, color="#222222", linewidth=0.8, ymax=0.03)
        ticks = [backward / 2, (backward + len(columns)) / 2]
        axes.set_xticks(ticks, ["forward", "backward"])


def first_backward(samples: Sequence[Sample]) -> int:
    """Return the place of the first sample in backward, 0 if there is none."""
    labels = (each.label for each in samples)
    return next((place for place, each in enumerate(labels) if each.startswith("backward")), 0)


def short_names(names: Sequence[str]) -> list[str]:
    """Leave out the modules around all of ``names`` that lie below the root."""
    inside = [name.split(".") for name in names if "." in name]
    around = [path[: -2 if path[-1].isdigit() else -1] for path in inside]
    columns = takewhile(lambda column: len(set(column)) == 1, zip(*around, strict=False))
    shared = sum(1 for _ in columns)
    return [".".join(name.split(".")[shared:]) if "." in name else name for name in names]


def draw_streams(
    records: Sequence[Busy], units: Sequence[str], title: str, *, step_s: float = 0.0
) -> "Figure":
    """Draw a lane for each stream: what it does in which colour, and for which unit.

    ``units`` are the names of the units by number; neighbours differ in shade. ``step_s`` of a
    whole step is told, if the micro-batch drawn is a part of it.
    """
    lanes = [name for name in ("reduce", "gather", "compute") if _of(records, name)]
    figure = _figure(title, 12, 1.6 + 1.1 * len(lanes))
    axes = figure.subplots()
    end_s = max(each.stop_s for each in records)
    unit, scale = ("s", 1.0) if end_s >= 10 else ("ms", 1e3)
    names, ticks = short_names(units), []
    for lane, stream in enumerate(lanes):
        mine = _of(records, stream)
        for kind in dict.fromkeys(each.kind for each in mine):
            drawn = [each for each in mine if each.kind == kind]
            axes.broken_barh(
                [(each.start_s * scale, (each.stop_s - each.start_s) * scale) for each in drawn],
                (lane - 0.4, 0.8),
                facecolors=[(KIND_COLOURS[kind], _SHADES[each.unit % 2]) for each in drawn],
            )
        busy_s = sum(each.stop_s - each.start_s for each in mine)
        ticks.append(f"{stream}\n{busy_s / end_s:.0%} busy")
        for middle_s, number in _labelled(mine, end_s / 85):
            axes.text(middle_s * scale, lane, names[number], **_UPRIGHT)
    for kind in dict.fromkeys(each.kind for each in records):
        word = "recomputation" if kind == "again" else kind
        axes.broken_barh([], (0, 0), color=KIND_COLOURS[kind], label=word)
    axes.set_yticks(range(len(lanes)), ticks)
    whole = f" of a step of {step_s * scale:,.1f} {unit}" if step_s else ""
    axes.set_xlabel(f"{unit}: a micro-batch takes {end_s * scale:,.1f} {unit}{whole}")
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower right", ncols=len(KIND_COLOURS), fontsize=8)
    return figure


def _of(records: Sequence[Busy], stream: str) -> list[Busy]:
    return [each for each in records if each.stream == stream]


def _labelled(records: Sequence[Busy], room_s: float) -> Iterator[tuple[float, int]]:
    """Yield middle and unit of runs of bars where a name has room beside the one before."""
    free_s = 0.0
    for (_, unit), run in groupby(records, lambda each: (each.kind, each.unit)):
        bars = list(run)
        start_s, stop_s = bars[0].start_s, bars[-1].stop_s
        middle_s = (start_s + stop_s) / 2
        if middle_s - room_s / 2 >= free_s and stop_s - start_s >= room_s / 4:
            free_s = middle_s + room_s / 2
            yield middle_s, unit


def draw_scaling(points: Sequence[ScalePoint], title: str) -> "Figure":
    """Draw tokens a second as shares of perfect scaling: without faults, and kept with them."""
    figure = _figure(title, 8, 4.5)
    axes = figure.subplots()
    alone = points[0].prediction.cluster_tokens_per_s / points[0].devices
    devices = [each.devices for each in points]
    steady, kept, low, high = [], [], [], []
    for each in points:
        ideal = alone * each.devices / 100
        steady.append(each.prediction.cluster_tokens_per_s / ideal)
        kept.append(each.tokens_per_s / ideal)
        low.append(kept[-1] * each.low / each.goodput.goodput)
        high.append(kept[-1] * each.high / each.goodput.goodput)
    axes.plot(devices, steady, marker="o", color="#0072b2", label="without faults")
    axes.plot(devices, kept, marker="s", color="#e69f00", label="kept, with faults")
    axes.fill_between(devices, low, high, color="#e69f00", alpha=0.3)
    axes.set_xscale("log", base=2)
    axes.set_xticks(devices, [f"{count:,}" for count in devices], fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="devices", ylabel="% of perfect scaling")
    axes.grid(color="#dddddd")
    axes.legend()
    return figure
