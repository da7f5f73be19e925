# SPDX-License-Identifier: Apache-2.0
"""The texts of the commands at 80 and 200 columns, in a pipe, without colours."""

import re
from pathlib import Path

import numpy
import pytest
from support.checkpoint_cases import save_spans
from support.golden import check_golden

pytest.importorskip("rich")
from rich.console import Console

from fullshard.cli import main
from fullshard.doctor.findings import Finding
from fullshard.doctor.links import Links, LinkTime
from fullshard.doctor.output import Report, print_report
from fullshard.prove.claims import Claim, Section
from fullshard.prove.page import Proof, print_proof
from fullshard.prove.provenance import Provenance
from fullshard.torch.inspection import Bytes
from fullshard.torch.inspection.memory import beside
from fullshard.train.metrics import bytes_table

GOLDEN = Path(__file__).parent / "golden"


def ask_for_help(*command):
    with pytest.raises(SystemExit):
        main([*command, "--help"])


def close_training():
    rank, whole = Bytes(2**20, 2**20, 2**21, 2**19), Bytes(2**22, 2**22, 2**23, 0)
    Console().print(
        bytes_table("Memory for the model, FULL_SHARD over 4 ranks", beside(rank, whole))
    )


def examine():
    facts = {"host": {"host": "host, 8 cores, Linux", "torch": "2.13.0+cpu", "GPUs": "none"}}
    findings = [
        Finding(
            "severe",
            "model.state_dict() runs on some ranks only",
            "It gathers the parameters, so every rank has to call it: the ranks that do call it "
            "wait for the others until the time limit of the group ends them.",
            "Call it on every rank, and let rank 0 alone write; or use save_full_weights(), "
            "which does both. NCCL_DEBUG=INFO or TORCH_CPP_LOG_LEVEL=INFO tell more.",
            "train.py:5",
        )
    ]
    times = (LinkTime(2**16, 1e-4, 2e-4), LinkTime(2**26, 0.05, 0.08))
    print_report(Report(facts, findings, Links(2, "gloo", times, (0.1, 0.1), (0.01, 0.01))))


def prove():
    claims = (
        Claim("GPT, bit by bit: fully_shard as DDP", "holds", "0 of 40 losses differ", "0"),
        Claim("bytes at the peak of a step, beside FSDP2", "fails", "1.53 GiB", "1.50 GiB"),
        Claim("no race on the simulated device", "not proved", "only from a source checkout"),
    )
    bound = Provenance(
        *("0123abc", (), "f" * 64, {"torch": "2.13.0", "numpy": "2.0"}, "3.11.9", "Linux 6.1"),
        *(8, "none", "fullshard prove --only losses", "2026-01-02T03:04:05Z"),
    )
    print_proof(Proof(bound, (Section("losses", "As told.", claims),), 12.0, ("order",)), Console())


PRINTED = {
    "help": lambda: ask_for_help(),
    "train_help": lambda: ask_for_help("train"),
    "run_help": lambda: ask_for_help("run"),
    "plan_help": lambda: ask_for_help("plan"),
    "calibrate_help": lambda: ask_for_help("calibrate"),
    "doctor_help": lambda: ask_for_help("doctor"),
    "ckpt_help": lambda: ask_for_help("ckpt"),
    "prove_help": lambda: ask_for_help("prove"),
    "report_help": lambda: ask_for_help("report"),
    "training_closes": close_training,
    "doctor": examine,
    "prove": prove,
}


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("name", PRINTED)
def test_it_fits_and_is_as_before(name, width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    PRINTED[name]()
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if len(line) > width] == []
    if name == "run_help":  # what follows are torchrun's options, by its version
        out = "\n\n".join(out.split("\n\n")[:2])
    check_golden(GOLDEN / f"{name}_{width}.txt", out, width)


@pytest.mark.parametrize("width", [80, 200])
def test_checkpoints_fit_and_are_as_before(width, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.chdir(tmp_path)
    for run, value in (("run_a", 1), ("run_b", 2)):
        array = numpy.full(12, value, numpy.float32)
        save_spans(tmp_path / run, {"model/weight": (array, "F32")}, 2, 100)
    for command in (["ls", "run_a"], ["verify", "run_a"], ["diff", "run_a", "run_b"]):
        print("$ fullshard ckpt", *command)
        assert main(["ckpt", *command]) == (command[0] == "diff")
    out = re.sub(r"\d{4}-\d\d-\d\dT[\d:]+Z", "2026-01-02T03:04:05Z", capsys.readouterr().out)
    out = out.replace(f"{tmp_path}/", "")
    check_golden(GOLDEN / f"ckpt_{width}.txt", out, width)
