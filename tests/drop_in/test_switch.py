# SPDX-License-Identifier: Apache-2.0
"""The switch, in a process of its own, since other tests have taken torch's names."""

import contextlib
import json

import pytest
from support import drop_in_checks
from support.world import World, run_script, without_warnings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def failures():
    with contextlib.closing(World(1)) as fresh:
        (printed,) = fresh.launch(1, without_warnings, run_script, drop_in_checks.__file__)
    return dict(map(json.loads, printed.splitlines()))


@pytest.mark.parametrize("name", [check.__name__ for check in drop_in_checks.CHECKS])
def test_switch(failures, name):
    assert failures[name] is None, failures[name]
