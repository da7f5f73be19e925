# SPDX-License-Identifier: Apache-2.0
"""Tests whose ranks are threads."""

import contextlib
import functools
import gc
import inspect

from fullshard.testing import LocalWorld


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
