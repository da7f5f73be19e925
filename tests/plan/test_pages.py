# SPDX-License-Identifier: Apache-2.0
"""The Python blocks of the planner's pages run."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks():
    for page in ("planner", "planner_statements"):
        text = (DOCS / f"{page}.md").read_text("utf-8")
        for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)):
            yield pytest.param(code, id=f"{page}-{number}")


@pytest.mark.long
@pytest.mark.parametrize("code", list(blocks()))
def test_a_block_runs(code):
    if "transformers" in code:
        pytest.importorskip("transformers")
    exec(compile(code, "block", "exec"), {})
