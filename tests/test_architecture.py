# SPDX-License-Identifier: Apache-2.0
"""The shape of the source: who imports whom, what is public, how long things may get.

A check is a function from one source file, or from all of them, to offences. It runs over the
files in the repository and, at the end of this page, over small samples, to show that it finds what
it looks for.
"""

import ast
import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import pytest

import fullshard

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/fullshard/"


class Layer(NamedTuple):
    """The imports that one folder or file directly below the package may have, besides itself."""

    layers: Set[str] = frozenset()
    packages: Set[str] = frozenset()  # beside the standard library
    without_frameworks: bool = False  # loads in a fresh interpreter without torch and jax


# From the bottom up. A folder or file without a row is an offence.
LAYERS = {
    "core": Layer(without_frameworks=True),
    "host_memory": Layer(without_frameworks=True),
    "plan": Layer({"core"}, {"rich", "matplotlib"}, without_frameworks=True),
    "checkpoint": Layer({"core"}, {"numpy", "xxhash", "rich"}, without_frameworks=True),
    "report": Layer({"core"}, {"rich", "jinja2", "plotly", "matplotlib"}, without_frameworks=True),
    "wrap": Layer({"core"}, {"torch"}),
    "torch": Layer(
        {"core", "host_memory", "plan", "checkpoint", "report", "wrap"}, {"torch", "numpy"}
    ),
    "jax": Layer({"core", "checkpoint", "launchers"}, {"jax", "flax", "optax", "numpy"}),
    "train": Layer(
        {"core", "host_memory", "plan", "checkpoint", "wrap", "launchers", "distributed"}
        | {"local_ranks", "report"}
        | {"torch", "jax"},
        {"torch", "jax", "flax", "optax", "numpy", "rich", "tomli_w"},
    ),
    "launchers": Layer({"core"}, without_frameworks=True),
    "local_ranks": Layer({"core"}, {"torch"}),
    "distributed": Layer({"core", "launchers"}, {"torch"}),
    "testing": Layer({"core", "torch"}, {"torch", "numpy"}),
    "drop_in": Layer({"core", "wrap", "torch"}, {"torch"}),
    "run": Layer({"core", "launchers", "distributed", "local_ranks"}, {"torch"}),
    "doctor": Layer(
        {"core", "host_memory", "plan", "launchers", "distributed", "local_ranks", "torch"},
        {"torch", "rich"},
    ),
    "prove": Layer(
        {"core", "wrap", "torch", "local_ranks", "distributed", "train"},
        {"torch", "rich", "jinja2"},
    ),
    "cli": Layer(
        {"core", "plan", "checkpoint", "train", "run", "doctor", "prove", "report"},
        without_frameworks=True,
    ),
    "__main__": Layer({"cli"}, without_frameworks=True),
    "__init__": Layer(  # for type checkers: it loads none of them
        {
            *("core", "distributed", "doctor", "jax", "launchers", "report", "testing"),
            *("torch", "train", "wrap"),
        },
        without_frameworks=True,
    ),
}


def floors(*rooms: str) -> dict[str, Set[str]]:
    """Rooms from the bottom up, of which each may import all those below it."""
    return {room: frozenset(rooms[:number]) for number, room in enumerate(rooms)}


_TORCH = ("comm", "tensor", "unit", "step", "state", "optim", "sharding")
_TOLD_IN_TRAIN = ("metrics", "survival", "loop")
SHARED_IN_TRAIN = ("signals", "config", "loggers", "fits", "data", "run", *_TOLD_IN_TRAIN)
# For a package in folders: the rooms (folders and files directly inside it) that each room may
# import, besides itself. What else it may import says the package's row in LAYERS. The package's
# __init__ shows what its rooms have and may import all of them; none may import it.
ROOMS: dict[str, Mapping[str, Set[str]]] = {
    "torch": {
        "private_names": frozenset(),
        **floors(*_TORCH),
        "inspection": frozenset(_TORCH) - {"sharding"},
        "measuring": frozenset(_TORCH),
        "capture": frozenset(_TORCH),
        "checkpoint": frozenset(_TORCH),
        "fsdp1": frozenset(_TORCH),
        "fsdp2": frozenset(_TORCH),
    },
    "plan": {
        **floors("run", "cluster", "model", "step", "memory", "predict"),
        "measured": frozenset({"run", "model", "step"}),
        "scale": frozenset({"run", "cluster", "model", "step", "memory", "predict"}),
        "pictures": frozenset({"step", "memory", "scale"}),
        "choose": frozenset({"run", "cluster", "model", "step", "memory", "predict"}),
        "record": frozenset({"step", "run", "cluster", "model", "predict", "choose"}),
        "command": frozenset(
            {"run", "cluster", "model", "step", "memory", "predict", "scale", "pictures", "choose"}
        ),
    },
    "doctor": {
        "findings": frozenset(),
        **dict.fromkeys(("machine", "links", "scripts"), frozenset({"findings"})),
        "calibration": frozenset({"links"}),
        "output": frozenset({"findings", "machine", "links", "scripts"}),
        "command": frozenset({"findings", "machine", "links", "scripts", "output"}),
    },
    "train": {
        **floors(*SHARED_IN_TRAIN),
        **dict.fromkeys(("torch", "jax"), frozenset(SHARED_IN_TRAIN)),
    },
}

