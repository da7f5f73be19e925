# SPDX-License-Identifier: Apache-2.0
"""The memory of a device over a step: stacked by category, the peak marked, the limit drawn."""

from collections.abc import Callable, Sequence
from typing import Literal

from fullshard.core.text import bytes_text
from fullshard.plan.draw.drawing import (
    AXIS,
    CATEGORY_COLOURS,
    FAINT,
    INK,
    Box,
    Drawing,
    Label,
    Path,
    nice_ticks,
)
from fullshard.plan.memory.forecast import Sample

__all__ = ["draw_memory"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 190.0, 52.0, 44.0
_GIB = 2.0**30
_LIMIT = "#b00020"


def draw_memory(
    samples: Sequence[Sample],
    title: str,
    *,
    capacity_bytes: int | None = None,
    width: float = 960.0,
    height: float = 420.0,
) -> Drawing:
    """A stacked area for each category over the lines of a step.

    ``capacity_bytes`` of the device are drawn as a line. Under the mouse each category tells its
    bytes at the peak.
    """
    peak = max(samples, key=lambda each: each.total_bytes)
    most = max(peak.total_bytes, capacity_bytes or 0) * 1.06
    drawing = Drawing(width, height, f"{title}: peak {bytes_text(peak.total_bytes)}")
    wide, high = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM
    steps = max(1, len(samples) - 1)

    def x(number: int) -> float:
        return _LEFT + wide * number / steps

    def y(size: float) -> float:
        return _TOP + high * (1 - size / most)

    unit, name = (_GIB, "GiB") if most >= _GIB else (2.0**20, "MiB")
    drawing.add(Label(_LEFT, 22, title, 15, bold=True))
    for tick in nice_ticks(most / unit):
        level = y(tick * unit)
        drawing.add(Path(((_LEFT, level), (_LEFT + wide, level)), FAINT))
        drawing.add(Label(_LEFT - 8, level + 4, f"{tick:g}", 11, "end", AXIS))
    drawing.add(Label(_LEFT - 8, _TOP - 12, name, 11, "end", AXIS))
    below = [0.0] * len(samples)
    for category, colour in CATEGORY_COLOURS.items():
        above = [
            low + each.bytes.get(category, 0) for low, each in zip(below, samples, strict=True)
        ]
        if above != below:
            upper = tuple((x(number), y(size)) for number, size in enumerate(above))
            lower = tuple((x(number), y(size)) for number, size in enumerate(below))
            told = f"{category}: {bytes_text(peak.bytes.get(category, 0))} at the peak"
            drawing.add(Path(upper + lower[::-1], fill=colour, title=told))
        below = above
    _mark_phases(drawing, samples, x, height - _BOTTOM)
    at = x(samples.index(peak))
    drawing.add(Path(((at, y(peak.total_bytes)), (at, y(0))), INK, dashed=True))
    text = f"{bytes_text(peak.total_bytes)}: {peak.label}"
    right = at > _LEFT + wide / 2
    anchor: Literal["start", "end"] = "end" if right else "start"
    drawing.add(Label(at + (-6 if right else 6), _TOP - 6, text, 12, anchor, bold=True))
    if capacity_bytes is not None:
        level = y(capacity_bytes)
        ends = ((_LEFT, level), (_LEFT + wide, level))
        drawing.add(Path(ends, _LIMIT, width=1.5, dashed=True))
        told = f"device: {bytes_text(capacity_bytes)}"
        drawing.add(Label(_LEFT + wide - 4, level + 14, told, 11, "end", _LIMIT))
    _legend(drawing, peak, _LEFT + wide + 16)
    return drawing


def _mark_phases(
    drawing: Drawing, samples: Sequence[Sample], x: Callable[[int], float], base: float
) -> None:
    """Say below the picture where forward ends and backward begins."""
    backward = next(
        (n for n, each in enumerate(samples) if each.label.startswith("backward")), None
    )
    last = len(samples) - 1
    drawing.add(Path(((x(0), base), (x(last), base)), AXIS))
    if backward is None:
        return
    drawing.add(Path(((x(backward), base), (x(backward), base + 8)), AXIS))
    for begin, end, name in ((0, backward, "forward"), (backward, last, "backward")):
        drawing.add(Label((x(begin) + x(end)) / 2, base + 18, name, 12, "middle", AXIS))


def _legend(drawing: Drawing, peak: Sample, left: float) -> None:
    place = _TOP
    for category, colour in reversed(CATEGORY_COLOURS.items()):
        size = peak.bytes.get(category, 0)
        if size:
            drawing.add(Box(left, place, 12, 12, colour))
            drawing.add(Label(left + 18, place + 10.5, category, 12))
            drawing.add(Label(left + 18, place + 24, bytes_text(size), 11, fill=AXIS))
            place += 34
