# SPDX-License-Identifier: Apache-2.0
"""A picture as a list of shapes, whatever it is written as. Lengths are in pixels, y grows down."""

import math
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "AXIS",
    "CATEGORY_COLOURS",
    "FAINT",
    "INK",
    "UNIT_COLOURS",
    "Box",
    "Drawing",
    "Label",
    "Path",
    "Shape",
    "nice_ticks",
]

INK, AXIS, FAINT = "#222222", "#666666", "#dddddd"

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

UNIT_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")


@dataclass(frozen=True)
class Box:
    """A filled rectangle; ``title`` is what a browser shows under the mouse."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    title: str = ""


@dataclass(frozen=True)
class Path:
    """A line through points, or with ``fill`` the area inside it."""

    points: tuple[tuple[float, float], ...]
    stroke: str = ""
    fill: str = ""
    width: float = 1.0
    dashed: bool = False
    title: str = ""


@dataclass(frozen=True)
class Label:
    """Text whose baseline begins, has its middle, or ends at (x, y)."""

    x: float
    y: float
    text: str
    size: float = 12.0
    anchor: Literal["start", "middle", "end"] = "start"
    fill: str = INK
    bold: bool = False


Shape = Box | Path | Label


@dataclass
class Drawing:
    """Shapes on a white ground, later ones on top; ``description`` is for who cannot see it."""

    width: float
    height: float
    description: str
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        """Put shapes on top."""
        self.shapes.extend(shapes)


def nice_ticks(most: float, about: int = 5) -> list[float]:
    """Round numbers from 0 up to at most ``most``, about so many."""
    if most <= 0:
        return [0.0]
    step = 10.0 ** math.floor(math.log10(most / about))
    for factor in (1, 2, 5, 10):
        if most / (step * factor) <= about:
            step *= factor
            break
    return [step * number for number in range(int(most / step + 1e-9) + 1)]
