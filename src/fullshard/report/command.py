# SPDX-License-Identifier: Apache-2.0
"""The command ``fullshard report``: prints a report, and writes it as a page or a picture."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fullshard.core.errors import ConfigurationError
from fullshard.core.text import HelpFormatter
from fullshard.report.files import read_run
from fullshard.report.page import draw_report, write_page
from fullshard.report.summary import RunReport, report_of
from fullshard.report.tables import tables_of
from fullshard.report.trace_events import write_trace_events

_EXAMPLES = """\
examples:
  fullshard report runs/gpt-nano                     the verdict and tables, as text
  fullshard report runs/gpt-nano --html report.html  the same as a page with charts
  fullshard report runs/b runs/a                     b, and what has changed since a
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status, 0 whatever the verdict."""
    parser = argparse.ArgumentParser(
        prog="fullshard report",
        description="Tell where time and memory of a recorded run went, what limits it, and what "
        "to change. Reads what fullshard train and fullshard.report.recording leave in the folder "
        "of a run, also while it goes on; needs neither torch nor a GPU.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("run", metavar="RUN_DIR", help="folder of a run, with trace/ in it")
    parser.add_argument("other", nargs="?", metavar="OTHER_RUN", help="a run to compare it with")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--html", type=Path, metavar="PATH", help="write a page, self-contained")
    parser.add_argument("--png", type=Path, metavar="PATH", help="draw a picture: .png, .svg, .pdf")
    parser.add_argument(
        "--events", type=Path, metavar="PATH", help="write JSON that ui.perfetto.dev opens"
    )
    chosen = parser.parse_args(argv)
    for path in (chosen.html, chosen.png, chosen.events):
        _check_place(path)
    report = report_of(chosen.run)
    other = None if chosen.other is None else report_of(chosen.other)
    if chosen.html is not None:
        write_page(report, chosen.html, other)
    if chosen.png is not None:
        draw_report(report, chosen.png)
    if chosen.events is not None:
        write_trace_events(read_run(chosen.run), chosen.events)
    if chosen.json:  # last: who reads may stop reading
        print(json.dumps(report.as_json(other), indent=1))
    else:
        print_report(report, Console(width=None if os.isatty(1) else 120), other)
    return 0


def _check_place(path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"has no folder {str(path.parent)!r} to lie in"
        raise ConfigurationError(f"cannot write {str(path)!r}: it {what}")


def print_report(report: RunReport, console: Console, other: RunReport | None = None) -> None:
    """Print a report, its verdict first; with ``other`` what has changed since that run."""
    colour = "bold red" if report.diagnoses else "bold green"
    console.print(Text(report.verdict, colour), soft_wrap=True)
    for number, each in enumerate(report.diagnoses):
        if number:
            console.print(Text(f"also {each.cause}: {each.what}"), soft_wrap=True)
        for change in report.changes(each):
            console.print(Text(f"  change: {change}"), soft_wrap=True)
    for title, heads, rows in tables_of(report, other):
        console.print(Text(f"\n{title}", "bold"), soft_wrap=True)
        table = Table(box=None, header_style="dim", pad_edge=False)
        for number, head in enumerate(heads):
            table.add_column(head, justify="right" if number else "left")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
    for number, note in enumerate(report.notes):
        console.print(Text(f"{'' if number else chr(10)}note: {note}", "dim"), soft_wrap=True)
