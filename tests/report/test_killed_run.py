# SPDX-License-Identifier: Apache-2.0
"""A run that was killed outright and started again: its record tells of both, second by second."""

import signal
import time

import pytest
from support.limits import PROCESS_S
from support.recording_workers import train_on_threads
from support.world import ranks_context

from fullshard.report import read_run, record_path
from fullshard.report.goodput import goodput
from fullshard.report.measure import measure
from fullshard.report.summary import report_of


def train(folder, *arguments):
    process = ranks_context().Process(target=train_on_threads, args=(str(folder), *arguments))
    process.start()
    process.join(PROCESS_S)
    return process.exitcode


@pytest.fixture(scope="module", params=[2, 3], ids=["as many ranks", "more ranks"])
def killed(request, tmp_path_factory):
    """A folder, the seconds from the first process's begin to the last one's end, and ranks."""
    folder, begin = tmp_path_factory.mktemp("killed"), time.time()
    # A step is written when the next one begins to compute: of step 7 there is no line.
    assert train(folder, 2, 0, 9, 8) == -signal.SIGKILL
    assert train(folder, request.param, 6, 12, None) == 0
    return folder, time.time() - begin, request.param


def test_goodput_and_badput_add_up_to_the_wall_time(killed):
    folder, outside_s, _ = killed
    run = read_run(folder)
    wall = goodput(run, measure(run))
    assert sum(wall.seconds.values()) == pytest.approx(wall.wall_s, rel=0.005)
    assert 0 < wall.wall_s <= outside_s
    assert {"start", "data", "checkpoint", "down", "lost work"} <= wall.seconds.keys()
    assert all(seconds >= 0 for seconds in wall.seconds.values())


def test_the_steps_that_were_done_again_are_lost_work_of_the_first_attempt(killed):
    folder, _, _ = killed
    first, second = read_run(folder).ranks[0].attempts
    assert [each.step for each in first.steps][-1] == 6
    assert [each.step for each in second.steps] == list(range(6, 12))
    (again,) = [each for each in first.steps if each.step == 6]
    run = read_run(folder)
    wall = goodput(run, measure(run))
    assert wall.seconds["lost work"] >= again.duration_s / 3  # the mean over up to three ranks


def test_the_report_says_that_the_run_was_started_twice(killed):
    folder, _, ranks = killed
    report = report_of(folder)
    assert report.measured.ranks == tuple(range(ranks))
    assert any("started 2 times" in note for note in report.notes)


def test_half_a_line_and_a_missing_rank_are_said(killed, tmp_path):
    folder, _, _ = killed
    (tmp_path / "trace").mkdir()
    text = record_path(folder, 0).read_bytes()
    record_path(tmp_path, 0).write_bytes(text[:-100])
    notes = report_of(tmp_path).notes
    assert any("lines of the record cannot be read" in note for note in notes)
    assert any("no record of rank" in note for note in notes)
