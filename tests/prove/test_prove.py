# SPDX-License-Identifier: Apache-2.0
"""`fullshard prove`: verdicts over made-up measurements, the page, and one small proof."""

import json
from dataclasses import replace

import pytest
from support.limits import PROCESS_S

from fullshard.core.errors import CommunicationError, ConfigurationError
from fullshard.prove import command, losses, main, page
from fullshard.prove.claims import Claim, Section, verdict_of
from fullshard.prove.losses import ENGINES, TRAININGS, EngineRun, floor_of, loss_claims, rounding
from fullshard.prove.memory import CountedBytes, memory_claims
from fullshard.prove.page import Proof, write_proof
from fullshard.prove.provenance import checkout, provenance
from fullshard.prove.simulation import simulation_claims

LOSSES = ((5.5, 5.0, 4.5), (5.6, 5.1, 4.4))


def good_runs():
    """All engines twice, each with the same losses and weights."""
    return {
        each.name: [EngineRun(engine, LOSSES, 0.0) for engine in each.engines * 2]
        for each in TRAININGS
    }


def judged(runs):
    return {claim.what: claim.verdict for claim in loss_claims(TRAININGS, runs)}


def planted(training, engine, **changes):
    """Measurements in which both runs of one engine are otherwise than the others."""
    runs = good_runs()
    runs[training] = [
        replace(run, **changes) if run.engine == engine else run for run in runs[training]
    ]
    return runs


def test_equal_runs_hold():
    verdicts = judged(good_runs())
    assert set(verdicts.values()) == {"holds"}
    for training in TRAININGS:
        for engine in {*training.engines[1:]} - {"FSDP2"}:
            assert f"{training.name}: {engine} as {training.engines[0]}" in verdicts


EXACT, ROUNDED = TRAININGS[0].name, TRAININGS[-1].name
ULP = 2.0**-22  # of float32, at 5


@pytest.mark.parametrize(
    ("training", "engine", "changes"),
    [
        (EXACT, "fully_shard", {"losses": ((5.5, 5.0, 4.5 + ULP), LOSSES[1])}),
        (EXACT, "SHARD_GRAD_OP", {"losses": (LOSSES[0], (5.6, 5.1 - ULP, 4.4))}),
        (EXACT, "FullyShardedDataParallel", {"distance": 1e-9}),
        (EXACT, "fully_shard", {"losses": ((5.5, float("nan"), 4.5), LOSSES[1])}),
        (ROUNDED, "fully_shard", {"losses": ((5.5, 5.0, 4.5 * (1 + 2 * rounding(3))), LOSSES[1])}),
    ],
)
def test_a_planted_difference_fails_where_it_is_and_nowhere_else(training, engine, changes):
    verdicts = judged(planted(training, engine, **changes))
    wrong = [what for what, verdict in verdicts.items() if verdict != "holds"]
    expected = [f"{training}: {engine} as DDP"]
    if "nan" in str(changes):  # which equals not even itself
        expected.insert(0, "every engine repeats itself (A/A)")
    assert wrong == expected


def test_rounding_holds_where_sums_may_have_another_order():
    near = ((5.5, 5.0, 4.5 * (1 + rounding(3) / 2)), LOSSES[1])
    runs = planted(ROUNDED, "fully_shard", losses=near, distance=1e-6)
    assert set(judged(runs).values()) == {"holds"}


def test_an_engine_that_differs_from_itself_is_the_noise_floor():
    runs = good_runs()
    again = len(TRAININGS[0].engines)
    runs[EXACT][again] = EngineRun("DDP", ((5.5, 5.0, 4.5 * (1 + 1e-6)), LOSSES[1]), 0.0)
    assert floor_of(runs[EXACT]) == pytest.approx(1e-6)
    assert judged(runs)["every engine repeats itself (A/A)"] == "fails"


def test_losses_that_do_not_fall_prove_nothing():
    runs = {
        name: [replace(run, losses=((5.0, 5.0), (5.0, 5.0))) for run in each]
        for name, each in good_runs().items()
    }
    assert judged(runs)[f"{EXACT}: DDP learns"] == "fails"


def test_memory_is_held_against_the_first_engine():
    theirs = CountedBytes(rest_bytes=1000, forward_bytes=300, backward_bytes=400, unit_bytes=100)
    mine = CountedBytes(rest_bytes=1009, forward_bytes=300, backward_bytes=390, unit_bytes=100)
    assert [claim.verdict for claim in memory_claims({"FSDP2": theirs, "ours": mine})] == [
        "holds"
    ] * 3
    for key, value in (("rest_bytes", 1011), ("forward_bytes", 301), ("backward_bytes", 401)):
        more = {"FSDP2": theirs, "ours": replace(mine, **{key: value})}
        assert len([claim for claim in memory_claims(more) if claim.verdict == "fails"]) == 1


