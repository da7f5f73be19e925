# SPDX-License-Identifier: Apache-2.0
"""The logic of benchmarks/one_gpu_rows.py on a CPU: rows that run, rows that fail, their files."""

import importlib
import json
import types
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.fixture
def one_gpu_rows(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("one_gpu_rows")


def test_without_a_gpu_it_says_so(one_gpu_rows, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert one_gpu_rows.main([]) == 2
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers renames its checkpoints
def test_a_row_and_one_that_fails_are_written(one_gpu_rows, tmp_path):
    """The second asks for a kernel that CPUs do not have; the CSV is read by the planner's rows."""
    trained = one_gpu_rows.Case("qwen3-0.6b", 2048, 4, recompute="full", mask="padded", lora=2)
    without = one_gpu_rows.Case("llama-3.2-1b", 2048, 4, attention="sdpa cudnn")
    given = types.SimpleNamespace(out=tmp_path / "rows.json", csv=tmp_path / "rows.csv")
    written = one_gpu_rows.Written(given, {"gpu": "H100"})
    for case in (trained, without):
        written.row(one_gpu_rows.tried(case, torch.device("cpu")))

    first, second = json.loads(given.out.read_text("utf-8"))["rows"]
    assert set(first["device_s"]) == {"forward", "backward", "optimizer"}
    assert "No viable backend" in second["failed"]
    models = tmp_path / "models"
    models.symlink_to(BENCHMARKS / "data" / "measured" / "models")
    skipped = []
    (row,) = importlib.import_module("plan_rows").read_rows(given.csv, skipped)
    assert row.tokens == pytest.approx(first["tokens_per_s"], rel=1e-3)
    assert (row.run.lora_rank, row.run.recompute.value, row.run.overhead_s) == (2, "full", 0.0)
    assert "'failed' is no speed" in skipped[0]


def test_kernels_alone_are_rows(one_gpu_rows):
    alone = one_gpu_rows.one_gpu_kernels
    kernels = list(alone.all_kernels(torch.device("cpu"), alone.KINDS))
    kinds = {each["kind"] for each in kernels}
    assert kinds == {
        *("host", "attention", "products", "elementwise", "losses", "optimizers", "copies")
    }
    failed = [each["name"] for each in kernels if "failed" in each]
    assert all(name.startswith(("cudnn", "efficient")) for name in failed)
