# SPDX-License-Identifier: Apache-2.0
"""The benchmark of verdicts: its draws, and one run of the real engine with a cause put in."""

import importlib
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from fullshard.report.findings import CAUSES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def diagnosis(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("diagnosis")


def test_draws_repeat_and_differ_by_seed(diagnosis):
    for cause in (*CAUSES, "healthy"):
        first, second = (diagnosis.draw_case(cause, 1, 5) for _ in range(2))
        assert first == second
        assert first != diagnosis.draw_case(cause, 1, 6)
        assert first.expected[0] == cause


def test_a_cause_in_a_run_of_the_engine_is_named_with_rank_and_unit(diagnosis):
    cause = "slow rank in backward"
    case = diagnosis.Case(cause, blocks=3, compute_s=2e-3, rank=1, block=2, cost_s=0.1, steps=7)
    named, sentence = diagnosis.diagnosed(case)
    assert named == case.expected == (cause, 1, "blocks.2")
    assert "the other one waits" in sentence


def test_further_cases_come_from_a_file(diagnosis, tmp_path, monkeypatch):
    case = diagnosis.Case("slow data", rank=0, cost_s=0.1)
    (tmp_path / "cases.json").write_text(json.dumps([asdict(case)]))
    run = []
    monkeypatch.setattr(diagnosis, "diagnosed", lambda case: run.append(case) or ((), ""))
    arguments = ["--faulty", "0", "--healthy", "0", "--cases", str(tmp_path / "cases.json")]
    monkeypatch.setattr("sys.argv", ["diagnosis.py", *arguments])
    assert diagnosis.main() == 1
    assert run == [case]
