# SPDX-License-Identifier: Apache-2.0
"""The site in a browser, where Chromium, Node and a built site are there: see scripts/axe."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_first_pages_have_no_finding_of_axe_and_no_error_in_the_console():
    if not any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")):
        pytest.skip("needs chromium")
    if not shutil.which("npm"):
        pytest.skip("needs npm")
    if not (ROOT / "site" / "index.html").exists():
        pytest.skip("needs site/: scripts/docs builds it")
    pages = ("index.html", "modes/sharding.html", "concepts/schedule.html")
    done = subprocess.run([ROOT / "scripts" / "axe", *pages], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
