# SPDX-License-Identifier: Apache-2.0
"""The engine on a simulated CUDA device: no race, no wait of the host, one order of collectives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.limits import PROCESS_S

from device import guard
from device.runner import OTHERWISE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(guard.why_not() is not None, reason=str(guard.why_not())),
]

TESTS = Path(__file__).resolve().parents[1]


def ask(request):
    """Lines of `python -m device`, which loads the guard before torch."""
    inherited = os.environ.get("PYTHONPATH", "")
    environment = os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{inherited}"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "device", request],
        env=environment,
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def runs():
    return ask("programs")


def test_every_program_runs_without_a_finding(runs):
    assert len({run["program"] for run in runs}) > 50
    wrong = {
        (run["program"], run["rank"], run["answers"]): run["failure"] or run["findings"]
        for run in runs
        if run["failure"] or run["findings"]
    }
    assert wrong == {}


def test_the_host_waits_only_where_it_must(runs):
    unexpected = {run["program"]: run["unexpected"] for run in runs if run["unexpected"]}
    assert unexpected == {}


def test_ranks_issue_collectives_in_one_order(runs):
    by_program = {}
    for run in runs:
        orders = by_program.setdefault(run["program"], [])
        orders.append(run["collectives"])
    compared = [name for name, orders in by_program.items() if len(orders) > 1]
    assert set(compared) >= set(OTHERWISE)
    for name in compared:
        assert all(order == by_program[name][0] for order in by_program[name]), name


def test_every_fault_is_found():
    verdicts = ask("mutants")
    assert len(verdicts) >= 30
    missed = [each["mutant"] for each in verdicts if not each["equivalent"] and not each["found"]]
    assert missed == []
    alarms = {each["mutant"]: each["found"] for each in verdicts if each["equivalent"]}
    assert not any(alarms.values()), alarms
