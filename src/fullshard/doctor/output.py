# SPDX-License-Identifier: Apache-2.0
"""The report for people and for machines."""

import dataclasses
import json
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from fullshard.core.text import in_columns
from fullshard.doctor.findings import Finding
from fullshard.doctor.links import Links, bus_bytes_per_s

_ORDER = ("severe", "warning", "note")


@dataclass(frozen=True)
class Report:
    """The result of one run of the doctor. ``facts`` are by host."""

    facts: dict[str, dict[str, str]]
    findings: list[Finding]
    links: Links | None = None

    @property
    def is_bad(self) -> bool:
        """True if anything severe was found."""
        return any(finding.severity == "severe" for finding in self.findings)


def to_json(report: Report) -> str:
    """Return facts, findings, links (with ``bus_bytes_per_s``) and "severe" as JSON."""
    links = None
    if report.links is not None:
        links = dataclasses.asdict(report.links)
        for each in links["times"]:
            for what in ("gather", "reduce"):
                time_s = each[f"{what}_s"]
                rate = bus_bytes_per_s(each["full_bytes"], time_s, report.links.ranks)
                each[f"{what}_bus_bytes_per_s"] = rate
    findings = [dataclasses.asdict(finding) for finding in report.findings]
    whole = {"severe": report.is_bad, "facts": report.facts, "findings": findings, "links": links}
    return json.dumps(whole, indent=1)


def print_report(report: Report) -> None:
    """Print to stdout: what is there, how fast the links are, what was found."""
    for host, known in report.facts.items():
        print(f"{host}:")
        width = max(map(len, known))
        print("".join(f"  {name:<{width}}  {value}\n" for name, value in known.items()))
    if report.links is not None:
        links = report.links
        title = f"links between {links.ranks} ranks over {links.backend}, float32"
        rows = [_LINK_COLUMNS, *_link_rows(links)]
        print(f"{title}\n{in_columns(rows, right=range(len(_LINK_COLUMNS)))}\n")
    for severity in _ORDER:
        for finding in report.findings:
            if finding.severity == severity:
                where = f"{finding.where}: " if finding.where else ""
                print(f"{severity}: {where}{finding.what}")
                print(f"{_wrapped('    ', finding.means)}\n{_wrapped('    -> ', finding.fix)}\n")
    counts = [
        f"{sum(finding.severity == severity for finding in report.findings)} {severity}"
        for severity in _ORDER
    ]
    print(f"found: {', '.join(counts)}")


def _wrapped(lead: str, text: str) -> str:
    """Wrap ``text`` to the terminal (80 columns in a pipe); names and options stay whole."""
    return textwrap.fill(
        text,
        shutil.get_terminal_size().columns,
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_long_words=False,
        break_on_hyphens=False,
    )


_LINK_COLUMNS = ("full buffer", "all-gather ms", "GB/s a rank", "reduce-scatter ms", "GB/s a rank")


def _link_rows(links: Links) -> Iterator[list[object]]:
    for each in links.times:
        row: list[object] = [f"{each.full_bytes / 2**20:.4g} MiB"]
        for time_s in (each.gather_s, each.reduce_s):
            rate = bus_bytes_per_s(each.full_bytes, time_s, links.ranks)
            row += [f"{time_s * 1e3:.2f}", f"{rate / 1e9:.2f}"]
        yield row
