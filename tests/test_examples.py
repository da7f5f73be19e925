# SPDX-License-Identifier: Apache-2.0
"""Every example runs on two ranks, or is a launch template that its reader accepts."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from support.limits import PROCESS_S
from support.world import run_script

EXAMPLES = Path(__file__).parent.parent / "examples"
LAUNCH = EXAMPLES / "launch"


# Smaller models, fewer steps and samples; each text stands in the example once.
SMALLER = {
    "article_features.py": ("LAYERS = 64, 128, 4, 3", "LAYERS = 32, 32, 4, 2"),
    "cluster.py": ("sequences(2048)", "sequences(512)"),
    "jax_fsdp.py": ("LENGTH = 64, 4, 4, 64", "LENGTH = 32, 2, 4, 32"),
    "minimal.py": ("STEPS = 20", "STEPS = 6"),
    "mnist.py": ("images[:-HELD_BACK], labels[:-HELD_BACK]", "images[:1000], labels[:1000]"),
}


def smaller(name, folder):
    """Write the example in its smaller form there; return its path."""
    text, (old, new) = (EXAMPLES / name).read_text(), SMALLER.get(name, ("", ""))
    assert not old or text.count(old) == 1
    (folder / name).write_text(text.replace(old, new) if old else text)
    return folder / name


@pytest.fixture
def run_example(gloo_world, tmp_path):
    """Runs an example on two ranks in a folder of its own; what each of them printed."""

    def run(name, *arguments):
        return gloo_world.launch(2, run_script, smaller(name, tmp_path), arguments, str(tmp_path))

    return run


def losses_in(text):
    return [float(found) for found in re.findall(r"loss (\d+\.\d+)", text)]


def test_minimal(run_example):
    for rank, printed in enumerate(run_example("minimal.py")):
        assert f"rank {rank}: step 6" in printed
        losses = losses_in(printed)
        assert losses[-1] < 0.8 * losses[0]


def test_train_loop(run_example):
    first, _ = run_example("train_loop.py")
    assert "rank 0 holds" in first
    losses = losses_in(first)
    assert losses[-1] < 0.8 * losses[0]


def test_experts(run_example):
    for rank, printed in enumerate(run_example("experts.py")):
        losses = losses_in(printed)
        assert losses[-1] < 0.2 * losses[0]
        assert f"rank {rank} holds 8192 of 16384" in printed


def test_cluster(run_example, tmp_path):
    first, other = run_example("cluster.py", "--epochs=1")
    assert losses_in(other) == []  # rank 0 logs
    saved = torch.load(tmp_path / "cluster.pt", weights_only=True)
    assert saved["epoch"] == 1
    assert set(saved["optimizer"]["state"]) == set(saved["model"])

    resumed, _ = run_example("cluster.py", "--epochs=2", "--resume")
    assert "epoch 1," not in resumed
    assert losses_in(resumed)[0] < losses_in(first)[0]


def test_article_features(run_example, tmp_path):
    settings = ("--batch-size=2", "--save-every=10")
    first, other = run_example("article_features.py", "--steps=10", *settings)
    assert "without shards" in first
    assert "rank 1: host" in other
    again, _ = run_example("article_features.py", "--steps=20", *settings)
    assert "goes on after step 10, with sample 40" in again
    assert losses_in(again)[-1] < losses_in(first)[0]
    saved = torch.load(tmp_path / "article_features.pt", weights_only=True)
    assert saved["progress"] == {"step": 20, "epoch": 0, "samples": 80}


@pytest.mark.thorough
def test_article_features_survives_the_loss_of_a_rank(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [
        EXAMPLES / "article_features.py",
        "--steps=20",
        "--batch-size=2",
        "--save-every=10",
        "--fail-at-step=11",
    ]
    result = subprocess.run(
        [*torchrun, "--max-restarts=1", *script],
        cwd=tmp_path,
        env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
    )
    assert result.returncode == 0, result.stderr
    before, after = result.stdout.split("goes on after step 10, with sample 40")
    assert "step 10" in before
    assert "step 20" not in before
    assert losses_in(after)[-1] < losses_in(before)[0]
    assert "without shards" in after
    assert "rank 1: host" in after
    saved = torch.load(tmp_path / "article_features.pt", weights_only=True)
    assert saved["progress"] == {"step": 20, "epoch": 0, "samples": 80}


@pytest.fixture
def run_here(monkeypatch, tmp_path):
    """Runs an example on this process's eight simulated devices; what it prints."""
    monkeypatch.setattr(sys, "argv", sys.argv)

    def run(name, *arguments):
        return run_script(smaller(name, tmp_path), arguments)

    return run


def test_jax_fsdp(run_here, tmp_path):
    path = tmp_path / "weights.safetensors"
    printed = run_here("jax_fsdp.py", "--steps=10", f"--save={path}")
    assert "data=1 x fsdp=8 x tensor=1" in printed
    losses = losses_in(printed)
    assert losses[-1] < 0.7 * losses[0]
    assert "compiled 1 time(s)" in printed
    table = dict(re.findall(r"^((?:un)?sharded) +8 +[\d,]+ +[\d,]+ +([\d,]+)", printed, re.M))
    peaks = [int(table[name].replace(",", "")) for name in ("sharded", "unsharded")]
    assert peaks[0] < peaks[1] / 2
    assert "reduce-scatter" in printed
    with safe_open(path, "np") as saved:
        assert saved.get_slice("blocks.1.up.kernel").get_shape() == [32, 128]


def test_jax_hybrid(run_here):
    printed = run_here("jax_hybrid.py", "--steps=4")
    losses = losses_in(printed)
    assert len(losses) == 3
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    rows = [line.split("  ")[0] for line in printed.splitlines()[-3:]]
    assert rows == ["data parallel", "groups", "fsdp=4 x tensor=2"]


def test_slurm_template():
    subprocess.run(["bash", "-n", LAUNCH / "slurm.sbatch"], check=True)


def test_kubernetes_template():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((LAUNCH / "kubernetes_pytorchjob.yaml").read_text())
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    script = Path(container["command"][1]).name
    assert (EXAMPLES / script).exists()


def test_no_example_is_forgotten():
    of_torch = {"article_features.py", "cluster.py", "minimal.py", "mnist.py"}
    of_torch |= {"experts.py", "survive.py", "train_loop.py"}
    here = of_torch | {"jax_fsdp.py", "jax_hybrid.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == here


def test_survive(run_example, tmp_path):
    folder = tmp_path / "run"
    for printed in run_example("survive.py", str(folder)):
        assert "step 60" in printed
    assert len(list(folder.glob("step-*"))) == 2
    shutil.rmtree(folder / "step-000000000060")
    for rank, printed in enumerate(run_example("survive.py", str(folder))):
        assert printed.startswith(f"rank {rank}: step 60")
