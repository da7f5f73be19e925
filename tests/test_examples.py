# SPDX-License-Identifier: Apache-2.0
"""Every example runs as its docstring says, on two ranks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example(path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run([*torchrun, path], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "rank 0 holds" in result.stdout
    losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", result.stdout)]
    assert losses[-1] < 0.8 * losses[0]
