# SPDX-License-Identifier: Apache-2.0
"""The shape of the source: who imports whom, what is public, how long things may get.

A check is a function from one source file to its offences. It runs over the files in the repository
and, at the end of this page, over small samples, to show that it does find what it looks for.
"""

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import pytest
from support.limits import PROCESS_S

import fullshard

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/fullshard/"


class Layer(NamedTuple):
    """What one folder or file directly below the package may import, besides itself."""

    layers: Set[str] = frozenset()
    packages: Set[str] = frozenset()  # beside the standard library
    without_frameworks: bool = False  # loads in a fresh interpreter without torch and jax


# From the bottom up. Folders still to come have their row already; one without a row is an offence.
LAYERS = {
    "core": Layer(without_frameworks=True),
    "plan": Layer({"core"}, without_frameworks=True),
    "report": Layer({"core"}, {"rich", "matplotlib"}, without_frameworks=True),
    "checkpoint": Layer({"core"}, {"numpy", "xxhash"}, without_frameworks=True),
    "ckpt": Layer({"core", "checkpoint"}, {"rich"}, without_frameworks=True),
    "wrap": Layer({"core"}, {"torch"}),
    "torch": Layer({"core", "checkpoint", "wrap"}, {"torch", "numpy", "safetensors"}),
    "jax": Layer({"core", "checkpoint", "launchers"}, {"jax", "flax", "optax", "orbax", "numpy"}),
    "train": Layer(
        {"core", "plan", "checkpoint", "wrap", "launchers", "distributed", "local_ranks"}
        | {"torch", "jax"},
        {"torch", "jax", "flax", "optax", "numpy", "rich", "tomli_w"},
    ),
    "launchers": Layer({"core"}, without_frameworks=True),
    "local_ranks": Layer({"core"}, {"torch"}),
    "distributed": Layer({"core", "launchers"}, {"torch"}),
    "testing": Layer({"core", "torch"}, {"torch", "numpy"}),
    "drop_in": Layer({"core", "wrap", "torch"}, {"torch"}),
    "run": Layer({"core", "launchers", "distributed"}, {"torch"}),
    "doctor": Layer(
        {"core", "launchers", "distributed", "local_ranks", "torch"}, {"torch", "rich"}
    ),
    "cli": Layer(
        {"core", "plan", "checkpoint", "ckpt", "report", "train", "run", "doctor"},
        without_frameworks=True,
    ),
    "__main__": Layer({"cli"}, without_frameworks=True),
    "__init__": Layer(without_frameworks=True),
}

# Edges at which something optional or heavy may load late.
LATE_IMPORTS = {"cli.py", "ckpt/__init__.py", "__init__.py", "jax/__init__.py"}
# Signatures that are somebody else's convention.
MANY_ARGUMENTS = {
    "torch/fsdp1/wrapper.py: FullyShardedDataParallel.__init__",
    "torch/fsdp2/fully_shard.py: fully_shard",
}
COLLECTIVE_CALLERS = {"torch/comm/process_group.py"}

FILE_LINES = 400
FUNCTION_LINES = 60  # without its docstring
ARGUMENTS = 7  # without self or cls, *args and **kwargs

