# SPDX-License-Identifier: Apache-2.0
"""What is said of the package: its extras, and the links of the page that an index shows."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

# What the code of an extra imports, by the names under which it is installed.
INSTALLED_AS = {"orbax": "orbax-checkpoint", "tomli_w": "tomli-w"}
SOURCES = {
    "torch": (
        *("torch", "drop_in", "wrap.py", "testing*"),
        *("run.py", "distributed.py", "local_ranks.py"),
    ),
    "jax": ("jax",),
    "train": ("train/*.py", "doctor/output.py"),
    "prove": ("prove/page.py", "prove/command.py"),
    "report": ("report",),
}
# Needed by what is imported: checkpoints check sums with xxhash.
INDIRECT = {"jax": {"xxhash"}, "torch": {"xxhash"}}


def third_party(pattern):
    for path in sorted((ROOT / "src" / "fullshard").glob(pattern)):
        for file in [path] if path.is_file() else path.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                yield from (name.partition(".")[0] for name in names)


def test_the_workflow_tries_the_versions_that_nox_knows():
    text = (ROOT / "noxfile.py").read_text()
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    pythons = re.search(r"^PYTHONS = \((.*)\)$", text, re.M)[1]
    assert f"python: [{pythons}]" in workflow
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)[1]
    oldest = int(re.search(r"torch>=2\.(\d+)", " ".join(EXTRAS["torch"]))[1])
    minors = [f"2.{minor}" for minor in range(oldest, int(pinned.split(".")[1]))]
    named = ", ".join(f'"{name}"' for name in (*minors, pinned, "newest"))
    assert f"torch: [{named}]" in workflow


@pytest.mark.parametrize("extra", SOURCES)
def test_an_extra_names_what_its_code_imports(extra):
    imported = {name for pattern in SOURCES[extra] for name in third_party(pattern)}
    imported -= {*sys.stdlib_module_names, "fullshard", ""}
    named = {re.match(r"[\w-]+", requirement)[0] for requirement in EXTRAS[extra]}
    assert {INSTALLED_AS.get(name, name) for name in imported} == named - INDIRECT.get(extra, set())


def test_links_of_the_readme_lead_somewhere_from_anywhere():
    base = PROJECT["urls"]["Homepage"] + "/blob/main/"
    links = re.findall(r"\[([^\]]+)\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert links
    for text, target in links:
        assert target.startswith("https://"), f"an index has no file {target}"
        if target.startswith(base):
            path = target.removeprefix(base).partition("#")[0]
            assert (ROOT / path).is_file(), target
            if re.search(r"\.\w+$", text):
                assert text in path, f"{text} leads to {path}"
