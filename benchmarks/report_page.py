# SPDX-License-Identifier: Apache-2.0
"""How long does the page of a large run take to make, to open, and to answer in a browser?

    python benchmarks/report_page.py [--ranks 512] [--units 100] [--steps 10] [--rounds 7]
        [--folder RUN_DIR] [--picture FILE.png] [--chromium PATH] [--out FILE.json]

The run is made up (`support.simulated_runs`), in the files that ranks write, every step op by op; a
rank is slow in the backward of one unit. ``--folder`` keeps it, or takes one that is there. Its
page is opened in Chromium without a window. "read" ends when the verdict is painted, "open" with
the first chart, a step op by op, "drawn" with the last one. "hover" lasts from a move of the mouse
until its text stands there, "zoom" from letting go of the mouse until the chart is drawn anew,
"step" from a click on another step. Medians over the rounds: seconds, and those of the processor in
the page's main thread, which a busy machine lengthens less. Needs playwright, and a Chromium of the
system.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright
from report import write_report
from rich.console import Console
from rich.table import Table

from fullshard.report import write_report as write_page

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-quic", "--disable-component-update", "--disable-sync"]
DRAWN_ANEW = """() => new Promise(done => document.getElementById('gantt').once('plotly_afterplot',
  () => requestAnimationFrame(() => setTimeout(() => done(performance.now())))))"""


def make_run(folder, ranks, units, steps):
    """Write the record of a run that nobody ran."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support.simulated_runs import Simulated, write  # noqa: PLC0415 - of the tests

    slow = {(ranks * 3 // 5, "backward", units * 4 // 7): 0.1}
    run = Simulated(ranks, units - 1, steps, slow=slow, link_s=3e-3, issue_s=2e-5)
    write(run.run(), folder)


class Watch:
    """A stop-watch of the clock, and of the processor in a page's main thread."""

    def __init__(self, page):
        self._session = page.context.new_cdp_session(page)
        self._session.send("Performance.enable", {"timeDomain": "threadTicks"})
        self._begin = self._now()

    def read(self):
        return tuple(now - begin for now, begin in zip(self._now(), self._begin, strict=True))

    def _now(self):
        metrics = self._session.send("Performance.getMetrics")["metrics"]
        (cpu_s,) = (each["value"] for each in metrics if each["name"] == "TaskDuration")
        return time.perf_counter(), cpu_s


def opened(browser, path):
    """Open the page; return it, and the seconds until it stands there."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    watch = Watch(page)
    page.goto(path.as_uri(), wait_until="commit")
    times = {}
    for name, selector in (("open", "#gantt .main-svg"), ("drawn", "body[data-drawn]")):
        page.wait_for_selector(selector, state="attached", timeout=120_000)
        times[name] = watch.read()
    painted_ms = page.evaluate(
        "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    )
    return page, {"read": (painted_ms / 1e3, None), **times}


def answers(page):
    """Use the chart of a step as a person does; return the seconds that it takes to answer."""
    times = {}
    plot = page.locator("#gantt .nsewdrag").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    y = box["y"] + 20
    page.mouse.move(box["x"] + 5, y)
    watch = Watch(page)
    page.mouse.move(box["x"] + box["width"] * 0.3, y)
    page.wait_for_selector("#gantt .hovertext", state="attached")
    times["hover"] = watch.read()
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.4, y + 2, steps=4)
    times["zoom"] = _until_drawn(page, page.mouse.up)
    if (other := page.locator("#gantt .updatemenu-button").first).count():
        times["step"] = _until_drawn(page, other.click)
    return times


def _until_drawn(page, act):
    page.evaluate(f"window.drawnAnew = ({DRAWN_ANEW})(); 0")
    watch = Watch(page)
    act()
    page.evaluate("window.drawnAnew")
    return watch.read()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--units", type=int, default=100)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "trace").exists():
            make_run(folder, options.ranks, options.units, options.steps)
        begin = time.perf_counter()
        verdict, path = write_page(folder)
        made_s = time.perf_counter() - begin
        times = measured(options, path)
        size = path.stat().st_size
        record = sum(each.stat().st_size for each in (folder / "trace").iterdir())
    print(verdict)
    print(f"record {record / 2**20:.0f} MiB, page {size / 2**20:.1f} MiB, made in {made_s:.0f} s")
    table = Table("", "s", "processor s")
    rows = [{"what": "make", "seconds": made_s, "page_bytes": size}]
    for what, took in times.items():
        row = {"what": what, "seconds": statistics.median(wall_s for wall_s, _ in took)}
        if cpu := [cpu_s for _, cpu_s in took if cpu_s is not None]:
            row["processor_s"] = statistics.median(cpu)
        rows.append(row)
        table.add_row(
            *(f"{each:.2f}" if isinstance(each, float) else each for each in row.values())
        )
    Console().print(table)
    write_report(options.out, rows)


def measured(options, path):
    """Open the page in each round, in a browser of its own; return seconds by what took them."""
    times = {}
    with sync_playwright() as playwright:
        for number in range(options.rounds):
            browser = playwright.chromium.launch(executable_path=options.chromium, args=FLAGS)
            page, took = opened(browser, path)
            for what, seconds in {**took, **answers(page)}.items():
                times.setdefault(what, []).append(seconds)
            if options.picture and not number:
                page.screenshot(path=options.picture, full_page=True)
            browser.close()
    return times


if __name__ == "__main__":
    main()
