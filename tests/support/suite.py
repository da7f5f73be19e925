# SPDX-License-Identifier: Apache-2.0
"""Hooks and fixtures of all tests, loaded by `conftest.py`."""

import contextlib
import functools
import gc
import os
import random
import re
import socket
import threading
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from support import threads, xla
from support.layouts import choose_defaults
from support.limits import PROCESS_S
from support.sampling import FAST, is_changed, sample
from support.world import World, call_in_environment, ranks_context

from fullshard import local_ranks
from fullshard.testing import LocalComm, LocalWorld

# Read when JAX first looks for devices: eight of them are simulated on the CPU.
os.environ.setdefault("XLA_FLAGS", xla.flags(8))

choose_defaults()
threads.stay_on_one_core()
LocalWorld.__init__.__kwdefaults__["timeout_s"] = PROCESS_S  # another rank may be compiling

examples = 40 if FAST else 100
settings.register_profile("fullshard", deadline=None, derandomize=True, max_examples=examples)
settings.load_profile("fullshard")


# Marked `slow`, with what is marked by hand: tests that start processes, use those that are kept,
# or compile programs; and modules that load what compiles, or what takes seconds to load.
SLOW_FIXTURES = {"gloo_world", "drop_in_world", "forked_local_ranks", "endings", "killed"}
SLOW_PATHS = ("gpu/", "libraries/", "test_examples")
SLOW_TO_LOAD = re.compile(
    r"^(?:from |import |pytest\.importorskip\(\")"
    r"(?:fullshard\.jax|jax|flax|optax|support(?:\.| import )jax|transformers)\b",
    re.M,
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


def name_of(path):
    return path.relative_to(Path(__file__).parents[1]).as_posix()


@functools.cache
def is_slow(path):
    """Return whether all tests of a module are."""
    return name_of(path).startswith(SLOW_PATHS) or bool(SLOW_TO_LOAD.search(path.read_text()))


def pytest_ignore_collect(collection_path):
    """Load nothing that is slow to load for fast tests."""
    if FAST and collection_path.match("test_*.py"):
        return True if is_slow(collection_path) and not is_changed(collection_path) else None
    return None


def pytest_collection_modifyitems(config, items):
    for item in items:
        if is_slow(item.path) or SLOW_FIXTURES.intersection(item.fixturenames):
            item.add_marker(pytest.mark.slow)
    items[:], left_out = sample(items)
    config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: name_of(item.path) not in LONGEST)


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
def kept_local_ranks(gloo_world, monkeypatch):
    """Let a module, by its name, start local ranks on processes that are there."""

    def run(function, arguments, nproc, timeout_s):
        return gloo_world.launch(nproc, function, *arguments)[0]

    return lambda module: monkeypatch.setattr(f"{module}.run_local_ranks", run)


@pytest.fixture
def forked_local_ranks(monkeypatch):
    """Let `run_local_ranks` fork its ranks from a process that has torch; they print as it does."""
    start = local_ranks.start_processes
    ranks_context()

    def forked(function, arguments, nprocs, *, join, start_method):
        assert start_method == "spawn"
        found = (dict(os.environ), function, *arguments)
        return start(call_in_environment, found, nprocs, join=join, start_method="forkserver")

    monkeypatch.setattr(local_ranks, "start_processes", forked)


@pytest.fixture
def unused_port():
    """One below those that are given to whoever asks for any, as other tests do meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@pytest.fixture
def sent(monkeypatch):
    """Bytes by rank ("rank 0", a thread) and collective, as `LocalComm` carries these out.

    What a backward says of parameters that it used, 4 bytes each, is left out.
    """
    by_rank, issue = defaultdict(Counter), LocalComm._issue

    def counting(comm, name, label, inputs, *rest):
        given, others = sum(tensor.nbytes for tensor in inputs), comm.size - 1
        sizes = {
            "all_gather": given * others,
            "reduce_scatter": given * others // comm.size,
            "all_reduce": 2 * given * others // comm.size,
            "all_to_all": inputs[0].nbytes if inputs else 0,  # none of it to itself
        }
        if label != "what the backward used":
            kind = name.split()[0]
            by_rank[threading.current_thread().name][kind] += sizes.get(kind, 0)
        return issue(comm, name, label, inputs, *rest)

    monkeypatch.setattr(LocalComm, "_issue", counting)
    return by_rank


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


@pytest.fixture(scope="module", autouse=True)
def trials_of_optimizers(request):
    """Try optimizers of one kind once, but where it is tested how they are tried."""
    if "optim" in request.path.parts and request.path.name != "test_trial.py":
        from support.trials import tried_once  # noqa: PLC0415 - loads the engine

        with tried_once():
            yield
    else:
        yield


@pytest.fixture(autouse=True)
def devices_of_jax_share_a_core(request):
    """They would wait for each other across all cores, and take them from other tests."""
    starts = SLOW_FIXTURES.intersection(request.fixturenames)  # processes, which would stay there
    alone = "jax" in request.node.nodeid and not starts
    with threads.process_on_one_core() if alone else contextlib.nullcontext():
        yield


@pytest.fixture
def checked_values(monkeypatch):
    """Undo `values_of_ranks_may_differ`."""
    monkeypatch.delenv("FULLSHARD_CHECK_VALUES", raising=False)
