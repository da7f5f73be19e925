# SPDX-License-Identifier: Apache-2.0
"""Private names of torch: every one that the source uses is in the list, and the list is true."""

import ast
import importlib
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fullshard.core.errors import FullshardError, TorchVersionError
from fullshard.core.tested import TESTED_TORCH
from fullshard.doctor.machine import checks
from fullshard.torch import private_names
from fullshard.torch.private_names import (
    DROP_IN,
    ENGINE,
    OPTIONAL,
    PROVE,
    is_there,
    require,
)

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "fullshard"
# Where tensors, modules and groups of torch are touched: names of their members count, too.
TOUCHING = ("torch", "drop_in", "testing.py", "wrap.py")
LISTED = {path.replace(":", ".") for path in (*ENGINE, *DROP_IN, *PROVE, *OPTIONAL)}
MEMBERS = {path.rpartition(".")[2] for path in LISTED}
# Private names of Python's own, and of things that torch knows nothing of.
PYTHONS = {"_exit", "_fields", "_getframe"}
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "attrgetter"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def dotted(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """The full name of an attribute that is reached from a module, such as ``torch._C.x``."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, aliases)
        return owner and f"{owner}.{node.attr}"
    return None


def names_of_modules(tree: ast.Module) -> dict[str, str]:
    """What a file's imports, and assignments such as ``_aten = torch.ops.aten``, stand for."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                aliases[each.asname or each.name.partition(".")[0]] = (
                    each.name if each.asname else each.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            aliases |= {
                each.asname or each.name: f"{node.module}.{each.name}" for each in node.names
            }
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            full = dotted(node.value, aliases)
            if full:
                aliases[node.targets[0].id] = full
    return aliases


def own_names(tree: ast.Module) -> Iterator[str]:
    """The private names that a file defines: functions, classes, fields, attributes of self."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if ast.unparse(node.value) in ("self", "cls") else []


def unlisted(text: str, own: set[str], members: bool) -> Iterator[str]:
    """The private names of torch in a source that are in no list; each with its line."""
    tree = ast.parse(text)
    aliases = names_of_modules(tree)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            found = [dotted(node, aliases) or ""]
        for full in found:
            private = any(is_private(part) for part in full.split("."))
            if full.startswith("torch.") and private and not is_listed(full):
                yield f"{node.lineno} {full}"
        if members:
            for name in members_asked_for(node, aliases):
                if name not in own | MEMBERS | PYTHONS:
                    yield f"{node.lineno} {name} of some object"


def is_listed(full: str) -> bool:
    """Whether the name is listed, or begins with one, or is a module in which one is listed."""
    return any(full == each or full.startswith(f"{each}.") for each in LISTED)


def members_asked_for(node: ast.AST, aliases: dict[str, str]) -> Iterator[str]:
    """Private attributes of objects, by a dot or by getattr and the like."""
    if isinstance(node, ast.Attribute) and is_private(node.attr):
        if dotted(node, aliases) is None and ast.unparse(node.value) not in ("self", "cls"):
            yield node.attr
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
        for each in node.args:
            if isinstance(each, ast.Constant) and is_private(str(each.value)):
                yield from str(each.value).split(".")


def files() -> Iterator[tuple[str, str, bool]]:
    for file in sorted(SOURCE.rglob("*.py")):
        inside = file.relative_to(SOURCE).as_posix()
        if inside != "torch/private_names.py":
            yield inside, file.read_text("utf-8"), inside.split("/")[0] in TOUCHING


@pytest.mark.long
def test_every_private_name_in_the_source_is_listed():
    own = {name for _, text, _ in files() for name in own_names(ast.parse(text))}
    found = [
        f"{path}:{offence}"
        for path, text, members in files()
        for offence in unlisted(text, own, members)
    ]
    assert not found, "\nput these into torch/private_names.py:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("import torch._gone", "torch._gone"),
        ("from torch._C import _gone", "torch._C._gone"),
        ("from torch._gone.x import y", "torch._gone.x.y"),
        ("import torch.distributed as d\nd._gone.x(1)", "torch.distributed._gone.x"),
        ("from torch import nn\nnn.Module._gone", "torch.nn.Module._gone"),
        ("import torch\n_c = torch._C\n_c._gone", "torch._C._gone"),
        ("tensor._gone", "_gone of some object"),
        ("getattr(tensor, '_gone', None)", "_gone of some object"),
        ("super()._gone()", "_gone of some object"),
    ],
)
def test_the_search_finds(line, expected):
    assert [each.partition(" ")[2] for each in unlisted(line, {"_ours"}, True)][-1:] == [expected]


@pytest.mark.parametrize(
    "line",
    [
        "import torch\ntorch._C._current_graph_task_id()",
        "from torch._ops import OpOverload",
        "import torch.nn\nself._anything; other._ours; x.__class__",
        "import os\nos._exit(1)",
        "param._version",
    ],
)
def test_the_search_passes(line):
    assert list(unlisted(line, {"_ours"}, True)) == []


def test_the_list_holds_nothing_that_the_source_does_not_use():
    words = "\n".join(text for _, text, _ in files())
    assert [path for path in sorted(LISTED) if path.rpartition(".")[2] not in words] == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, where it imports itself
def test_this_torch_has_what_it_must():
    require([*ENGINE, *DROP_IN, *PROVE])
    version = torch.__version__.partition("+")[0]
    missing = [
        name for name, found_in in OPTIONAL.items() if version in found_in and not is_there(name)
    ]
    assert missing == []


def test_a_name_that_is_gone_is_refused_with_the_way_out():
    with pytest.raises(TorchVersionError) as raised:
        require(["torch:_C._gone", "torch._gone:x", "torch:Tensor._version"])
    message = str(raised.value)
    assert "torch._C._gone, torch._gone.x, which torch" in message
    assert "_version" not in message
    assert str(torch.__version__) in message
    assert f"pip install 'torch>={TESTED_TORCH[0]},<={TESTED_TORCH[-1]}'" in message
    assert isinstance(raised.value, ImportError)
    assert isinstance(raised.value, FullshardError)


def test_the_engine_is_not_imported_where_one_is_gone(monkeypatch):
    monkeypatch.delattr(torch._C, "_will_engine_execute_node")
    with pytest.raises(TorchVersionError, match=r"needs torch._C._will_engine_execute_node, which"):
        importlib.reload(private_names)
    # Whichever part of the engine is asked for, its face comes first, and in it this check.
    face = (SOURCE / "torch/__init__.py").read_text("utf-8")
    assert "from fullshard" not in face[: face.index("import fullshard.torch.private_names")]


def test_versions_are_the_same_everywhere():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    oldest, newest = (".".join(TESTED_TORCH[end].split(".")[:2]) for end in (0, -1))
    assert f"torch>={oldest}" in extras["torch"]
    tested = (checks.OLDEST_TORCH, checks.NEWEST_TORCH)
    assert tested == tuple(tuple(map(int, each.split("."))) for each in (oldest, newest))
    rows = (ROOT / "docs" / "versions.md").read_text("utf-8").splitlines()
    torches = {row.split(" | ")[1].partition("+")[0] for row in rows if row.startswith("| 3.")}
    assert torches == set(TESTED_TORCH)
    assert set(TESTED_TORCH) >= {each for found in OPTIONAL.values() for each in found}
