# SPDX-License-Identifier: Apache-2.0
"""Drawings as PNG, by Pillow (the extra ``plots``)."""

from itertools import pairwise
from pathlib import Path as FilePath
from typing import Any

from fullshard.core.errors import ConfigurationError
from fullshard.plan.draw.drawing import Box, Drawing, Label, Path

__all__ = ["write_png"]

_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}
_DASH, _GAP = 5.0, 4.0


def write_png(drawing: Drawing, path: str | FilePath, *, scale: float = 2.0) -> None:
    """Write the drawing to a file, ``scale`` pixels for each of its own.

    Raises `ConfigurationError` where Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ConfigurationError(
            "PNG needs Pillow: pip install -e '.[plots]', or write SVG, which needs nothing"
        ) from error
    size = (round(drawing.width * scale), round(drawing.height * scale))
    image = Image.new("RGB", size, "#ffffff")
    pen = ImageDraw.Draw(image)
    for shape in drawing.shapes:
        if isinstance(shape, Box):
            right, bottom = shape.x + shape.width, shape.y + shape.height
            corners = [shape.x * scale, shape.y * scale, right * scale, bottom * scale]
            pen.rectangle(corners, fill=shape.fill)
        elif isinstance(shape, Path):
            _draw_path(pen, shape, scale)
        else:
            _write(pen, shape, scale, ImageFont.load_default(shape.size * scale))
    image.save(FilePath(path), format="PNG")


def _draw_path(pen: Any, path: Path, scale: float) -> None:
    points = [(x * scale, y * scale) for x, y in path.points]
    if path.fill:
        pen.polygon(points, fill=path.fill)
        return
    width = max(1, round(path.width * scale))
    if not path.dashed:
        pen.line(points, fill=path.stroke, width=width, joint="curve")
        return
    for (x0, y0), (x1, y1) in pairwise(points):
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        at = 0.0
        while at < length:
            end = min(at + _DASH * scale, length)
            pen.line(
                [
                    (x0 + (x1 - x0) * at / length, y0 + (y1 - y0) * at / length),
                    (x0 + (x1 - x0) * end / length, y0 + (y1 - y0) * end / length),
                ],
                fill=path.stroke,
                width=width,
            )
            at += (_DASH + _GAP) * scale


def _write(pen: Any, label: Label, scale: float, font: Any) -> None:
    place, anchor = (label.x * scale, label.y * scale), _ANCHORS[label.anchor]
    stroke = scale * 0.3 if label.bold else 0
    pen.text(place, label.text, fill=label.fill, font=font, anchor=anchor, stroke_width=stroke)
