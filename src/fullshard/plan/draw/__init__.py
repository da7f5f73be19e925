# SPDX-License-Identifier: Apache-2.0
"""Plans as pictures: memory, streams and scaling, as SVG, as PNG and in a terminal."""

from fullshard.plan.draw.curves import Curve, draw_curves
from fullshard.plan.draw.drawing import Drawing
from fullshard.plan.draw.memory import draw_memory
from fullshard.plan.draw.png import write_png
from fullshard.plan.draw.streams import Stretch, draw_streams
from fullshard.plan.draw.svg import svg_of, write_svg
from fullshard.plan.draw.terminal import memory_lines, stream_lines

__all__ = [
    "Curve",
    "Drawing",
    "Stretch",
    "draw_curves",
    "draw_memory",
    "draw_streams",
    "memory_lines",
    "stream_lines",
    "svg_of",
    "write_png",
    "write_svg",
]
