# SPDX-License-Identifier: Apache-2.0
"""Pictures of a plan as lines of text, 100 columns at most.

Lines may carry rich's markup for colour; without it categories are told apart by their letters.
"""

from collections.abc import Iterable, Sequence

from fullshard.core.text import bytes_text
from fullshard.plan.draw.drawing import CATEGORY_COLOURS, UNIT_COLOURS
from fullshard.plan.draw.streams import STREAMS, Stretch
from fullshard.plan.memory.forecast import Sample

__all__ = ["memory_lines", "stream_lines"]

_LETTERS = dict(zip(CATEGORY_COLOURS, "CPOGUALS", strict=True))
_MARGIN = 11


def memory_lines(
    samples: Sequence[Sample],
    *,
    capacity_bytes: int | None = None,
    width: int = 100,
    height: int = 14,
    markup: bool = False,
) -> list[str]:
    """Memory over a step as stacked columns, the peak and its cause below.

    Each column is the largest of the samples that fall into it.
    """
    columns = min(width - _MARGIN, len(samples))
    shown = [
        max(
            samples[number * len(samples) // columns : (number + 1) * len(samples) // columns],
            key=lambda each: each.total_bytes,
        )
        for number in range(columns)
    ]
    peak = max(samples, key=lambda each: each.total_bytes)
    most = max(peak.total_bytes, 1)
    stacks = [_stack(each, most, height) for each in shown]
    lines = []
    for row in range(height - 1, -1, -1):
        level = most * (row + 1) / height if row in (height - 1, height // 2, 0) else None
        axis = bytes_text(round(level)) if level is not None else ""
        cells = (stack[row] if row < len(stack) else "" for stack in stacks)
        lines.append(f"{axis:>{_MARGIN - 1}} " + _painted(cells, markup))
    backward = next((n for n, each in enumerate(shown) if each.label.startswith("backward")), 0)
    if backward:
        below = f"{'forward':^{backward}}|{'backward':^{max(0, columns - backward - 1)}}"
        lines.append(" " * _MARGIN + below.rstrip())
    lines.append(f"peak {bytes_text(peak.total_bytes)} at the {peak.label}"[:width])
    if capacity_bytes is not None:
        spare = capacity_bytes - peak.total_bytes
        word = "spare" if spare >= 0 else "too little"
        lines.append(f"device {bytes_text(capacity_bytes)}: {bytes_text(abs(spare))} {word}")
    lines += _legend(peak, width, markup)
    return lines


def _stack(sample: Sample, most: int, height: int) -> list[str]:
    """The category in each row of a column, from below."""
    rows: list[str] = []
    held = 0
    for category in CATEGORY_COLOURS:
        held += sample.bytes.get(category, 0)
        rows += [category] * (round(held * height / most) - len(rows))
    return rows


def _painted(cells: Iterable[str], markup: bool) -> str:
    painted, last = "", ""
    for category in cells:
        if not markup:
            painted += _LETTERS.get(category, " ")
            continue
        if category != last:
            painted += "[/]" if last else ""
            painted += f"[{CATEGORY_COLOURS[category]}]" if category else ""
            last = category
        painted += "█" if category else " "
    return painted.rstrip() if not markup else painted + ("[/]" if last else "")


def _legend(peak: Sample, width: int, markup: bool) -> list[str]:
    entries = []
    for category, colour in CATEGORY_COLOURS.items():
        size = peak.bytes.get(category, 0)
        if size:
            sign = f"[{colour}]█[/]" if markup else _LETTERS[category]
            entries.append((sign, f" {category} {bytes_text(size)}"))
    lines, line, long = [], "", 0
    for sign, text in entries:
        if long and long + len(text) + 3 > width:
            lines.append(line)
            line, long = "", 0
        line += ("  " if long else "") + sign + text
        long += len(text) + 3
    return [*lines, line]


def stream_lines(
    records: Sequence[Stretch], *, width: int = 100, markup: bool = False
) -> list[str]:
    """A line for each stream: which unit it works for, in each of the columns; '.' is idle."""
    end_s = max((each.stop_s for each in records), default=0.0)
    columns = width - _MARGIN
    lines = []
    for name in STREAMS:
        mine = [each for each in records if each.stream == name]
        if not mine:
            continue
        cells = ["."] * columns
        for each in mine:
            first = round(each.start_s / end_s * columns) if end_s else 0
            last = round(each.stop_s / end_s * columns) if end_s else 0
            for cell in range(first, min(columns, max(first + 1, last))):
                cells[cell] = _sign(each.unit, markup)
        lines.append(f"{name:>{_MARGIN - 1}} " + "".join(cells))
    scale = f"0{end_s * 1e3:>{columns - 4}.1f} ms"
    return [*lines, " " * _MARGIN + scale] if lines else []


def _sign(unit: int, markup: bool) -> str:
    if markup:
        return f"[{UNIT_COLOURS[unit % len(UNIT_COLOURS)]}]█[/]"
    return "0123456789abcdefghijklmnopqrstuvwxyz"[unit % 36]
