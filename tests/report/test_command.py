# SPDX-License-Identifier: Apache-2.0
"""``fullshard report``: text, JSON, page and picture, from files alone."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.golden import check_golden
from support.limits import PROCESS_S
from support.simulated_runs import Simulated, restarted, write

from fullshard.cli import main
from fullshard.report import RankRecord, RunRecord
from fullshard.report.page import draw_report, write_page
from fullshard.report.summary import report_of
from fullshard.train.metrics import say_report

GOLDEN = Path(__file__).parents[1] / "golden"
NASTY = "<script>alert(1)</script><b>[bold]x</b>&amp;$\\frac$%{x}"
RUNS = {
    "slow_rank": Simulated(slow={(2, "forward", 3): 8e-3}),
    "healthy": Simulated(world=2),
    "link": Simulated(link_s=9e-3),
}
PLACES = {"chromium", "chromium-browser", "google-chrome"}
CHROMIUM = next(filter(None, map(shutil.which, sorted(PLACES))), None)


def named(run, name):
    """The record of ``run`` with a name for its second unit and a span."""
    ranks = {}
    for rank, record in run.ranks.items():
        (attempt,) = record.attempts
        units = list(attempt.facts.units)
        units[1] = units[1]._replace(name=name)
        steps = [
            replace(step, spans=[step.spans[0], step.spans[1]._replace(what=name)])
            for step in attempt.steps
        ]
        facts = replace(attempt.facts, units=units)
        ranks[rank] = RankRecord(rank, (replace(attempt, facts=facts, steps=steps),))
    return RunRecord(ranks)


@pytest.mark.parametrize("name", RUNS)
def test_text_begins_with_the_verdict(name, tmp_path, capsys):
    folder = write(RUNS[name].run(), tmp_path)
    assert main(["report", folder]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == report_of(folder).verdict
    check_golden(GOLDEN / f"report_{name}.txt", out, 1000)


def test_a_second_run_is_compared_with_and_a_restart_is_told(tmp_path, capsys):
    first, second = tmp_path / "a", tmp_path / "b"
    write(restarted(Simulated(steps=5), Simulated(steps=6, first_step=3), 2.0), first)
    write(Simulated(data_s=9e-3).run(), second)
    assert main(["report", str(first), str(second)]) == 0
    out = capsys.readouterr().out
    check_golden(GOLDEN / "report_restarted.txt", out, 1000)
    for words in ("lost work", "down", "the run was started 2 times", "Against the other run"):
        assert words in out


def test_json_has_what_the_text_has(tmp_path, capsys):
    folder = write(RUNS["slow_rank"].run(), tmp_path)
    assert main(["report", folder, folder, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["diagnoses"][0]["cause"] == "slow rank in forward"
    assert told["diagnoses"][0]["rank"] == 2
    assert not any(row["real"] for row in told["changes"])
    assert sum(told["step_s"].values()) == pytest.approx(told["figures"]["step"]["value"], rel=0.02)


def test_what_is_no_run_is_refused_by_name(tmp_path, capsys):
    folder = tmp_path / "no run"
    good = write(RUNS["healthy"].run(), tmp_path / "run")
    for arguments, words in (
        ([str(folder)], "no run' holds no record: expected trace/rank-00000.jsonl"),
        ([good, str(folder)], "no run' holds no record"),
        ([good, "--html", str(folder / "x.html")], "has no folder"),
        ([good, "--png", good], "it is a folder"),
        ([good, "--png", str(tmp_path / "x.docx")], "cannot draw to"),
    ):
        assert main(["report", *arguments]) == 2
        assert words in capsys.readouterr().err
    for path in (tmp_path / "run" / "trace").glob("rank-*.jsonl"):
        path.write_bytes(b"\x00{]\n" * 3)
    assert main(["report", good]) == 2
    assert "rank-00000.jsonl" in capsys.readouterr().err


def test_it_loads_neither_torch_nor_jax(tmp_path):
    folder = write(RUNS["healthy"].run(), tmp_path)
    program = "import sys; from fullshard.cli import main; code = main(sys.argv[1:]); "
    program += "sys.exit(code or bool({'torch', 'jax'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program, "report", folder, "--html", tmp_path / "x.html"],
        capture_output=True,
        timeout=PROCESS_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.long
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_show_names_as_they_are(tmp_path, suffix):
    write(named(RUNS["slow_rank"].run(), NASTY), tmp_path)
    path = tmp_path / f"x.{suffix}"
    draw_report(report_of(tmp_path), path)
    assert path.stat().st_size > 10_000


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    with api.sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield started
        started.close()


def opened(browser, path):
    """A page whose charts are drawn, and what was said on its console."""
    page, said = browser.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: said.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("body[data-drawn]", state="attached")
    return page, [each for each in said if not each.startswith(("file:", "data:", "blob:"))]


def test_the_page_works_in_a_browser_and_names_with_markup_are_text(tmp_path, browser):
    write(named(RUNS["slow_rank"].run(), NASTY), tmp_path)
    report, path = report_of(tmp_path), tmp_path / "report.html"
    write_page(report, path, report)
    page, said = opened(browser, path)
    assert said == []
    assert page.inner_text("h1") == report.verdict
    assert page.locator(".chart .main-svg").count() >= 6
    texts = page.locator("#exposed .xtick text").all_text_contents()
    assert any("<script>alert" in text for text in texts), texts
    assert NASTY in page.inner_text("main")
    assert page.locator("main b", has_text="[bold]x").count() == 0

    def span():
        return page.evaluate("document.getElementById('gantt')._fullLayout.xaxis.range")

    plot, before = page.locator("#gantt .nsewdrag").first, span()
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 20)
    page.wait_for_selector("#gantt .hovertext", state="attached")
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 22, steps=5)
    page.mouse.up()
    page.wait_for_function(
        f"document.getElementById('gantt')._fullLayout.xaxis.range[1] < {before[1]}"
    )


def test_a_page_of_many_ranks_shows_some_of_them_op_by_op(tmp_path, browser):
    write(Simulated(world=40, blocks=40, steps=4, slow={(33, "data", None): 9e-2}).run(), tmp_path)
    path = tmp_path / "report.html"
    write_page(report_of(tmp_path), path)
    page, said = opened(browser, path)
    assert said == []
    assert "ranks of 40" in page.inner_text("#title-gantt")
    assert "rank 33" in page.inner_text("#gantt")
    shown = """document.getElementById('gantt').data.filter(each => each.visible === true)
        .reduce((n, each) => n + each.x.length, 0)"""
    assert 500 < page.evaluate(shown) < 8000


def test_another_step_is_shown_where_it_is_chosen(tmp_path, browser):
    write(Simulated(world=2, steps=5, slow={(1, "data", None): 9e-2}).run(), tmp_path)
    path = tmp_path / "report.html"
    write_page(report_of(tmp_path), path)
    page, said = opened(browser, path)
    assert page.inner_text("#title-gantt") == "Steps 2, 3, 4"
    lanes = "document.getElementById('gantt').data.filter(each => each.type === 'heatmap')"
    visible = f"{lanes}.map(each => each.visible === true)"
    before = page.evaluate(visible)
    page.locator("#gantt .updatemenu-button", has_text="step 2").click()
    page.wait_for_function(
        f"JSON.stringify({visible}) !== '{json.dumps(before)}'.replace(/ /g, '')"
    )
    after = page.evaluate(visible)
    assert after[:4] == before[-4:] == [True] * 4
    assert after[4:] == before[:-4] == [False] * 8
    assert said == []


class Reporter:
    def __init__(self, folder):
        self.folder, self.said = folder, []
        self.say = self.said.append


def test_training_says_its_verdict_and_where_the_page_is(tmp_path):
    write(RUNS["slow_rank"].run(), tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with_record, without, nowhere = map(Reporter, (tmp_path / "run", tmp_path / "empty", None))
    for reporter in (with_record, without, nowhere):
        say_report(reporter)
    verdict = report_of(tmp_path / "run").verdict
    path = tmp_path / "run" / "report.html"
    assert with_record.said == [f"{verdict}\nreport: {path}"]
    assert path.stat().st_size > 1_000_000
    assert without.said[0].startswith("no report: ")
    assert nowhere.said == []