# Signatures that are somebody else's convention.
MANY_ARGUMENTS = {
    "torch/fsdp1/wrapper.py: FullyShardedDataParallel.__init__",
    "torch/fsdp2/fully_shard.py: fully_shard",
}
COLLECTIVE_CALLERS = {"torch/comm/process_group.py"}
# Files that pages show under their own names. Elsewhere an underscore says what is private.
PUBLIC_FILES = {"distributed.py", "launchers.py", "testing.py", "wrap.py"}

FOLDER_FILES = 12  # without its __init__.py
FILE_LINES = 500
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

CLAUSE = re.compile(r"(What|How|Which|Whether|Those|The same|Of|That|Within|Whose|Where|Who)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One Python file: its path in the repository, with slashes, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def inside(self) -> str:
        """The path inside the package, such as ``torch/unit/unit.py``."""
        return self.path.removeprefix(PACKAGE)

    @property
    def layer(self) -> str:
        return self.inside.split("/")[0].removesuffix(".py")

    @property
    def room(self) -> str:
        """The folder or file inside its layer that this file is, or is part of."""
        return self.inside.partition("/")[2].split("/")[0].removesuffix(".py") or "__init__"

    @property
    def module(self) -> str:
        """The name under which the file is imported."""
        path = self.path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__")
        return path.replace("/", ".")

    def at(self, line: int, what: str) -> str:
        return f"{self.path}:{line} {what}"


@cache
def read_source(file: Path) -> Source:
    return Source(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))


def read_sources(*folders: str) -> list[Source]:
    return [
        read_source(file) for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))
    ]


@pytest.fixture(scope="module", autouse=True)
def sources_are_parsed_once() -> Iterator[None]:
    yield
    read_source.cache_clear()


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
    for node in source.nodes:
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


def rooms_import_down(source: Source) -> Iterator[str]:
    rooms = ROOMS.get(source.layer)
    if rooms is None or source.room == "__init__":
        return
    if source.room not in rooms:
        yield source.at(1, f"{source.room} has no row in the table of rooms of {source.layer}")
        return
    package = f"fullshard.{source.layer}"
    for node in source.nodes:
        for name in imported(node):
            inside = f"{name}.".removeprefix(f"{package}.")
            if inside == f"{name}.":
                continue
            names = [inside.split(".")[0]]
            if name == package:  # its face, or rooms by name
                names = [each.name for each in node.names if isinstance(node, ast.ImportFrom)]
            for target in names or ["__init__"]:
                if target != source.room and target not in rooms[source.room]:
                    offence = f"{source.room} may not import {target} of {package}"
                    yield source.at(node.lineno, offence)


def imports_make_no_circle(sources: Sequence[Source]) -> Iterator[str]:
    """Files that import each other, directly or not; imports for types only count like others."""
    by_module = {source.module: source for source in sources}
    imports = {
        module: sorted(set(loaded_modules(source, by_module)) - {module})
        for module, source in by_module.items()
    }
    done: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> Iterator[str]:
        if module in path:
            circle = path[path.index(module) :]
            yield by_module[module].at(1, f"imports itself by way of {', '.join(circle[1:])}")
        elif module not in done:
            path.append(module)
            for each in imports[module]:
                yield from visit(each)
            path.pop()
            done.add(module)

    for module in imports:
        yield from visit(module)


