# SPDX-License-Identifier: Apache-2.0
"""Which calls of a script run on some ranks only.

A condition has a sign: +1 if it holds on one rank alone (``rank == 0``), -1 if on all others
(``rank != 0``), 0 if it says nothing about ranks.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fullshard.doctor.scripts.script import Function, Script, last_part

__all__ = ["Condition", "rank_conditions"]

_RANKS = {
    *("rank", "local_rank", "global_rank", "world_rank", "node_rank", "dist_rank", "ddp_rank"),
    *("ddp_local_rank", "dp_rank", "my_rank", "process_index", "local_process_index", "gpu_id"),
}
_GET_RANK = {"get_rank", "get_global_rank", "get_local_rank", "get_node_local_rank"}
_VARIABLES = {"RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK"}
_IS_FIRST = re.compile(
    r"(is_)?(local_|global_|world_)?((main|master|first)_(process|rank|node)|rank_?(0|zero))"
    r"|is_(main|master|first|chief)"
)
_ONLY_FIRST = re.compile(r"(rank_?zero|main_process|rank_?0|master)_only|on_(local_)?main_process")
_ALONE = re.compile(r"is_initialized|is_available|world_size|distributed|ddp")


@dataclass(frozen=True)
class Condition:
    """Why a call runs on some ranks only: the test's text and line, and its sign there."""

    text: str
    line: int
    sign: int


def rank_conditions(script: Script) -> dict[ast.Call, Condition]:
    """The calls of ``script`` that some ranks alone reach, each with the reason."""
    reader = _Reader(script)
    reader.block(script.tree.body, None)
    return reader.found


class _Reader:
    def __init__(self, script: Script):
        self._script = script
        self.found: dict[ast.Call, Condition] = {}
        self._signs: dict[str, int] = {}  # of variables that hold such a condition
        for target, value, _ in script.assignments:
            sign = self._sign(value)
            if sign and not self._is_rank(value):
                self._signs[target] = sign

    def block(self, statements: Sequence[ast.stmt], outer: Condition | None) -> None:
        """Go through statements that run one after the other, if ``outer`` holds."""
        current = outer
        for statement in statements:
            if isinstance(statement, Function):
                self.block(statement.body, self._decorated(statement))
            elif isinstance(statement, ast.If):
                self._expressions(statement.test, current)
                sign = self._sign(statement.test)
                self.block(statement.body, self._under(statement.test, sign, current))
                self.block(statement.orelse, self._unless(statement.test, sign, current))
                if sign and not statement.orelse and self._leaves(statement.body[-1]):
                    current = self._unless(statement.test, sign, current)
            else:
                self._inside(statement, current)

    def _inside(self, node: ast.AST, current: Condition | None) -> None:
        """A statement's expressions, and the blocks in it."""
        for _, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            if children and all(isinstance(child, ast.stmt) for child in children):
                self.block(children, current)
                continue
            for child in children:
                if isinstance(child, ast.expr):
                    self._expressions(child, current)
                elif isinstance(child, ast.AST):  # a with's item, an except's handler, a case
                    self._inside(child, current)

    def _expressions(self, node: ast.expr, current: Condition | None) -> None:
        if isinstance(node, ast.IfExp):
            sign = self._sign(node.test)
            self._expressions(node.test, current)
            self._expressions(node.body, self._under(node.test, sign, current))
            self._expressions(node.orelse, self._unless(node.test, sign, current))
            return
        if isinstance(node, ast.Lambda):
            return  # called somewhere else
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            for value in node.values:
                self._expressions(value, current)
                current = self._under(value, self._sign(value), current)
            return
        if isinstance(node, ast.Call) and current is not None:
            self.found[node] = current
        for child in _expressions_in(node):
            self._expressions(child, current)

    @staticmethod
    def _under(test: ast.expr, sign: int, outer: Condition | None) -> Condition | None:
        return Condition(ast.unparse(test), test.lineno, sign) if sign else outer

    @classmethod
    def _unless(cls, test: ast.expr, sign: int, outer: Condition | None) -> Condition | None:
        """Where ``test``, which has this sign, does not hold."""
        negated = ast.copy_location(ast.UnaryOp(ast.Not(), test), test)
        return cls._under(negated, -sign, outer)

    def _decorated(self, function: Function) -> Condition | None:
        for decorator in function.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            name = last_part(self._script.name_of(called))
            if _ONLY_FIRST.fullmatch(name):
                return Condition(f"@{ast.unparse(decorator)}", decorator.lineno, 1)
        return None

    def _leaves(self, statement: ast.stmt) -> bool:
        if isinstance(statement, ast.Return | ast.Continue | ast.Break):
            return True
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            return self._script.name_of(statement.value.func) in (
                "sys.exit",
                "exit",
                "quit",
                "os._exit",
            )
        return False

    def _sign(self, test: ast.expr) -> int:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return -self._sign(test.operand)
        if isinstance(test, ast.BoolOp):
            signs = [self._sign(value) for value in test.values]
            if isinstance(test.op, ast.And):
                return next((sign for sign in signs if sign), 0)
            others = [
                ast.unparse(value)
                for value, sign in zip(test.values, signs, strict=True)
                if not sign
            ]
            if all(_ALONE.search(text) for text in others):  # "not initialized, or rank 0"
                return next((sign for sign in signs if sign), 0)
            return 0
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._sign_of_comparison(test)
        if self._is_rank(test):
            return -1  # true for every rank but 0
        if isinstance(test, ast.Call):
            test = test.func
        text = ast.unparse(test)
        if text in self._signs:
            return self._signs[text]
        return 1 if _IS_FIRST.fullmatch(last_part(text).lower()) else 0

    def _sign_of_comparison(self, test: ast.Compare) -> int:
        left, operator, right = test.left, test.ops[0], test.comparators[0]
        if self._is_rank(right):
            left, right = right, left
        if not self._is_rank(left):
            return 0
        try:
            value = ast.literal_eval(right)
        except (ValueError, TypeError):
            return 0
        if isinstance(value, list | tuple | set):
            first = 0 in value and all(each in (0, -1) for each in value)
            signs: dict[type[ast.cmpop], int] = {ast.In: 1, ast.NotIn: -1}
            return signs.get(type(operator), 0) if first else 0
        number = int(value) if isinstance(value, int | str) and str(value).isdigit() else -1
        if number < 0:
            return 0  # -1 has long meant "not distributed"
        if isinstance(operator, ast.Eq | ast.NotEq):
            return 1 if isinstance(operator, ast.Eq) else -1
        if test.left is left and number <= 1:
            signs = {ast.Lt: 1 if number else 0, ast.Gt: 0 if number else -1}
            signs |= {ast.LtE: 0 if number else 1, ast.GtE: -1 if number else 0}
            return signs.get(type(operator), 0)
        return 0

    def _is_rank(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name | ast.Attribute):
            return last_part(ast.unparse(node)).lower() in _RANKS
        if isinstance(node, ast.Subscript):
            return "environ" in ast.unparse(node.value) and _constant(node.slice) in _VARIABLES
        if not isinstance(node, ast.Call):
            return False
        name = self._script.name_of(node.func)
        if last_part(name) in _GET_RANK:
            return True
        if name == "int":
            return bool(node.args) and self._is_rank(node.args[0])
        reads = name.endswith(("environ.get", "getenv"))
        return reads and bool(node.args) and _constant(node.args[0]) in _VARIABLES


def _constant(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _expressions_in(node: ast.AST) -> Iterator[ast.expr]:
    """The nearest expressions in ``node``, also those inside keywords and comprehensions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield child
        else:
            yield from _expressions_in(child)
