# SPDX-License-Identifier: Apache-2.0
"""A step on its streams: what computes when, what is on the wire, who waits for whom."""

from collections.abc import Sequence
from typing import Protocol

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

__all__ = ["STREAMS", "Stretch", "draw_streams"]

STREAMS = ("compute", "gather", "reduce")
_LEFT, _RIGHT, _TOP, _LANE = 76.0, 16.0, 44.0, 46.0


class Stretch(Protocol):
    """A stretch of work, as `fullshard.plan.step.clock.Busy` or a measured trace has it."""

    @property
    def stream(self) -> str:
        """compute, gather or reduce."""
        ...

    @property
    def label(self) -> str:
        """What is done."""
        ...

    @property
    def unit(self) -> int:
        """The number of the unit; what has one number has one colour."""
        ...

    @property
    def start_s(self) -> float:
        """When it begins, in seconds."""
        ...

    @property
    def stop_s(self) -> float:
        """When it ends."""
        ...


def draw_streams(records: Sequence[Stretch], title: str, *, width: float = 960.0) -> Drawing:
    """A lane for each stream; neighbouring units differ in colour, the mouse tells names."""
    lanes = [name for name in STREAMS if any(each.stream == name for each in records)]
    end_s = max((each.stop_s for each in records), default=0.0)
    height = _TOP + _LANE * len(lanes) + 40
    drawing = Drawing(width, height, f"{title}: {end_s * 1e3:.1f} ms")
    wide = width - _LEFT - _RIGHT

    def x(seconds: float) -> float:
        return _LEFT + (wide * seconds / end_s if end_s else 0.0)

    drawing.add(Label(_LEFT, 22, title, 15, bold=True))
    base = _TOP + _LANE * len(lanes)
    for tick in nice_ticks(end_s * 1e3, 8):
        drawing.add(Path(((x(tick / 1e3), _TOP), (x(tick / 1e3), base)), FAINT))
        drawing.add(Label(x(tick / 1e3), base + 16, f"{tick:g}", 11, "middle", AXIS))
    drawing.add(Label(_LEFT + wide, base + 32, "milliseconds", 11, "end", AXIS))
    for number, name in enumerate(lanes):
        top = _TOP + _LANE * number
        mine = [each for each in records if each.stream == name]
        busy_s = sum(each.stop_s - each.start_s for each in mine)
        drawing.add(Label(_LEFT - 8, top + 20, name, 12, "end"))
        share = f"{busy_s / end_s:.0%} busy" if end_s else ""
        drawing.add(Label(_LEFT - 8, top + 34, share, 10, "end", AXIS))
        for each in mine:
            told = f"{each.label}: {(each.stop_s - each.start_s) * 1e3:.3f} ms"
            size = max(0.5, x(each.stop_s) - x(each.start_s) - 0.4)
            colour = UNIT_COLOURS[each.unit % len(UNIT_COLOURS)]
            drawing.add(Box(x(each.start_s), top + 6, size, _LANE - 14, colour, told))
    return drawing