PROGRAM = {"findings": [], "unexpected": [], "failure": None, "collectives": [["gather", 1]]}
LINES = [
    {"program": "hybrid", **PROGRAM},
    {"program": "hybrid", **PROGRAM},
    {"program": "FSDP2 bf16", **PROGRAM, "collectives": []},
    {"mutant": "a wait left out", "equivalent": False, "found": ["a race"]},
    {"mutant": "a wait twice", "equivalent": True, "found": []},
    {"cost": 1},
    {"schedules": 3, "mutant": None},
]


@pytest.mark.parametrize(
    ("place", "change", "wrong"),
    [
        (0, {}, None),
        (0, {"findings": ["a race"]}, "no race, no memory used too early, no failure"),
        (0, {"unexpected": ["item"]}, "the host waits only where it must"),
        (1, {"collectives": []}, "ranks issue collectives in one order"),
        (2, {"findings": ["a race"]}, "control: PyTorch's FSDP2 without a finding"),
        (3, {"found": []}, "every deliberate fault is found"),
        (4, {"found": ["a race"]}, "changes that are no faults raise no alarm"),
    ],
)
def test_the_simulations_lines_are_judged(place, change, wrong):
    lines = [line | change if number == place else line for number, line in enumerate(LINES)]
    verdicts = {claim.what: claim.verdict for claim in simulation_claims(lines)}
    assert [what for what, verdict in verdicts.items() if verdict != "holds"] == [wrong] * bool(
        wrong
    )


def test_a_simulation_that_says_nothing_proves_nothing():
    assert "fails" in {claim.verdict for claim in simulation_claims([])}


def section(*verdicts):
    return Section("title", "how", tuple(Claim("a < b & c", each, "1", "2") for each in verdicts))


def test_the_verdict_over_all():
    assert verdict_of([section("holds", "not proved"), section("holds")]) == "holds"
    assert verdict_of([section("holds"), section("not proved", "fails")]) == "fails"
    assert verdict_of([section("not proved")]) == "not proved"
    assert verdict_of([]) == "not proved"


def test_the_page_names_what_it_is_bound_to(tmp_path):
    bound_to = provenance("fullshard prove <x>")
    assert (bound_to.commit is None) == (checkout() is None)
    proof = Proof(bound_to, (section("holds", "not proved"),), 3.0)
    html, data = write_proof(proof, tmp_path / "new" / "folder")
    text = html.read_text("utf-8")
    assert "a &lt; b &amp; c" in text
    assert "fullshard prove &lt;x&gt;" in text
    assert bound_to.source_sha256 in text
    assert all(each.replace("'", "&#39;") in text for each in page.NOT_PROVED)
    found = json.loads(data.read_text("utf-8"))
    assert found["verdict"] == "holds"
    assert found["bound_to"]["versions"]["torch"] == bound_to.versions["torch"]
    assert found["bound_to"]["commit"] == bound_to.commit
    assert found["sections"][0]["claims"][1]["verdict"] == "not proved"
    assert found["not_proved"] == list(page.NOT_PROVED)


@pytest.mark.parametrize(("verdict", "status"), [("holds", 0), ("not proved", 0), ("fails", 1)])
def test_the_exit_status_says_whether_a_claim_fails(verdict, status, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(command._SECTIONS, "losses", lambda scale: section("holds", verdict))
    assert main(["--only", "losses", "--out", str(tmp_path)]) == status
    out = capsys.readouterr().out.replace("\n", " ")
    assert verdict in out
    assert " (not tried: memory, order): " in out
    assert (
        json.loads((tmp_path / "proof.json").read_text("utf-8"))["sections"][0]["title"] == "title"
    )


def test_an_error_is_a_claim_that_fails(tmp_path, monkeypatch, capsys):
    def end(scale):
        raise CommunicationError("rank 1 failed: why")

    monkeypatch.setitem(command._SECTIONS, "memory", end)
    assert main(["--only", "memory", "--out", str(tmp_path)]) == 1
    assert "rank 1 failed: why" in (tmp_path / "proof.html").read_text("utf-8")


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="--out must be a folder"):
        main(["--out", str(tmp_path / "file")])


def test_losses_are_proved_end_to_end(tmp_path, monkeypatch, kept_local_ranks):
    """Kept ranks, two steps of every engine; nothing of the judgement is made up."""
    kept_local_ranks("fullshard.prove.losses")
    monkeypatch.setattr(losses, "TRAININGS", TRAININGS[:1])
    monkeypatch.setattr(command, "FAST", replace(command.FAST, steps=2, timeout_s=PROCESS_S))
    assert main(["--fast", "--only", "losses", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "proof.json").read_text("utf-8"))
    assert found["verdict"] == "holds"
    runs = found["sections"][0]["data"][EXACT]
    assert [run["engine"] for run in runs] == list(ENGINES) * 2
    assert all(run["losses"] == runs[0]["losses"] for run in runs)
    assert [len(losses_of_rank) for losses_of_rank in runs[0]["losses"]] == [2, 2]
