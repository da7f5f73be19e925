# SPDX-License-Identifier: Apache-2.0
"""Faults drawn at random: one wait, event, release or condition left out at a time."""

import ast
import inspect
import random
import re
import sys
import textwrap
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import fullshard
from device.mutants import Mutant, function_named

FOLDERS = ("core", "torch/unit", "torch/step", "torch/comm", "torch/tensor", "torch/optim")
NOT_RUN = ("torch/comm/watch", "torch/comm/texts")  # what speaks to stores, and texts
LEFT_OUT = re.compile(
    "wait|record|synchronize|join|release|free|drop|behind|mark|forget|clear|pop|note|hold|resize"
)


def candidates():
    """List the faults that can be planted, in the order of the source."""
    root = Path(fullshard.__file__).parent
    found = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).with_suffix("").as_posix()
            if not name.startswith(NOT_RUN):
                found += _in_file(path, name.removeprefix("torch/").replace("/", "."))
    return found


def draw(seed, count):
    """Draw so many faults, of different functions."""
    chosen = {}
    for mutant in random.Random(seed).sample(known := candidates(), len(known)):
        chosen.setdefault(mutant.edits[0][0], mutant)
    return list(chosen.values())[:count]


@contextmanager
def lines_run():
    """Yield, by file of fullshard, the lines that run within."""
    ran, root = defaultdict(set), f"{Path(fullshard.__file__).parent}/"

    def enter(frame, event, _):
        name = frame.f_code.co_filename
        if not name.startswith(root):
            return None
        lines = ran[name]

        def step(frame, event, _):
            lines.add(frame.f_lineno)
            return step

        return step(frame, event, _)

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield ran
    finally:
        sys.settrace(before)


def _in_file(path, module):
    tree = ast.parse(path.read_text())
    for outer in tree.body:
        inner = outer.body if isinstance(outer, ast.ClassDef) else [outer]
        for node in inner:
            if isinstance(node, ast.FunctionDef):
                names = [outer.name] * (outer is not node) + [node.name]
                yield from _in_function(f"{module}:{'.'.join(names)}")


def _in_function(where):
    function = function_named(where)
    if not inspect.isfunction(function):  # a property, which has its own
        return
    source = textwrap.dedent(inspect.getsource(function))
    source = source[source.index("def ") :]
    for node in ast.walk(ast.parse(source).body[0]):
        for part, after in _edits_of(node):
            before = ast.get_source_segment(source, part)
            if isinstance(node, ast.If | ast.IfExp):
                before, after = f"if {before}", f"if {after}"
            if source.count(before) == 1:
                yield Mutant(((where, before, after),), ())


def _edits_of(node):
    """Yield parts of ``node`` and what takes their place."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if LEFT_OUT.search(name):
            yield node, "pass"
    elif isinstance(node, ast.With) and isinstance(node.items[0].context_expr, ast.Call):
        yield node.items[0].context_expr, "__import__('contextlib').nullcontext()"
    elif isinstance(node, ast.If | ast.IfExp):
        yield node.test, "True"
        yield node.test, "False"
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield value, str(isinstance(node.op, ast.And))
