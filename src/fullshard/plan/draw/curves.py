# SPDX-License-Identifier: Apache-2.0
"""Figures over numbers of devices, as curves with bands for what is not certain."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.plan.draw.drawing import (
    AXIS,
    FAINT,
    UNIT_COLOURS,
    Box,
    Drawing,
    Label,
    Path,
    nice_ticks,
)

__all__ = ["Curve", "draw_curves"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 190.0, 52.0, 52.0


@dataclass(frozen=True)
class Curve:
    """Points (x, y) with x growing; ``low`` and ``high`` are a band around y, if there is one."""

    name: str
    points: tuple[tuple[float, float], ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


def draw_curves(
    curves: Sequence[Curve], title: str, x_name: str, y_name: str, *, width: float = 860.0
) -> Drawing:
    """Curves over a logarithmic x axis, doubled at each tick."""
    height = 400.0
    drawing = Drawing(width, height, title)
    wide, high = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM
    places = [place for curve in curves for place, _ in curve.points]
    first, last = min(places, default=1.0), max(places, default=2.0)
    doublings = max(1.0, math.log2(last / first))
    tops = [value for curve in curves for value in (*curve.high, *(y for _, y in curve.points))]
    most = max(tops, default=1.0) * 1.05

    def x(place: float) -> float:
        return _LEFT + wide * math.log2(place / first) / doublings

    def y(value: float) -> float:
        return _TOP + high * (1 - value / most)

    drawing.add(Label(_LEFT, 22, title, 15, bold=True))
    for tick in nice_ticks(most):
        drawing.add(Path(((_LEFT, y(tick)), (_LEFT + wide, y(tick))), FAINT))
        drawing.add(Label(_LEFT - 8, y(tick) + 4, f"{tick:g}", 11, "end", AXIS))
    drawing.add(Label(_LEFT - 8, _TOP - 12, y_name, 11, "start", AXIS))
    for doubling in range(int(doublings) + 1):
        place = first * 2**doubling
        drawing.add(Label(x(place), height - _BOTTOM + 18, f"{place:g}", 11, "middle", AXIS))
    drawing.add(Label(_LEFT + wide / 2, height - 12, x_name, 12, "middle", AXIS))
    for number, curve in enumerate(curves):
        colour = UNIT_COLOURS[number % len(UNIT_COLOURS)]
        line = tuple((x(place), y(value)) for place, value in curve.points)
        for band in (curve.low, curve.high):
            if band:
                edge = zip((place for place, _ in line), map(y, band), strict=True)
                drawing.add(Path(tuple(edge), colour, width=0.8, dashed=True))
        drawing.add(Path(line, colour, width=2.2, title=curve.name))
        for place, value in line:
            drawing.add(Box(place - 2.5, value - 2.5, 5, 5, colour))
        drawing.add(Box(_LEFT + wide + 16, _TOP + 24 * number, 12, 12, colour))
        drawing.add(Label(_LEFT + wide + 34, _TOP + 24 * number + 10.5, curve.name, 12))
    return drawing
