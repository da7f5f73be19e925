# SPDX-License-Identifier: Apache-2.0
"""What docs/jax.md shows runs, in the order of the page."""

import re
from pathlib import Path

import fullshard.jax

PAGE = Path(__file__).parents[2] / "docs" / "jax.md"
TEXT = PAGE.read_text("utf-8")


def test_blocks_run(capsys):
    blocks = re.findall(r"^```python runnable\n(.*?)^```", TEXT, re.M | re.S)
    program = "\n".join(blocks)
    exec(compile(program, str(PAGE), "exec"), {"__name__": "page"})
    printed = capsys.readouterr().out
    assert "blocks.0.up.kernel" in printed
    assert "P('fsdp')" in printed


def test_promises_hold():
    page = PAGE.with_name("jax_promises.md")
    blocks = re.findall(r"^```python runnable\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": "page"})


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)", TEXT)
    assert targets
    assert all((PAGE.parent / target).exists() for target in targets)


def test_every_call_exists():
    called = set(re.findall(r"`(\w+)\((?:step|mesh|model|state|\))", TEXT))
    elsewhere = {"save_weights", "load_weights"}
    assert len(called) > 5
    assert {name for name in called if not hasattr(fullshard.jax, name)} <= elsewhere
