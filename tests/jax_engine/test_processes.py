# SPDX-License-Identifier: Apache-2.0
"""Several processes, each with its own devices, train as one does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from support import jax_process, xla
from support.limits import PROCESS_S

from fullshard.jax import create_mesh

TESTS = Path(__file__).resolve().parents[1]


def start(devices, run, **environ):
    return subprocess.Popen(
        [sys.executable, "-m", "support.jax_process", str(run)],
        cwd=TESTS,
        env={**os.environ, "XLA_FLAGS": xla.flags(devices), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process):
    out, err = process.communicate(timeout=PROCESS_S)
    assert process.returncode == 0, err
    return json.loads(out.rpartition("result ")[2])


def test_two_processes_are_one(unused_port, tmp_path):
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(unused_port)}
    pair = [start(1, tmp_path, RANK=str(rank), **launched) for rank in range(2)]
    try:
        found = [result(process) for process in pair]
    finally:
        for process in pair:
            process.kill()
            process.wait()
    alone = jax_process.train(create_mesh(fsdp=2, devices=jax.devices()[:2]))
    assert found[0] == found[1]
    assert found[0][:3] == [True, 2, 2]
    assert alone[:2] == [2, 1]
    assert found[0][3:-3] == pytest.approx(alone[2:], rel=1e-6)
    assert found[0][-3:] == [2, 2, ["step-000000000001", "step-000000000002"]]