def loaded_modules(source: Source, known: Mapping[str, Source]) -> Iterator[str]:
    """The modules among ``known`` that the import statements of ``source`` name."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in known or node.module in known:
                    yield inner if inner in known else node.module


def folders_are_small(sources: Sequence[Source]) -> Iterator[str]:
    """Folders with too many files."""
    found = Counter(
        source.path.rpartition("/")[0]
        for source in sources
        if not source.path.endswith("/__init__.py")
    )
    for folder, count in sorted(found.items()):
        if count > FOLDER_FILES:
            yield f"{folder}:1 {count} files, at most {FOLDER_FILES}"


def public_names_are_listed(source: Source) -> Iterator[str]:
    shows = any(isinstance(node, ast.ImportFrom) for node in source.tree.body)
    package = source.path.endswith("/__init__.py") and shows
    listed = listed_names(source.tree)
    if listed is None:
        if package or source.inside in PUBLIC_FILES:
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


def docstrings_are_sentences(source: Source) -> Iterator[str]:
    """A file says what it holds, a function does something, a class is something: no clauses."""
    if not ast.get_docstring(source.tree):
        yield source.at(1, "no docstring that says what the file holds")
    for node in source.nodes:
        if isinstance(node, Function | ast.ClassDef | ast.Module):
            docstring = ast.get_docstring(node) or ""
            if clause := CLAUSE.match(docstring):
                name = getattr(node, "name", "the file")
                line = getattr(node, "lineno", 1)
                yield source.at(line, f"the docstring of {name} begins with a clause: {clause[0]}")


def class_names_stand_for_one_thing(sources: Sequence[Source]) -> Iterator[str]:
    """Classes that share a name, without its underscores."""
    homes: dict[str, str] = {}
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                name = node.name.strip("_")
                if name in homes:
                    yield source.at(node.lineno, f"class {node.name} stands in {homes[name]}, too")
                homes.setdefault(name, source.inside)


def collectives_stay_in_comm(source: Source) -> Iterator[str]:
    if source.inside in COLLECTIVE_CALLERS:
        return
    aliases = {"torch.distributed"}
    for node in source.nodes:
        for each in getattr(node, "names", []) if imported(node) else []:
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            if module + each.name == "torch.distributed":
                aliases.add(each.asname or each.name)
            elif module.startswith("torch.distributed."):
                parts = (each.name, module.split(".")[-2])
                if any(COLLECTIVE.fullmatch(part) for part in parts):
                    yield source.at(node.lineno, f"collective {module}{each.name}")
    for node in source.nodes:
        if isinstance(node, ast.Attribute):
            of_module = ast.unparse(node.value) in aliases and COLLECTIVE.fullmatch(node.attr)
            if of_module or GROUP_METHOD.fullmatch(node.attr):
                yield source.at(node.lineno, f"collective {ast.unparse(node)}")


# Of those that take a default device, of which a user's context may choose another.
FACTORIES = {"arange", "as_tensor", "empty", "eye", "full", "ones", "rand", "randint", "randn"}
FACTORIES |= {"randperm", "scalar_tensor", "tensor", "zeros"}


def new_tensors_name_their_device(source: Source) -> Iterator[str]:
    """``with torch.device("meta")`` and ``torch.set_default_device`` are users' to say."""
    for node in source.nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch."):
            name = ast.unparse(node.func).removeprefix("torch.")
            if name in FACTORIES and "device" not in {each.arg for each in node.keywords}:
                yield source.at(node.lineno, f"torch.{name} without device=")


CHECKS = {
    imports_go_down: (PACKAGE,),
    rooms_import_down: (PACKAGE,),
    public_names_are_listed: (PACKAGE,),
    budgets_are_kept: (PACKAGE, "benchmarks", "examples"),
    licence_is_named_once: (PACKAGE, "tests", "benchmarks", "examples"),
    docstrings_are_sentences: (PACKAGE,),
    collectives_stay_in_comm: (PACKAGE + "torch",),
    new_tensors_name_their_device: (PACKAGE + "torch",),
}


CHECKS_OF_ALL = {
    imports_make_no_circle: (PACKAGE,),
    folders_are_small: (PACKAGE,),
    class_names_stand_for_one_thing: (PACKAGE,),
}


def offences_in(check, sources: Sequence[Source]) -> list[str]:
    if check in CHECKS_OF_ALL:
        return list(check(sources))
    return [offence for source in sources for offence in check(source)]


