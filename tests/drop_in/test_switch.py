# SPDX-License-Identifier: Apache-2.0
"""The switch, in an interpreter of its own, since other tests have taken torch's names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import drop_in_checks
from support.limits import PROCESS_S

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def failures():
    done = subprocess.run(
        [sys.executable, Path(drop_in_checks.__file__)],
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.parametrize("name", [check.__name__ for check in drop_in_checks.CHECKS])
def test_switch(failures, name):
    assert failures[name] is None, failures[name]
