# SPDX-License-Identifier: Apache-2.0
"""Tests whose ranks are threads."""

import contextlib
import ctypes
import functools
import gc
import inspect
import os

from fullshard.testing import LocalWorld


def stay_on_one_core():
    """Let all ranks of each `LocalWorld` run on the core that has started them.

    One of them at a time has the interpreter. Over several cores they hand it to each other, before
    and after each operation of torch, in twice the processor time that four ranks take on one.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    run, core_of_this_thread = LocalWorld.run, ctypes.CDLL(None).sched_getcpu

    @functools.wraps(run)
    def run_there(world, body):
        core = core_of_this_thread()

        def on_rank(comm):
            os.sched_setaffinity(0, {core})  # of this thread alone
            return body(comm)

        return run(world, on_rank)

    LocalWorld.run = run_there


@contextlib.contextmanager
def process_on_one_core():
    """Within, all threads of this process run on one core, as those of eight simulated devices."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    _all_threads_on({ctypes.CDLL(None).sched_getcpu()})
    try:
        yield
    finally:
        _all_threads_on(before)


def _all_threads_on(cores):
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


def on_ranks(size, **options):
    """Run the test on every rank of a `LocalWorld`, with that rank's communicator first.

    ``size`` is a number, or the name of the test's own parameter that has it.
    """

    def decorate(test):
        @functools.wraps(test)
        def run(**values):
            world = LocalWorld(values[size] if isinstance(size, str) else size, **options)
            world.run(lambda comm: test(comm, **values))

        _, *others = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature(others)  # what pytest fills in
        return run

    return decorate


@contextlib.contextmanager
def without_collector():
    """Within, what is not referred to goes at once or stays."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
