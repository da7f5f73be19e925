# SPDX-License-Identifier: Apache-2.0
"""The tutorial is typed here as its reader would: its files are written, its commands are run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.limits import PROCESS_S

PAGE = Path(__file__).parent.parent / "docs" / "tutorial.md"


@pytest.mark.slow
def test_every_step_of_the_tutorial_works(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    tools = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    outputs = []
    for language, name, body in re.findall(
        r"^```(python|console)(?: file=(\S+))?\n(.*?)^```", PAGE.read_text(), re.M | re.S
    ):
        if language == "python":
            (tmp_path / name).write_text(body)
            continue
        typed = "".join(line.removeprefix("$ ") for line in body.splitlines(keepends=True))
        done = subprocess.run(
            ["bash", "-c", typed],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PROCESS_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout)
    made, killed, resumed, generated = outputs
    assert "saved base" in made
    told = re.compile(r"^step (\d+), loss", re.M)
    assert told.findall(killed) == ["10", "20"]
    assert re.findall(r"^step-(\d+)", killed, re.M) == ["000000000010", "000000000020"]
    assert told.findall(resumed) == ["30", "40", "50", "60"]
    assert (tmp_path / "tuned" / "model.safetensors").exists()
    assert "def " in generated