LICENSE_LINE = "# SPDX-License-Identifier: Apache-2.0"
# Of torch.distributed, and with their other spelling the methods of its process groups.
COLLECTIVE = re.compile(
    r"_?all_?gather.*|_?reduce_?scatter.*|_?all_?reduce.*|_?all_?to_?all.*|broadcast.*|reduce"
    r"|gather(_object)?|scatter(_object_list)?|i?send|i?recv|(send|recv)_object_list|P2POp"
    r"|batch_isend_irecv|(monitored_)?barrier|_functional_collectives|nn"
)
# A group's methods that no other object has; on any other name `all_reduce` is our own `Comm`.
GROUP_METHOD = re.compile(
    r"_?allgather.*|_?allreduce.*|_?alltoall.*|_(all_gather|reduce_scatter)_(base|tensor)"
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One Python file: its path in the repository, with slashes, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def inside(self) -> str:
        """The path inside the package, such as ``torch/unit/unit.py``."""
        return self.path.removeprefix(PACKAGE)

    @property
    def layer(self) -> str:
        return self.inside.split("/")[0].removesuffix(".py")

    def at(self, line: int, what: str) -> str:
        return f"{self.path}:{line} {what}"


def read_sources(*folders: str) -> list[Source]:
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    return [Source(file.relative_to(ROOT).as_posix(), file.read_text("utf-8")) for file in files]


def imported(node: ast.AST) -> list[str]:
    """The dotted names that an import statement loads, as far as our package's layers go."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        if module == "fullshard":
            return [f"fullshard.{alias.name}" for alias in node.names]
        return [module]
    return []


def functions(tree: ast.Module) -> Iterator[tuple[str, Function, bool]]:
    """Each function with its qualified name, and whether its first argument is self or cls."""

    def below(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                plain = any(
                    getattr(each, "id", "") == "staticmethod" for each in child.decorator_list
                )
                yield prefix + child.name, child, isinstance(node, ast.ClassDef) and not plain
            named = isinstance(child, Function | ast.ClassDef)
            yield from below(child, f"{prefix}{child.name}." if named else prefix)

    return below(tree, "")


def imports_go_down(source: Source) -> Iterator[str]:
    layer = LAYERS.get(source.layer)
    if layer is None:
        yield source.at(1, f"{source.layer} has no row in the table of layers")
        return
    for node in ast.walk(source.tree):
        for name in imported(node):
            top, _, below = name.partition(".")
            if top == "fullshard":
                target = below.partition(".")[0]
                wrong = target != source.layer and target not in layer.layers
            elif not top:
                wrong = True  # relative: write the whole name
            else:
                wrong = top not in sys.stdlib_module_names and top not in layer.packages
            if wrong:
                yield source.at(node.lineno, f"{source.layer} may not import {name}")


def imports_stand_at_the_top(source: Source) -> Iterator[str]:
    lines = source.text.splitlines()
    for name, function, _ in functions(source.tree):
        for node in own_nodes(function):
            called = node.func if isinstance(node, ast.Call) else None
            by_call = getattr(called, "attr", getattr(called, "id", "")) in {
                "import_module",
                "__import__",
            }
            if not imported(node) and not by_call:
                continue
            if source.inside not in LATE_IMPORTS:
                yield source.at(node.lineno, f"import inside {name}")
            elif not by_call and "# noqa: PLC0415" not in lines[node.lineno - 1]:
                yield source.at(node.lineno, f"import inside {name} without '# noqa: PLC0415'")


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """What stands in ``function`` itself, not in a function inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, Function):
            yield child
            yield from own_nodes(child)


def public_names_are_listed(source: Source) -> Iterator[str]:
    name = source.path.removesuffix("/__init__.py").removesuffix(".py").rpartition("/")[2]
    if name.startswith("_"):
        return
    listed = listed_names(source.tree)
    if listed is None:
        yield source.at(1, "no __all__ that is a plain list of names")
        return
    for node in source.tree.body:
        name = node.name if isinstance(node, Function | ast.ClassDef) else "_"
        if not name.startswith("_") and name not in listed:
            yield source.at(node.lineno, f"{name} is public but not in __all__")
    bound = bound_names(source.tree)
    if "__getattr__" not in bound:  # otherwise names may resolve late, which another test asks
        for each in sorted(set(listed) - bound):
            yield source.at(1, f"{each} is in __all__ but not in the module")
    for each in sorted({each for each in listed if listed.count(each) > 1}):
        yield source.at(1, f"{each} is in __all__ twice")


def listed_names(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(each, ast.Name) and each.id == "__all__" for each in targets):
            try:
                return list(ast.literal_eval(node.value))
            except ValueError:
                return None
    return None


def bound_names(tree: ast.Module) -> set[str]:
    """The names that exist in a module once it is loaded."""
    names = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, Function | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            pending += ast.iter_child_nodes(node)
    return names


def budgets_are_kept(source: Source) -> Iterator[str]:
    length = len(source.text.splitlines())
    if length > FILE_LINES:
        yield source.at(1, f"{length} lines, at most {FILE_LINES}")
    for name, function, bound in functions(source.tree):
        length = length_without_docstring(function)
        if length > FUNCTION_LINES:
            yield source.at(function.lineno, f"{name} has {length} lines, at most {FUNCTION_LINES}")
        count = count_arguments(function, bound)
        if count > ARGUMENTS and f"{source.inside}: {name}" not in MANY_ARGUMENTS:
            yield source.at(function.lineno, f"{name} has {count} arguments, at most {ARGUMENTS}")


def length_without_docstring(function: Function) -> int:
    length = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        length -= docstring.end_lineno - docstring.lineno + 1
    return length


def count_arguments(function: Function, bound: bool) -> int:
    given = function.args
    return len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - bound


def licence_is_named_once(source: Source) -> Iterator[str]:
    lines = source.text.splitlines()
    first = 1 if lines and lines[0].startswith("#!") else 0
    if lines[first : first + 1] != [LICENSE_LINE]:
        yield source.at(first + 1, f"expected {LICENSE_LINE!r}")
    tag = LICENSE_LINE.partition(" Apache")[0]
    for number, line in enumerate(lines, 1):
        if line.startswith(tag) and number != first + 1:
            yield source.at(number, "a second licence line")