@pytest.mark.parametrize("check", CHECKS | CHECKS_OF_ALL, ids=lambda check: check.__name__)
def test_the_source(check):
    sources = read_sources(*(CHECKS | CHECKS_OF_ALL)[check])
    assert PACKAGE + "torch/comm/process_group.py" in {source.path for source in sources}, (
        "read too little"
    )
    offences = offences_in(check, sources)
    assert not offences, "\n" + "\n".join(offences)


def test_names_that_the_package_resolves_late_are_there():
    missing = [name for name in fullshard.__all__ if not hasattr(fullshard, name)]
    assert not missing
    assert set(fullshard.__all__) <= set(dir(fullshard))
    assert not hasattr(fullshard, "no_such_name")


def test_names_of_earlier_versions_are_where_scripts_look_for_them():
    for name in ("communication", "describe", "memory_of_rank", "memory_of_ranks"):
        assert getattr(fullshard, name) is getattr(fullshard.torch.inspection, name)
    for home in ("fsdp1", "fsdp2", "inspection"):
        module = getattr(fullshard.torch, home)
        for name in module.__all__:
            assert getattr(fullshard.torch, name) is getattr(module, name)
    assert fullshard.torch.RestingBytes is fullshard.torch.inspection.Bytes
    assert fullshard.torch.Trace is not None
    assert callable(fullshard.torch.pad_to_longest)
    assert not hasattr(fullshard.torch, "no_such_name")


def test_methods_of_public_classes_say_what_they_do():
    torch = fullshard.torch
    homes = (torch, torch.fsdp1, torch.fsdp2, torch.inspection, torch.checkpoint)
    homes += (fullshard.checkpoint, fullshard.plan, fullshard.report, fullshard.testing)
    public = [getattr(home, name) for home in homes for name in home.__all__]
    classes = dict.fromkeys(each for each in public if isinstance(each, type))
    ours = [each for each in classes if each.__module__.startswith("fullshard.")]
    methods = {
        f"{owner.__module__}.{owner.__name__}.{name}": getattr(owner, name)
        for owner in ours
        for name, member in vars(owner).items()
        if not name.startswith("_") and (callable(member) or hasattr(member, "__get__"))
    }
    assert len(methods) > 100
    assert not [name for name, method in methods.items() if not inspect.getdoc(method)]


def test_the_lists_of_exceptions_hold_nothing_stale():
    sources = {source.inside: source for source in read_sources(PACKAGE)}
    many = {
        f"{path}: {name}"
        for path, source in sources.items()
        for name, function, bound in functions(source.tree)
        if count_arguments(function, bound) > ARGUMENTS
    }
    assert many >= MANY_ARGUMENTS
    assert set(sources) >= COLLECTIVE_CALLERS


def test_every_row_is_of_something_that_is_there():
    sources = read_sources(PACKAGE)
    layers = {source.layer for source in sources}
    assert LAYERS.keys() == layers
    for package, rooms in ROOMS.items():
        there = {source.room for source in sources if source.layer == package}
        assert rooms.keys() == there - {"__init__"}
        assert all(below <= rooms.keys() for below in rooms.values())


