# SPDX-License-Identifier: Apache-2.0
"""See public names as type checkers and editors do."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

ROOT = Path(__file__).parents[1]


def listed(path):
    """Return the names in ``__all__`` of a file, which is not imported."""
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and ast.unparse(node).startswith("__all__")
    )
    return names


SOURCE = ROOT / "src" / "fullshard"
PACKAGES = {
    ".".join(("fullshard", *path.parent.relative_to(SOURCE).parts)): listed(path)
    for path in sorted(SOURCE.rglob("__init__.py"))
}


def mypy(path, *options):
    command = [sys.executable, "-m", "mypy", "--hide-error-context", *options, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout


@pytest.mark.parametrize("package", ["fullshard", "fullshard.torch", "fullshard.jax"])
def test_dir_has_every_public_name(package):
    module = pytest.importorskip(package)
    assert set(PACKAGES[package]) <= set(dir(module))


def test_a_misspelt_import_is_an_error_in_every_package(tmp_path):
    lines = []
    for package, names in PACKAGES.items():
        lines += [f"from {package} import {name}" for name in names]
        lines += [f"from {package} import {name}s_misspelt" for name in names or ["nothing"]]
    script = tmp_path / "misspelt.py"
    script.write_text("\n".join(lines) + "\n")
    report = [line for line in mypy(script).splitlines() if "has no attribute" in line]
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("_misspelt")}
    assert len(wrong) > 200
    assert {int(line.split(":")[1]) for line in report} == wrong, report


def test_fully_shard_gives_a_module_with_the_methods_of_fsdp2(tmp_path):
    script = tmp_path / "sharded.py"
    script.write_text(
        "from torch import nn\n"
        "from fullshard.torch import FullStateDictConfig, Keep, RunFolder, any_rank, fully_shard\n"
        "model = fully_shard(nn.Linear(2, 2))\n"
        "reveal_type(model.set_requires_gradient_sync)\n"
        "reveal_type(model.parameters)\n"
        "reveal_type(model.own_attribute)\n"
        "reveal_type(fully_shard([nn.Linear(2, 2)])[0].unshard)\n"
        "reveal_type(RunFolder)\n"
        "reveal_type(any_rank)\n"
    )
    report = mypy(script, "--check-untyped-defs")
    shown = [line.partition("Revealed type is ")[2] for line in report.splitlines()[:-1]]
    kinds = ["def (", "def (", '"Any"', "def (", "def (", "def ("]
    assert len(shown) == len(kinds), report
    assert all(kind in text for kind, text in zip(kinds, shown, strict=True)), report
