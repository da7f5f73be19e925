# SPDX-License-Identifier: Apache-2.0
"""Words for people: bytes, seconds, rows in columns, the nearest name, and files of them."""

import argparse
import difflib
import math
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keep the lines of a help; wrap what is too long for the terminal below its last column."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(_wrapped(indent + line, width) for line in text.splitlines())


def _wrapped(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    starts = [match.end() for match in re.finditer(r"(?:^|\S) {2,}(?=\S)", line)]
    column = starts[-1] if starts and starts[-1] <= width - 16 else 4 if starts else 0
    return textwrap.fill(
        line[column:] if line[:column].strip() else line.strip(),
        width,
        initial_indent=line[:column],
        subsequent_indent=" " * column,
        break_long_words=False,
        break_on_hyphens=False,
    )


def bytes_text(count: int) -> str:
    """``count`` bytes in the largest unit of which there is one: 1536 is "1.50 KiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{count} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def seconds_text(seconds: float) -> str:
    """``seconds`` to about three digits: "1,234 s", "1.20 s", "8.2 ms", "70 us"."""
    if not math.isfinite(seconds):
        return "unknown"
    size = abs(seconds)
    if size >= 100:
        return f"{seconds:,.0f} s"
    if size >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if size >= 1e-3 else f"{seconds * 1e6:.0f} us"


def in_columns(rows: Sequence[Sequence[object]], right: Sequence[int] = ()) -> str:
    """Rows of cells as lines of equal columns; those numbered in ``right`` end together.

    The first row is the head: a line is drawn below it. Numbers get thousands separators.
    """
    texts = [[f"{cell:,}" if type(cell) is int else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    texts.insert(1, ["-" * width for width in widths])
    lines = []
    for row in texts:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Ask for the nearest of ``known``, as a sentence with a space behind; "" if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}? " if near else ""


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Give the path to write to, whose file becomes ``path`` when the ``with`` ends well.

    Else what was there before stays. A device or pipe is written to itself. An `OSError` names
    ``path``.
    """
    target = Path(path)
    if not target.exists() or target.is_file():
        target = Path(os.path.realpath(path))
    direct = target.exists() and not target.is_file()
    staged = target if direct else target.with_name(f".partial-{target.name}")
    try:
        yield staged
        if not direct:
            staged.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        if not direct:
            staged.unlink(missing_ok=True)


def write_whole(path: str | Path, text: str) -> None:
    """Write ``text`` as `whole_file` does, in UTF-8. Raises `OSError`."""
    with whole_file(path) as staged:
        staged.write_text(text, encoding="utf-8")