def test_at_most_nine_floors_in_torch():
    def floor(room):
        return 1 + max((floor(each) for each in ROOMS["torch"][room]), default=0)

    assert max(map(floor, ROOMS["torch"])) <= 9


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
    == imports_go_down jax/a.py
    import torch  #! jax may not import torch
    from fullshard.torch import x  #! jax may not import fullshard.torch
    == imports_go_down new/a.py
    import os  #! new has no row in the table of layers
    == imports_go_down __init__.py
    import fullshard.plan  #! __init__ may not import fullshard.plan
    == imports_go_down train/a.py
    import os.path
    from fullshard.train.spec import x
    import torch, fullshard.torch.api
    from fullshard import wrap

    == rooms_import_down torch/unit/a.py
    from fullshard.torch.step.tracker import x  #! unit may not import step of fullshard.torch
    if TYPE_CHECKING:
        import fullshard.torch.optim.a  #! unit may not import optim of fullshard.torch
    import fullshard.torch  #! unit may not import __init__ of fullshard.torch
    from fullshard.torch import state, comm  #! unit may not import state of fullshard.torch
    == rooms_import_down torch/attic/a.py
    import os  #! attic has no row in the table of rooms of torch
    == rooms_import_down torch/unit/a.py
    import torch.optim, fullshard.torch.tensor.rules
    from fullshard.core.layout import x
    from fullshard.torch.unit.b import x
    from fullshard.torch import comm
    == rooms_import_down torch/__init__.py
    from fullshard.torch.fsdp2 import x
    == rooms_import_down wrap.py
    import fullshard.core

    == imports_make_no_circle core/a.py
    from fullshard.core import b  #! imports itself by way of fullshard.core.b, fullshard.core.c
    == + core/b.py
    from fullshard.core.c import x
    == + core/c.py
    if TYPE_CHECKING:
        import fullshard.core.a
    == imports_make_no_circle core/a.py
    from fullshard.core.b import x
    from fullshard.core.c import x
    == + core/b.py
    from fullshard.core.c import x
    == + core/c.py
    import os
    == + core/__init__.py
    from fullshard.core.a import x

    == folders_are_small plan/a.py
    "one of one"

    == class_names_stand_for_one_thing core/a.py
    class Run: ...
    def f():
        class _Run: ...  #! class _Run stands in core/a.py, too
    == class_names_stand_for_one_thing core/a.py
    class Run: ...
    == + plan/b.py
    class Runs: ...

    == public_names_are_listed core/a.py
    def f(): ...
    == public_names_are_listed wrap.py
    x = 1  #! no __all__ that is a plain list of names
    == public_names_are_listed core/__init__.py
    from a import x  #! no __all__ that is a plain list of names
    __all__ = [*x]
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
    == public_names_are_listed core/__init__.py
    "has no names of its own"

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

    == docstrings_are_sentences torch/a.py
    import os  #! no docstring that says what the file holds
    class A:
        def f(self):  #! the docstring of f begins with a clause: What
            '''What f makes of it.'''
    == docstrings_are_sentences torch/a.py
    '''A file.'''
    def f():
        '''Whatever it takes.'''
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

    == new_tensors_name_their_device torch/a.py
    torch.empty(3, dtype=x)  #! torch.empty without device=
    x.add(torch.tensor([1]))  #! torch.tensor without device=
    == new_tensors_name_their_device torch/a.py
    torch.zeros(3, device="cpu"), torch.zeros_like(x), x.new_zeros(3)
"""


def samples():
    """Each check with the files it is tried on and what it is to find in the first of them.

    A title of "+" and a path is one more file of the sample above it.
    """
    found: list[tuple[str, list[Source], list[str]]] = []
    for block in textwrap.dedent(SAMPLES).strip().split("== ")[1:]:
        title, _, marked = block.partition("\n")
        check, path = title.split()
        lines = [line.partition("  #! ") for line in marked.rstrip().splitlines()]
        source = Source(PACKAGE + path, "\n".join(line[0] for line in lines))
        if check == "+":
            found[-1][1].append(source)
            continue
        expected = [f"{number} {line[2]}" for number, line in enumerate(lines, 1) if line[2]]
        found.append((check, [source], expected))
    many = [Source(f"{PACKAGE}wide/{number}.py", "") for number in range(13)]
    found.append(("folders_are_small", many, ["1 13 files, at most 12"]))
    for check, sources, expected in found:
        yield pytest.param(globals()[check], sources, expected, id=f"{check} {sources[0].inside}")


@pytest.mark.parametrize(("check", "sources", "expected"), list(samples()))
def test_a_check_finds_what_is_wrong_and_nothing_else(check, sources, expected):
    found = sorted(offence.partition(":")[2] for offence in offences_in(check, sources))
    assert found == sorted(expected)


def test_a_file_and_a_function_have_their_lines():
    def found(text):
        return list(budgets_are_kept(Source("a.py", text)))

    assert found("x = 1\n" * 500) == []
    assert found("x = 1\n" * 501) == ["a.py:1 501 lines, at most 500"]
    title, docstring, line = "def f():\n", '    """\n\n\n    """\n', "    x = 1\n"
    assert found(title + docstring + line * 59) == []
    assert found(title + docstring + line * 60) == ["a.py:1 f has 61 lines, at most 60"]


def test_every_check_has_a_sample_that_it_finds_and_one_that_it_passes():
    shown = {(each.values[0], bool(each.values[2])) for each in samples()}
    checks = CHECKS | CHECKS_OF_ALL
    assert shown == {(check, found) for check in checks for found in (True, False)}
