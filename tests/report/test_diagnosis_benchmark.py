# SPDX-License-Identifier: Apache-2.0
"""The benchmark of verdicts: its draws, and one run of the real engine with a cause put in."""

import importlib
import json
from dataclasses import asdict, replace
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
    monkeypatch.setattr(diagnosis, "diagnosed", lambda case, hosts: run.append(case) or ((), ""))
    arguments = ["--faulty", "0", "--healthy", "0", "--cases", str(tmp_path / "cases.json")]
    monkeypatch.setattr("sys.argv", ["diagnosis.py", *arguments])
    assert diagnosis.main() == 1
    assert run == [case]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{", "holds no cases"),
        ('{"cause": "healthy"}', "a list of objects"),
        ("[1]", "a list of objects"),
        ('[{"cause": "healthy"}, {"caus": "x"}]', "case 1: ['caus'] is unknown; fields are cause"),
        ('[{"cause": "slow lnk"}]', "cause cannot be 'slow lnk'"),
        ('[{"ranks": "2"}]', "ranks cannot be '2'"),
        ('[{"ranks": 0}]', "ranks cannot be 0"),
        ('[{"rank": 2}]', "rank cannot be 2"),
        ('[{"block": 5}]', "block cannot be 5"),
        ('[{"cost_s": NaN}]', "cost_s cannot be nan"),
        ('[{"gather_s": 0}]', "gather_s cannot be 0"),
        ('[{"wrap": "parts"}]', "wrap cannot be 'parts'"),
        ('[{"every": 0}]', "every cannot be 0"),
        ('[{"keep": 1}]', "keep cannot be 1"),
    ],
)
def test_what_is_wrong_in_a_file_of_cases_is_said(
    diagnosis, tmp_path, monkeypatch, capsys, text, wanted
):
    (tmp_path / "cases.json").write_text(text)
    arguments = ["--faulty", "0", "--healthy", "0", "--cases", str(tmp_path / "cases.json")]
    monkeypatch.setattr("sys.argv", ["diagnosis.py", *arguments])
    assert diagnosis.main() == 2
    assert wanted in capsys.readouterr().err


def test_a_case_for_hosts_is_the_drawn_one_more_slowly(diagnosis):
    case = diagnosis.draw_case("slow data", 0, 5)
    slower = diagnosis.for_hosts(case)
    assert slower.expected == case.expected
    assert slower.compute_s / case.compute_s == slower.cost_s / case.cost_s == 4
    many = diagnosis.draw_case("bad wrapping", 0, 5)
    assert diagnosis.for_hosts(many) == replace(many, latency_s=0.0, gather_s=1e-4)
