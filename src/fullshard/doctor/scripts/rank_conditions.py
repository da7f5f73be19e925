# SPDX-License-Identifier: Apache-2.0
"""Find the lines of a script that run on some ranks only.

A condition has a sign: +1 if it holds on one rank alone (``rank == 0``), -1 if on all others
(``rank != 0``), 0 if it says nothing about ranks.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from fullshard.doctor.scripts.script import Function, Script, last_part

__all__ = ["Condition", "RankConditions"]

_GLOBAL = {"global_rank", "world_rank", "dist_rank", "ddp_rank", "process_index"}
_NAMES = _GLOBAL | {
    *("rank", "local_rank", "ddp_local_rank", "node_rank", "dp_rank", "my_rank", "gpu_id"),
    "local_process_index",
}
_GET_GLOBAL = {"get_rank", "get_global_rank"}
_GET = _GET_GLOBAL | {"get_local_rank", "get_node_local_rank"}
_GLOBAL_VARIABLES = {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"}
_VARIABLES = _GLOBAL_VARIABLES | {"LOCAL_RANK", "SLURM_LOCALID"}
_IS_FIRST = re.compile(
    r"(is_)?(local_|global_|world_)?((main|master|first)_(process|rank|node)|rank_?(0|zero))"
    r"|is_(main|master|first|chief)"
)
_ONLY_FIRST = re.compile(r"(rank_?zero|main_process|rank_?0|master)_only|on_(local_)?main_process")
_ALONE = re.compile(r"is_initialized|is_available|world_size|distributed|ddp")
_OPERATORS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le},
    **{ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not},
    **{ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b},
}
_SOME = range(64)  # ranks for which a comparison is tried
_EXITS = ("sys.exit", "exit", "quit", "os._exit")


@dataclass(frozen=True)
class Condition:
    """The reason why a line runs on some ranks only: the test's text, line and sign."""

    text: str
    line: int
    sign: int

    def __str__(self) -> str:
        who = "one rank only" if self.sign > 0 else "all ranks but one"
        return f"{who} (line {self.line}: {self.text})"


class RankConditions:
    """The conditions on ranks in one script."""

    def __init__(self, script: Script):
        self._script = script
        self._signs: dict[str, int] = {}  # of variables that hold such a condition
        self._sign = cache(self._work_out_sign)
        for target, value, _ in script.assignments:
            sign = self._work_out_sign(value)
            if sign and not self._is_rank(value):
                self._signs[target] = sign

    def of(self, node: ast.AST) -> Condition | None:
        """The innermost condition on ranks under which ``node`` runs, in its function."""
        below = node
        for around in self._script.above(node):
            if isinstance(around, ast.Lambda):
                return None  # called somewhere else
            for test, holds in _tests(around, below):
                sign = self._sign(test)
                if sign and holds:
                    return Condition(ast.unparse(test), test.lineno, sign)
                if sign:
                    return Condition(_negated(test), test.lineno, -sign)
            if isinstance(around, Function):
                return self._decorated(around)
            below = around
        return None

    def is_global_rank(self, node: ast.expr) -> bool:
        """Return whether ``node`` counts ranks over all hosts, whatever its own name."""
        values = self._script.values_of(ast.unparse(node))
        return self._is_rank(node, everywhere=True) or (
            bool(values) and all(self._is_rank(each, everywhere=True) for each in values)
        )

    def _decorated(self, function: Function) -> Condition | None:
        for decorator in function.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            name = last_part(self._script.name_of(called))
            if _ONLY_FIRST.fullmatch(name):
                return Condition(f"@{ast.unparse(decorator)}", decorator.lineno, 1)
        return None

    def _work_out_sign(self, test: ast.expr) -> int:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return -self._sign(test.operand)
        if isinstance(test, ast.BoolOp):
            signs = [self._sign(value) for value in test.values]
            others = [value for value, sign in zip(test.values, signs, strict=True) if not sign]
            # "not initialized, or rank 0"
            alone = all(_ALONE.search(ast.unparse(value)) for value in others)
            return next(filter(None, signs), 0) if isinstance(test.op, ast.And) or alone else 0
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._sign_of_comparison(test)
        if self._is_rank(test):
            return -1  # true for every rank but 0
        text = ast.unparse(test.func if isinstance(test, ast.Call) else test)
        return self._signs.get(text, int(bool(_IS_FIRST.fullmatch(last_part(text).lower()))))

    def _sign_of_comparison(self, test: ast.Compare) -> int:
        left, right, holds = test.left, test.comparators[0], _OPERATORS[type(test.ops[0])]
        swapped = self._is_rank(right)
        if not (swapped or self._is_rank(left)):
            return 0
        try:
            value = ast.literal_eval(left if swapped else right)
            value = int(value) if isinstance(value, str) else value
            true = sum(holds(value, rank) if swapped else holds(rank, value) for rank in _SOME)
        except (ValueError, TypeError):
            return 0
        return {1: 1, len(_SOME) - 1: -1}.get(true, 0)

    def _is_rank(self, node: ast.expr, everywhere: bool = False) -> bool:
        """Return whether ``node`` is a rank; with ``everywhere``, surely one over all hosts."""
        names, getters, variables = _NAMES, _GET, _VARIABLES
        if everywhere:
            names, getters, variables = _GLOBAL, _GET_GLOBAL, _GLOBAL_VARIABLES
        if isinstance(node, ast.Name | ast.Attribute):
            return last_part(ast.unparse(node)).lower() in names
        if isinstance(node, ast.Subscript):
            return "environ" in ast.unparse(node.value) and _constant(node.slice) in variables
        if not isinstance(node, ast.Call):
            return False
        name = self._script.name_of(node.func)
        if last_part(name) in getters or not node.args:
            return last_part(name) in getters
        if name == "int":
            return self._is_rank(node.args[0], everywhere)
        return name.endswith(("environ.get", "getenv")) and _constant(node.args[0]) in variables


def _tests(around: ast.AST, below: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """Each test that ``around`` puts to what stands in ``below``, and how it must come out.

    From the inside out; one of an ``if`` further up that leaves the block is among them.
    """
    for _, block in ast.iter_fields(around):
        if isinstance(block, list) and below in block and isinstance(below, ast.stmt):
            for before in reversed(block[: block.index(below)]):
                if isinstance(before, ast.If) and not before.orelse and _leaves(before.body[-1]):
                    yield before.test, False
    if isinstance(around, ast.If | ast.IfExp) and below is not around.test:
        body = around.body if isinstance(around.body, list) else [around.body]
        yield around.test, below in body
    if isinstance(around, ast.BoolOp) and below in around.values:
        for value in reversed(around.values[: around.values.index(below)]):
            yield value, isinstance(around.op, ast.And)


def _leaves(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return ast.unparse(statement.value.func) in _EXITS
    return isinstance(statement, ast.Return | ast.Continue | ast.Break)


def _negated(test: ast.expr) -> str:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return ast.unparse(test.operand)
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq) and len(test.ops) == 1:
        return ast.unparse(ast.Compare(test.left, [ast.NotEq()], test.comparators))
    return ast.unparse(ast.UnaryOp(ast.Not(), test))


def _constant(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None
