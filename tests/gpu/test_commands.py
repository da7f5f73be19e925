# SPDX-License-Identifier: Apache-2.0
"""The commands where there is a GPU: a script for FSDP1, a training run, the doctor."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from support.limits import PROCESS_S

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch, CPUOffload, FullStateDictConfig, MixedPrecision, ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
torch.manual_seed(0)
layers = [nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(3)]
model = FSDP(
    nn.Sequential(nn.Linear(16, 64), *layers, nn.Linear(64, 4)),
    auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}),
    mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    sharding_strategy=ShardingStrategy.FULL_SHARD,
    backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    cpu_offload=CPUOffload(offload_params="offload" in sys.argv),
    device_id=device,
    use_orig_params=True,
    limit_all_gathers=True,
    sync_module_states=True,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.linspace(-1, 1, 8 * 16 * 16, device=device).view(8, 16, 16)
for step in range(5):
    loss = nn.functional.mse_loss(model(x).float(), x[..., :4])
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item(), flush=True)
with FSDP.state_dict_type(
    model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
):
    state = model.state_dict()
print(*{value.device.type for value in state.values()})
print(type(model).__module__, next(iter(state)), next(model.parameters()).device.type)
dist.destroy_process_group()
"""


def python(*arguments, cwd):
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        cwd=cwd,
        env=environ,
        check=False,
    )


@pytest.mark.parametrize("offload", [False, True])
def test_a_script_for_fsdp1_runs_unchanged(offload, gpu, tmp_path):
    """Over NCCL in bf16, beside PyTorch's own engine."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    own = ["offload"] if offload else []
    ours = python("-m", "fullshard", "run", "--nproc", 1, script, *own, cwd=tmp_path)
    assert ours.returncode == 0, ours.stderr
    theirs = python(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 1, script, *own,
        cwd=tmp_path,
    )  # fmt: skip
    assert theirs.returncode == 0, theirs.stderr

    def losses(done):
        return [float(found) for found in re.findall(r"^loss (\S+)$", done.stdout, re.M)]

    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-2)
    assert len(losses(ours)) == 5
    assert ours.stdout.splitlines()[-2] == "cpu"  # FSDP1 leaves what one rank has on the GPU
    assert "fullshard.torch.fsdp1" in ours.stdout.splitlines()[-1]


def test_training_on_the_gpu(gpu, tmp_path):
    """The default job: data, checkpoints, evaluation, its record, and on from a checkpoint."""
    pytest.importorskip("tomli_w", reason="the extra train is not installed")
    options = ["train.steps=6", "train.eval_every=3", "checkpoint.every=3", "log.every=1"]
    done = python("-m", "fullshard", "train", *options, "log.name=small", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "small"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert losses[-1] < losses[0]
    again = python("-m", "fullshard", "train", "--resume", run, "train.steps=8", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    told = python("-m", "fullshard", "report", run, cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert told.stdout


def test_the_doctor_sees_the_gpu(gpu, tmp_path):
    done = python("-m", "fullshard", "doctor", "--json", cwd=tmp_path)
    assert not done.stderr, done.stderr
    told = json.loads(done.stdout)
    assert torch.cuda.get_device_name() in json.dumps(told["facts"])
    assert done.returncode == int(told["severe"] > 0)


def test_more_ranks_than_gpus_are_refused(gpu, tmp_path):
    ranks = torch.cuda.device_count() + 1
    done = python("-m", "fullshard", "doctor", "--json", "--nproc", ranks, cwd=tmp_path)
    assert done.returncode == 2
    assert f"--nproc {ranks} ranks need a GPU each, but there are {ranks - 1}" in done.stderr


def test_what_is_proved_on_the_host_is_proved_beside_a_gpu(gpu, tmp_path):
    """PyTorch's FSDP2, the control, takes the GPU where nobody tells it otherwise."""
    sections = ["--only", "losses", "--only", "memory"]
    done = python("-m", "fullshard", "prove", "--fast", *sections, "--out", "proof", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    proof = json.loads((tmp_path / "proof" / "proof.json").read_text())
    assert proof["verdict"] == "holds"
