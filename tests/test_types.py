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
    names, *_ = [
        ast.literal_eval(node.value)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and ast.unparse(node).startswith("__all__")
    ] or [[]]
    return names


SOURCE = ROOT / "src" / "fullshard"
PACKAGES = {
    ".".join(("fullshard", *path.parent.relative_to(SOURCE).parts)): listed(path)
    for path in sorted(SOURCE.rglob("__init__.py"))
    if listed(path)
}


IMPORTS = []
for package, names in PACKAGES.items():
    IMPORTS += [f"from {package} import {name}" for name in names]
    IMPORTS += [f"from {package} import {name}s_misspelt" for name in names]

REVEALED = {
    "model.set_requires_gradient_sync": "def (",
    "model.parameters": "def (",
    "model.own_attribute": '"Any"',
    "fully_shard([nn.Linear(2, 2)])[0].unshard": "def (",
    "RunFolder": "def (",
    "any_rank": "def (",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Lines that mypy says of two scripts in one go, without the last."""
    folder = tmp_path_factory.mktemp("typed")
    misspelt, sharded = folder / "misspelt.py", folder / "sharded.py"
    misspelt.write_text("\n".join(IMPORTS) + "\n")
    sharded.write_text(
        "from torch import nn\n"
        "from fullshard.torch import FullStateDictConfig, Keep, RunFolder, any_rank, fully_shard\n"
        "model = fully_shard(nn.Linear(2, 2))\n"
        + "".join(f"reveal_type({expression})\n" for expression in REVEALED)
    )
    options = ["--hide-error-context", "--check-untyped-defs"]
    command = [sys.executable, "-m", "mypy", *options, misspelt, sharded]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[:-1]


@pytest.mark.parametrize("package", ["fullshard", "fullshard.torch", "fullshard.jax"])
def test_dir_has_every_public_name(package):
    module = pytest.importorskip(package)
    assert set(PACKAGES[package]) <= set(dir(module))


@pytest.mark.long
def test_a_misspelt_import_is_an_error_in_every_package(report):
    found = [line for line in report if "has no attribute" in line and "misspelt.py" in line]
    wrong = {number for number, line in enumerate(IMPORTS, 1) if line.endswith("_misspelt")}
    assert len(wrong) > 200
    assert {int(line.split(":")[1]) for line in found} == wrong, report


@pytest.mark.long
def test_fully_shard_gives_a_module_with_the_methods_of_fsdp2(report):
    about = [line for line in report if "sharded.py" in line]
    shown = [line.partition("Revealed type is ")[2] for line in about]
    assert len(shown) == len(REVEALED), report
    assert all(kind in text for kind, text in zip(REVEALED.values(), shown, strict=True)), report
