# SPDX-License-Identifier: Apache-2.0
"""What both engines share needs neither of them, and neither needs the other."""

import subprocess
import sys

import pytest

SHARED = ["config", "data", "loop", "metrics", "run", "survival"]
OF_JAX = ["launch", "run", "models", "optimizer"]

PROGRAM = """
import importlib, sys
refused = set(sys.argv[1].split(","))
for name in sys.argv[2:]:
    importlib.import_module(name)
    loaded = refused & set(sys.modules)
    if loaded:
        sys.exit(f"{name} loads {', '.join(sorted(loaded))}")
"""


@pytest.mark.parametrize(
    ("refused", "modules"),
    [
        ("torch,jax,flax", [f"fullshard.train.{name}" for name in SHARED]),
        ("torch", [f"fullshard.train.jax.{name}" for name in OF_JAX]),
        ("jax,flax", ["fullshard.train.torch.launch"]),
    ],
)
def test_what_is_loaded(refused, modules):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, refused, *modules],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