def collectives_stay_in_comm(source: Source) -> Iterator[str]:
    if source.inside in COLLECTIVE_CALLERS:
        return
    aliases = {"torch.distributed"}
    for node in ast.walk(source.tree):
        for each in getattr(node, "names", []) if imported(node) else []:
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            if module + each.name == "torch.distributed":
                aliases.add(each.asname or each.name)
            elif module.startswith("torch.distributed."):
                parts = (each.name, module.split(".")[-2])
                if any(COLLECTIVE.fullmatch(part) for part in parts):
                    yield source.at(node.lineno, f"collective {module}{each.name}")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            of_module = ast.unparse(node.value) in aliases and COLLECTIVE.fullmatch(node.attr)
            if of_module or GROUP_METHOD.fullmatch(node.attr):
                yield source.at(node.lineno, f"collective {ast.unparse(node)}")


CHECKS = {
    imports_go_down: (PACKAGE,),
    imports_stand_at_the_top: (PACKAGE,),
    public_names_are_listed: (PACKAGE,),
    budgets_are_kept: (PACKAGE, "benchmarks", "examples"),
    licence_is_named_once: (PACKAGE, "tests", "benchmarks", "examples"),
    collectives_stay_in_comm: (PACKAGE + "torch",),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_source(check):
    sources = read_sources(*CHECKS[check])
    assert PACKAGE + "torch/comm/process_group.py" in {source.path for source in sources}, (
        "read too little"
    )
    offences = [offence for source in sources for offence in check(source)]
    assert not offences, "\n" + "\n".join(offences)


def test_what_needs_no_framework_loads_without_one():
    modules = [
        source.path.removeprefix("src/")
        .removesuffix(".py")
        .replace("/", ".")
        .removesuffix(".__init__")
        for source in read_sources(PACKAGE)
        if source.layer in LAYERS and LAYERS[source.layer].without_frameworks
    ]
    assert {"fullshard", "fullshard.core.schedule", "fullshard.cli"} <= set(modules)
    program = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    loaded = {"torch", "jax"} & set(sys.modules)
    if loaded:
        sys.exit(f"{name} loads {', '.join(sorted(loaded))}")
"""
    result = subprocess.run(
        [sys.executable, "-c", program, *modules],
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_names_that_the_package_resolves_late_are_there():
    missing = [name for name in fullshard.__all__ if not hasattr(fullshard, name)]
    assert not missing
    assert set(fullshard.__all__) <= set(dir(fullshard))
    assert not hasattr(fullshard, "no_such_name")


def test_the_lists_of_exceptions_hold_nothing_stale():
    sources = {source.inside: source for source in read_sources(PACKAGE)}
    many = {
        f"{path}: {name}"
        for path, source in sources.items()
        for name, function, bound in functions(source.tree)
        if count_arguments(function, bound) > ARGUMENTS
    }
    assert many >= MANY_ARGUMENTS
    assert set(sources) >= LATE_IMPORTS | COLLECTIVE_CALLERS


# Samples for each check, below a line with its name and a file's. A comment "#!" is the offence
# expected on its line; a sample without one must pass.
SAMPLES = """
    == imports_go_down core/a.py
    import os, torch.nn  #! core may not import torch.nn
    from numpy import x  #! core may not import numpy
    import fullshard.plan.cost  #! core may not import fullshard.plan.cost
    from . import spec  #! core may not import .
    def f():
        from fullshard import wrap, core  #! core may not import fullshard.wrap
    == imports_go_down plan/a.py
    from fullshard.checkpoint.commit import x  #! plan may not import fullshard.checkpoint.commit
    == imports_go_down checkpoint/a.py
    from fullshard.plan import x  #! checkpoint may not import fullshard.plan
    == imports_go_down torch/a.py
    import jax  #! torch may not import jax
    import fullshard.jax  #! torch may not import fullshard.jax
    == imports_go_down jax/a.py
    import torch  #! jax may not import torch
    from fullshard.torch import x  #! jax may not import fullshard.torch
    == imports_go_down new/a.py
    import os  #! new has no row in the table of layers
    == imports_go_down __init__.py
    import fullshard.core  #! __init__ may not import fullshard.core
    == imports_go_down core/a.py
    import os.path
    from fullshard.core.spec import x
    == imports_go_down train/a.py
    import torch, fullshard.torch.api
    from fullshard import wrap

    == imports_stand_at_the_top torch/a.py
    import importlib
    def f():
        import os  # noqa: PLC0415  #! import inside f
        importlib.import_module("os")  #! import inside f
    class A:
        def f(self):
            def g():
                if self:
                    from os import path  #! import inside A.f.g
    == imports_stand_at_the_top cli.py
    def f():
        import os  #! import inside f without '# noqa: PLC0415'
    == imports_stand_at_the_top cli.py
    def f():
        import os  # noqa: PLC0415
    == imports_stand_at_the_top core/a.py
    try:
        import os
    except ImportError:
        os = None

    == public_names_are_listed core/a.py
    x = 1  #! no __all__ that is a plain list of names
    == public_names_are_listed core/__init__.py
    __all__ = [*x]  #! no __all__ that is a plain list of names
    == public_names_are_listed core/a.py
    __all__ = ["gone"]  #! gone is in __all__ but not in the module
    def f():  #! f is public but not in __all__
        gone = 1
    class C: ...  #! C is public but not in __all__
    def _g(): ...
    == public_names_are_listed core/a.py
    __all__: list[str] = ["x", "x"]  #! x is in __all__ twice
    x = 1
    == public_names_are_listed core/a.py
    __all__ = ["a", "b", "c"]
    import a.x
    if a:
        b: int = 1
    for c in a: ...
    == public_names_are_listed a.py
    __all__ = ["late"]
    def __getattr__(name): ...
    == public_names_are_listed core/_a.py
    def f(): ...

    == budgets_are_kept core/a.py
    async def f(a, /, b, c, d, e, f, *, g, h): ...  #! f has 8 arguments, at most 7
    class A:
        @staticmethod
        def f(s, a, b, c, d, e, f, g): ...  #! A.f has 8 arguments, at most 7
    == budgets_are_kept torch/fsdp2/fully_shard.py
    def fully_shard(a, b, c, d, e, f, g, h): ...
    class A:
        def f(self, a, b, c, d, e, f, g, *args, **kwargs): ...

    == licence_is_named_once core/a.py
    import os  #! expected '# SPDX-License-Identifier: Apache-2.0'
    == licence_is_named_once core/a.py
    # SPDX-License-Identifier: Apache-2.0
    # SPDX-License-Identifier: MIT  #! a second licence line
    == licence_is_named_once core/a.py
    #!/usr/bin/env python3
    # SPDX-License-Identifier: Apache-2.0

    == collectives_stay_in_comm torch/a.py
    import torch
    import torch.distributed as dist
    from torch import distributed as d
    from torch.distributed import ReduceOp, broadcast  #! collective torch.distributed.broadcast
    from torch.distributed.nn import x  #! collective torch.distributed.nn.x
    dist.all_reduce(x)  #! collective dist.all_reduce
    later = d.barrier  #! collective d.barrier
    torch.distributed.all_to_all_single(x, y)  #! collective torch.distributed.all_to_all_single
    dist.group.WORLD.allreduce(x)  #! collective dist.group.WORLD.allreduce
    == collectives_stay_in_comm torch/a.py
    import torch.distributed as dist
    dist.get_rank()
    self.comm.all_reduce(x)
    barrier.wait()
    == collectives_stay_in_comm torch/comm/process_group.py
    import torch.distributed as dist
    dist.all_reduce(x)
"""


def samples():
    for block in textwrap.dedent(SAMPLES).strip().split("== ")[1:]:
        title, _, marked = block.partition("\n")
        check, path = title.split()
        lines = [line.partition("  #! ") for line in marked.rstrip().splitlines()]
        expected = [f"{number} {line[2]}" for number, line in enumerate(lines, 1) if line[2]]
        text = "\n".join(line[0] for line in lines)
        yield pytest.param(globals()[check], Source(PACKAGE + path, text), expected, id=title)


@pytest.mark.parametrize(("check", "source", "expected"), list(samples()))
def test_a_check_finds_what_is_wrong_and_nothing_else(check, source, expected):
    found = sorted(offence.removeprefix(f"{source.path}:") for offence in check(source))
    assert found == sorted(expected)


def test_a_file_and_a_function_have_their_lines():
    def found(text):
        return list(budgets_are_kept(Source("a.py", text)))

    assert found("x = 1\n" * 400) == []
    assert found("x = 1\n" * 401) == ["a.py:1 401 lines, at most 400"]
    title, docstring, line = "def f():\n", '    """\n\n\n    """\n', "    x = 1\n"
    assert found(title + docstring + line * 59) == []
    assert found(title + docstring + line * 60) == ["a.py:1 f has 61 lines, at most 60"]


def test_every_check_has_a_sample_that_it_finds_and_one_that_it_passes():
    shown = {(each.values[0], bool(each.values[2])) for each in samples()}
    assert shown == {(check, found) for check in CHECKS for found in (True, False)}
