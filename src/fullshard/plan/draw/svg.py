# SPDX-License-Identifier: Apache-2.0
"""Drawings as SVG."""

from pathlib import Path as FilePath
from xml.sax.saxutils import escape, quoteattr

from fullshard.plan.draw.drawing import Box, Drawing, Path, Shape

__all__ = ["svg_of", "write_svg"]


def svg_of(drawing: Drawing) -> str:
    """The drawing as a whole SVG document, which a browser shows and a page may embed."""
    size = f'width="{drawing.width:g}" height="{drawing.height:g}"'
    box = f'viewBox="0 0 {drawing.width:g} {drawing.height:g}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} role="img" '
        'font-family="system-ui, sans-serif">',
        f"<title>{escape(drawing.description)}</title>",
        f'<rect {size} fill="#ffffff"/>',
        *map(_element, drawing.shapes),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def write_svg(drawing: Drawing, path: str | FilePath) -> None:
    """Write the drawing to a file."""
    FilePath(path).write_text(svg_of(drawing), encoding="utf-8")


def _element(shape: Shape) -> str:
    if isinstance(shape, Box):
        place = f'x="{shape.x:.2f}" y="{shape.y:.2f}"'
        size = f'width="{shape.width:.2f}" height="{shape.height:.2f}"'
        return _with_title(f'<rect {place} {size} fill="{shape.fill}"', "rect", shape.title)
    if isinstance(shape, Path):
        return _path(shape)
    weight = ' font-weight="600"' if shape.bold else ""
    return (
        f'<text x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size:g}" '
        f'text-anchor="{shape.anchor}" fill="{shape.fill}"{weight}>{escape(shape.text)}</text>'
    )


def _path(path: Path) -> str:
    points = " ".join(f"{x:.2f},{y:.2f}" for x, y in path.points)
    if path.fill:
        return _with_title(f'<polygon points="{points}" fill="{path.fill}"', "polygon", path.title)
    dashes = ' stroke-dasharray="5 4"' if path.dashed else ""
    stroke = f'fill="none" stroke="{path.stroke}" stroke-width="{path.width:g}"{dashes}'
    return _with_title(f"<polyline points={quoteattr(points)} {stroke}", "polyline", path.title)


def _with_title(begin: str, tag: str, title: str) -> str:
    if not title:
        return begin + "/>"
    return f"{begin}><title>{escape(title)}</title></{tag}>"
