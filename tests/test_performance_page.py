# SPDX-License-Identifier: Apache-2.0
"""docs/performance.md says what the committed result files say."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "write_page.py"


@pytest.fixture(scope="module")
def write_page():
    spec = importlib.util.spec_from_file_location("write_page", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def report(write_page, tmp_path, monkeypatch):
    """Makes a report of a script with a question, an example of use and a word on how."""
    monkeypatch.setattr(write_page, "BENCHMARKS", tmp_path / "benchmarks")
    write_page.BENCHMARKS.mkdir()
    docstring = "How\nlong?\n\n    python benchmarks/ask.py\n\nBy asking.\n"
    (write_page.BENCHMARKS / "ask.py").write_text(f'"""{docstring}"""\n')
    about = {"command": "python benchmarks/ask.py", "torch": "2.13", "python": "3.11", "cores": 2}
    return lambda rows: {**about, "rows": rows}


def test_the_page_is_what_the_script_makes(write_page):
    page = write_page.PAGE.read_text("utf-8")
    results = write_page.results()
    assert results
    assert write_page.with_tables(page, results) == page, "run python benchmarks/write_page.py"


def test_every_result_is_in_the_history_and_the_picture_is_drawn_from_it(write_page):
    history = [json.loads(line) for line in write_page.HISTORY.read_text("utf-8").splitlines()]
    rerun = "run python benchmarks/write_page.py"
    assert write_page.with_new_runs(history, write_page.results()) == history, rerun
    last = {line["name"]: line["commit"] for line in history if line["name"] in write_page.DRAWN}
    assert last.keys() == write_page.DRAWN.keys()
    picture = write_page.PICTURE.read_text("utf-8")
    assert not [commit for commit in last.values() if commit not in picture], rerun
    assert len(write_page.drawn(history).axes) == len(last)


def test_a_run_adds_a_line_without_lists_and_only_once(write_page, report):
    made = report([{"engine": "ours", "step_s": 1.23456, "seconds": [1.0]}])
    (line,) = write_page.with_new_runs([], {"step": {**made, "commit": "abc"}})
    assert line["name"] == "step"
    assert line["commit"] == "abc"
    assert line["rows"] == [{"engine": "ours", "step_s": 1.235}]
    assert write_page.with_new_runs([line], {"step": made}) == [line]


def test_a_report_becomes_a_table(write_page, report):
    rows = {
        "ours": {"hosts": 2, "step_s": 1.23456, "sent_bytes": 255_600_000, "seconds": [1.0]},
        "theirs": {"hosts": 2, "step_s": None, "sent_bytes": 5_000_000_000, "seconds": [2.0]},
    }
    assert write_page.section(report(rows)).splitlines() == [
        "## How long?",
        "",
        "By asking.",
        "",
        "| engine | step s | sent MB |",
        "| --- | --- | --- |",
        "| ours | 1.23 | 256 |",
        "| theirs |  | 5000 |",
        "",
        "`python benchmarks/ask.py`; torch 2.13, Python 3.11, 2 cores; hosts 2.",
    ]


def test_rows_beside_settings(write_page):
    rows = {"ranks": 4, "ways": [{"way": "a", "n": 1}, {"way": "b", "n": 2}]}
    flat = write_page.flat_rows(rows)
    assert flat == [{"ranks": 4, "way": "a", "n": 1}, {"ranks": 4, "way": "b", "n": 2}]
    assert write_page.parted(flat) == (["ranks"], ["way", "n"])


def test_only_the_measured_part_is_replaced(write_page, report):
    page = f"by hand\n{write_page.BEGIN}old\n{write_page.END}after\n"
    made = write_page.with_tables(page, {"b": report([{"n": 1}]), "a": report([{"n": 2}])})
    assert made.startswith("by hand\n")
    assert made.endswith("after\n")
    assert "old" not in made
    assert made.index("| 2 |") < made.index("| 1 |")
    assert write_page.with_tables(made, {"a": report([{"n": 2}]), "b": report([{"n": 1}])}) == made
    with pytest.raises(ValueError, match="must hold the lines"):
        write_page.with_tables("no marks", {})
