# SPDX-License-Identifier: Apache-2.0
"""Writes the measured part of docs/performance.md from the files in benchmarks/results.

    python benchmarks/write_page.py

A result file is a section: the question and how it was asked are the docstring of the script that
its command names, columns are the numbers of its rows. What is the same in all rows, or is a list,
stands in no column. The rest of the page is written by hand. Each run adds a line to
history.jsonl, lists left out, from which the picture of figures over time is drawn (matplotlib).
"""

import ast
import json
import statistics
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

BENCHMARKS = Path(__file__).parent
PAGE = BENCHMARKS.parent / "docs" / "performance.md"
HISTORY = BENCHMARKS / "results" / "history.jsonl"
PICTURE = PAGE.parent / "pictures" / "plotted" / "over-time.svg"
# The column that is drawn of a result's history, and its meaning.
DRAWN = {
    "step_netlab_2_hosts": ("of_fsdp2", "steps a second over FSDP2's: two hosts"),
    "step_netlab_4_hosts": ("of_fsdp2", "steps a second over FSDP2's: four hosts"),
    "step_loopback": ("throughput_ratio", "steps a second over FSDP2's: one host"),
    "host_time": ("ratio_to_fsdp2", "host time over FSDP2's"),
    "init_time": ("seconds_of_fsdp2", "time to shard over FSDP2's"),
    "memory": ("backward_units", "units in memory in backward"),
}
BEGIN = "<!-- From benchmarks/results by benchmarks/write_page.py: begin -->\n"
END = "<!-- end -->\n"
UNITS = {"bytes": ("MB", 1e6), "mib": ("MiB", 1), "s": ("s", 1), "seconds": ("s", 1)}


def with_tables(page, results):
    """The ``page`` with its measured part made anew from the reports in ``results``, by name."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page must hold the lines {BEGIN!r} and {END!r}")
    sections = "\n".join(section(results[name]) for name in sorted(results))
    return before + begin + "\n" + sections + "\n" + end + after


def section(report):
    """One report as Markdown."""
    script = BENCHMARKS.parent / report["command"].split()[1]
    question, *how = ast.get_docstring(ast.parse(script.read_text("utf-8"))).split("\n\n")
    how = [text for text in how if not text.startswith("    ")]
    rows = flat_rows(report["rows"])
    same, columns = parted(rows)
    said = ", ".join(f"{label(key)} {shown(key, rows[0][key])}" for key in same)
    made = f"`{report['command']}`; torch {report['torch']}, Python {report['python']}"
    lines = [f"## {' '.join(question.split())}", *how, table(rows, columns)]
    lines.append(f"{made}, {report['cores']} cores{'; ' + said if said else ''}.")
    return "\n\n".join(lines) + "\n"


def flat_rows(rows):
    """Rows as a list, however a script has put them: by engine, or in a list beside settings."""
    if isinstance(rows, list):
        return rows
    if all(isinstance(row, dict) for row in rows.values()):
        return [{"engine": name, **row} for name, row in rows.items()]
    (listed,) = (key for key, value in rows.items() if isinstance(value, list))
    settings = {key: value for key, value in rows.items() if key != listed}
    return [{**settings, **row} for row in rows[listed]]


def parted(rows):
    """Keys whose values are the same in all of several rows, and the others; lists are in none."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    keys = [k for k in keys if not any(isinstance(row.get(k), (list, dict)) for row in rows)]
    keys = [k for k in keys if any(row.get(k) is not None for row in rows)]
    same = [k for k in keys if len(rows) > 1 and len({row.get(k) for row in rows}) == 1]
    return same, [k for k in keys if k not in same]


def table(rows, columns):
    head = [label(key) for key in columns]
    body = [[shown(key, row.get(key)) for key in columns] for row in rows]
    lines = [head, ["---"] * len(columns), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def unit_of(key):
    """The unit that a key's ending names, and what to divide by."""
    return UNITS.get(key.rpartition("_")[2], ("", 1))


def label(key):
    unit, _ = unit_of(key)
    words = key.rpartition("_")[0] if unit else key
    return f"{words.replace('_', ' ')} {unit}".strip()


def shown(key, value):
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    unit, divisor = unit_of(key)
    if isinstance(value, int) and not unit:
        return str(value)
    value = value / divisor
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def results():
    """The reports of `report.write_report`, by name; others have pages of their own."""
    paths = (BENCHMARKS / "results").glob("*.json")
    found = {path.stem: json.loads(path.read_text("utf-8")) for path in paths}
    return {name: each for name, each in found.items() if "command" in each}


def with_new_runs(history, results):
    """The ``history``, and one more line for each report by name whose rows it does not have."""
    known = [(line["name"], line["rows"]) for line in history]
    lines = list(history)
    for name, report in sorted(results.items()):
        rows = [
            {key: short(value) for key, value in row.items() if not isinstance(value, list | dict)}
            for row in flat_rows(report["rows"])
        ]
        if (name, rows) not in known:
            lines.append({"name": name, "date": "", "commit": "", **report, "rows": rows})
    return lines


def short(value):
    return float(f"{value:.4g}") if isinstance(value, float) else value


def drawn(history):
    """A figure of columns in ``DRAWN`` over runs: the median over the rows of an engine of ours."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    for axes, (name, (column, meaning)) in zip(
        figure.subplots(2, 3).flat, DRAWN.items(), strict=True
    ):
        runs = [line for line in history if line["name"] == name]
        places = [f"{line['date'][5:]}\n{line['commit']}" for line in runs]
        for engine in dict.fromkeys(row["engine"] for line in runs for row in line["rows"]):
            if not engine.startswith("fullshard") or engine.startswith("fullshard FULL_SHARD, "):
                continue  # others, and compressed ones, which change with nothing else
            by_run = [[r[column] for r in line["rows"] if r["engine"] == engine] for line in runs]
            points = [(at, statistics.median(values)) for at, values in enumerate(by_run) if values]
            axes.plot(*zip(*points, strict=True), marker="o", label=engine)
        axes.set_xticks(range(len(runs)), places, fontsize=7)
        axes.set_title(meaning, fontsize=9)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=7)
    return figure


def main():
    reports = results()
    PAGE.write_text(with_tables(PAGE.read_text("utf-8"), reports), "utf-8")
    history = [json.loads(line) for line in HISTORY.read_text("utf-8").splitlines()]
    lines = with_new_runs(history, reports)
    HISTORY.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fullshard"}):
        drawn(lines).savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
