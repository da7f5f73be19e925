# SPDX-License-Identifier: Apache-2.0
"""Importing a part loads no more than it needs; fresh interpreters tell."""

import subprocess
import sys

import pytest
from support.limits import PROCESS_S
from test_architecture import LAYERS, PACKAGE, read_sources

pytestmark = pytest.mark.slow

PROGRAM = """
import importlib, sys, threading
for stage in sys.argv[1:]:
    refused, _, names = stage.partition(":")
    for name in names.split(","):
        importlib.import_module(name)
        loaded = set(refused.split(",")) & set(sys.modules)
        if loaded:
            sys.exit(f"{name} loads {', '.join(sorted(loaded))}")
if "fullshard.torch" in sys.modules and threading.active_count() > 1:
    sys.exit("a thread was started")
"""
OF_NO_FRAMEWORK = [
    *(
        source.module
        for source in read_sources(PACKAGE)
        if source.layer in LAYERS and LAYERS[source.layer].without_frameworks
    ),
    *(f"fullshard.train.{name}" for name in ("config", "data", "loop", "metrics", "run")),
    "fullshard.train.survival",
]
OF_JAX = ["fullshard.jax"]
OF_JAX += [f"fullshard.train.jax.{name}" for name in ("launch", "run", "models", "optimizer")]


@pytest.mark.parametrize(
    "stages",
    [
        {"torch,jax,flax": OF_NO_FRAMEWORK, "torch,orbax": OF_JAX},
        {"jax,flax": ["fullshard.torch", "fullshard.train.torch.launch"]},
    ],
    ids=["jax", "torch"],
)
def test_nothing_that_a_part_does_not_need(stages):
    assert {"fullshard", "fullshard.core.schedule", "fullshard.cli"} <= set(OF_NO_FRAMEWORK)
    arguments = [f"{refused}:{','.join(names)}" for refused, names in stages.items()]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
