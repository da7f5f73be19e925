# SPDX-License-Identifier: Apache-2.0
import contextlib
import gc
import os
import socket
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from support import xla
from support.layouts import choose_defaults
from support.sampling import sample
from support.world import World

# Read when JAX first looks for devices: eight of them are simulated on the CPU.
os.environ.setdefault("XLA_FLAGS", xla.flags(8))

choose_defaults()

settings.register_profile("fullshard", deadline=None, derandomize=True)
settings.load_profile("fullshard")


# Left out by `scripts/test --fast`, with what is marked by hand: tests that start processes, use
# those that are kept, or compile programs.
SLOW_FIXTURES = {"gloo_world", "drop_in_world", "endings"}
SLOW_PATHS = (
    "gpu/",
    "jax_engine/",
    "libraries/",
    "train/test_jax",
    "test_documents",
    "test_examples",
)
# Twenty seconds and more each. They begin, so that no process is left alone with one in the end.
LONGEST = (
    "device/test_device.py",
    "test_examples.py",
    "test_documents.py",
    "libraries/test_training_libraries.py",
    "test_docs.py",
    "test_cli.py",
    "jax_engine/test_parity.py",
    "train/test_jax_training.py",
    "engine/test_states_beside_pytorchs.py",
    "drop_in/test_scripts.py",
)


def pytest_collection_modifyitems(config, items):
    items[:], left_out = sample(items)
    config.hook.pytest_deselected(items=left_out)
    here = Path(__file__).parent
    for item in items:
        path = item.path.relative_to(here).as_posix()
        if path.startswith(SLOW_PATHS) or SLOW_FIXTURES.intersection(item.fixturenames):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.relative_to(here).as_posix() not in LONGEST)


def pytest_collection_finish():
    gc.freeze()  # what is imported is no garbage, and the collector need not look through it


# Processes for each file: those of one that is over would wake all the time, a hundred times a
# second for every group that its tests have made, and take half of the machine from the others.
@pytest.fixture(scope="module")
def gloo_world():
    with contextlib.closing(World()) as world:
        yield world


@pytest.fixture(scope="module")
def drop_in_world():
    with contextlib.closing(World(2, drop_in=True)) as world:
        yield world


@pytest.fixture
def unused_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(autouse=True)
def one_thread():
    """Ranks are threads here: more threads inside each would only fight over the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def values_of_ranks_may_differ(request, monkeypatch):
    """Ranks that are threads draw the first values of their models from one generator."""
    if {"engine", "test_docs.py"}.intersection(request.path.parts):
        monkeypatch.setenv("FULLSHARD_CHECK_VALUES", "0")


@pytest.fixture
def checked_values(monkeypatch):
    """Undo `values_of_ranks_may_differ`."""
    monkeypatch.delenv("FULLSHARD_CHECK_VALUES", raising=False)
