# SPDX-License-Identifier: Apache-2.0
"""Boxes, arrows and texts as SVG that follows light and dark."""

import itertools
import textwrap
from collections.abc import Callable
from html import escape

STYLE = """
text { font: 14px system-ui, sans-serif; fill: #24292f }
text.small { font-size: 12px; fill: #57606a }
text.title { font-weight: 600 }
.line { stroke: #57606a; stroke-width: 1.5; fill: none }
.tip { fill: #57606a }
.dash { stroke-dasharray: 5 4 }
.plain { fill: #f6f8fa; stroke: #8c959f }
.shard { fill: #b6d7ff; stroke: #1f6feb }
.full { fill: #ffd8a8; stroke: #bc4c00 }
.grad { fill: #d8c7ff; stroke: #6639ba }
.good { fill: #b7ebc0; stroke: #1a7f37 }
.away { fill: #ffc9c9; stroke: #cf222e }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  text.small { fill: #c9d1d9 }
  .line { stroke: #9da7b3 }
  .tip { fill: #9da7b3 }
  .plain { fill: #21262d; stroke: #6e7681 }
  .shard { fill: #12407a; stroke: #58a6ff }
  .full { fill: #6b3a10; stroke: #f0883e }
  .grad { fill: #43307a; stroke: #b392f0 }
  .good { fill: #14532d; stroke: #3fb950 }
  .away { fill: #6e1f24; stroke: #ff7b72 }
}
"""

PICTURES: dict[str, Callable[[], "Picture"]] = {}


class Picture:
    """An SVG that grows element by element; lengths are pixels, y points down."""

    def __init__(self, width: int, height: int, told: str) -> None:
        """Start a picture; ``told`` is what somebody hears who cannot see it."""
        self.size = (width, height)
        self.told = told
        self.parts: list[str] = []

    def note(self, text) -> None:
        """Put a caption below everything, in as many lines as it takes."""
        width, height = self.size
        for line in textwrap.wrap(text, width // 7):
            self.text(20, height + 10, line, "small")
            height += 18
        self.size = (width, height + 4)

    def box(self, x, y, width, height, kind="plain", text="", below="") -> None:
        self.parts.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>'
        )
        middle = y + height / 2 + (5 if not below else -3)
        if text:
            self.text(x + width / 2, middle, text, anchor="middle")
        if below:
            self.text(x + width / 2, middle + 17, below, "small", anchor="middle")

    def text(self, x, y, text, kind="", anchor="start") -> None:
        self.parts.append(
            f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def arrow(self, *points, text="", dash=False, above=8) -> None:
        """Draw a line through ``points`` with a tip at its end, and a text over its longest leg."""
        path = " L".join(f"{x} {y}" for x, y in points)
        kind = "line dash" if dash else "line"
        self.parts.append(f'<path class="{kind}" marker-end="url(#tip)" d="M{path}"/>')
        if text:
            legs = list(itertools.pairwise(points))
            (x0, y0), (x1, y1) = max(
                legs, key=lambda leg: abs(leg[0][0] - leg[1][0]) + abs(leg[0][1] - leg[1][1])
            )
            upright = x0 == x1
            place = (
                (x0 + x1) / 2 + (8 if upright else 0),
                (y0 + y1) / 2 - (0 if upright else above),
            )
            self.text(*place, text, "small", "start" if upright else "middle")

    def svg(self) -> str:
        width, height = self.size
        tip = (
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" '
            'markerHeight="8" orient="auto-start-reverse"><path class="tip" d="M0 0 L10 5 L0 10z"/>'
            "</marker></defs>"
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img"><title>{escape(self.told)}</title>'
        )
        return "\n".join([head, f"<style>{STYLE}</style>", tip, *self.parts, "</svg>", ""])


def picture(draw: Callable[[], Picture]) -> Callable[[], Picture]:
    PICTURES[draw.__name__.replace("_", "-")] = draw
    return draw
