# SPDX-License-Identifier: Apache-2.0
"""Pictures of a plan as lines of a terminal: memory and streams over a step.

In colour, or with letters where there is none.
"""

from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Console
from rich.text import Text

from fullshard.core.text import bytes_text
from fullshard.plan.memory import Sample
from fullshard.plan.pictures import (
    CATEGORY_COLOURS,
    KIND_COLOURS,
    first_backward,
    largest_of_each,
    short_names,
)
from fullshard.plan.step.clock import Busy

_LETTERS = dict(zip(CATEGORY_COLOURS, "CPOGUALS", strict=True))
_SIGNS = "0123456789abcdefghijklmnopqrstuvwxyz"
_MARGIN = 11


def print_memory(
    console: Console, samples: Sequence[Sample], *, capacity_bytes: int, height: int = 14
) -> None:
    """Print memory over a step as stacked columns, the peak and its cause below.

    A column is the largest of the samples that fall into it.
    """
    columns = min(console.width - _MARGIN, len(samples))
    shown = largest_of_each(samples, columns)
    peak = max(samples, key=lambda each: each.total_bytes)
    most = max(peak.total_bytes, 1)
    stacks = [_stack(each, most, height) for each in shown]
    for row in range(height - 1, -1, -1):
        level = most * (row + 1) / height if row in (height - 1, height // 2, 0) else None
        axis = bytes_text(round(level)) if level is not None else ""
        names = (stack[row] if row < len(stack) else "" for stack in stacks)
        cells = (
            _cell(console, _LETTERS.get(each, " "), CATEGORY_COLOURS.get(each, ""))
            for each in names
        )
        console.print(Text(f"{axis:>{_MARGIN - 1}} ").join([Text(), Text.assemble(*cells)]))
    backward = first_backward(shown)
    if backward:
        below = f"{'forward':^{backward}}|{'backward':^{max(0, columns - backward - 1)}}"
        console.print(" " * _MARGIN + below.rstrip())
    console.print(f"peak {bytes_text(peak.total_bytes)} at the {peak.label}")
    spare = capacity_bytes - peak.total_bytes
    word = "spare" if spare >= 0 else "too little"
    console.print(f"device {bytes_text(capacity_bytes)}: {bytes_text(abs(spare))} {word}")
    held = {name: size for name in CATEGORY_COLOURS if (size := peak.bytes.get(name, 0))}
    entries = [
        _cell(console, _LETTERS[name], CATEGORY_COLOURS[name]).append(
            f" {name} {bytes_text(size)}", ""
        )
        for name, size in held.items()
    ]
    console.print(Columns(entries, padding=(0, 2)))


def _cell(console: Console, letter: str, colour: str) -> Text:
    """Return a full cell of ``colour``, or ``letter`` where there are no colours."""
    if colour and console.color_system:
        return Text("█", style=colour)
    return Text(letter)


def _stack(sample: Sample, most: int, height: int) -> list[str]:
    """The category in each row of a column, from below."""
    rows: list[str] = []
    held = 0
    for category in CATEGORY_COLOURS:
        held += sample.bytes.get(category, 0)
        rows += [category] * (round(held * height / most) - len(rows))
    return rows


def print_streams(console: Console, records: Sequence[Busy], units: Sequence[str]) -> None:
    """Print a line for each kind of work: the unit that it is for, in each of the columns.

    ``units`` are the names of the units by number.
    """
    end_s = max(each.stop_s for each in records)
    columns = console.width - _MARGIN
    for kind, colour in KIND_COLOURS.items():
        mine = [each for each in records if each.kind == kind]
        if not mine:
            continue
        cells = ["."] * columns
        for each in mine:
            first, last = (round(at / end_s * columns) for at in (each.start_s, each.stop_s))
            for cell in range(first, min(columns, max(first + 1, last))):
                cells[cell] = _SIGNS[each.unit % len(_SIGNS)]
        style = colour if console.color_system else ""
        name = f"{'recompute' if kind == 'again' else kind:>{_MARGIN - 1}} "
        console.print(Text.assemble(name, ("".join(cells), style)))
    console.print(" " * _MARGIN + f"0{end_s * 1e3:>{columns - 4},.1f} ms")
    shown = short_names(units)[: len(_SIGNS)]
    told = [f"{sign} {name}" for sign, name in zip(_SIGNS, shown, strict=False)]
    more = len(units) - len(shown)
    if more > 0:
        told = [*told[:3], "...", told[-1], f"and again from 0, {len(units)} in all"]
    console.print("units: " + ", ".join(told))
