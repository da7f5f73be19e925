# SPDX-License-Identifier: Apache-2.0
"""A training script as a tree, and what is sharded in it. It is parsed, never run.

Names are followed as text: ``model`` means the same in all functions of a file, unless a function
makes a model of its own under that name. Other files are not looked at.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from fullshard.doctor.findings import Finding, Severity

__all__ = ["Function", "Script", "Wrap", "argument", "last_part", "receiver"]

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = Function | ast.Module

_WRAPPERS = {"FullyShardedDataParallel": "FSDP", "FSDP": "FSDP", "fully_shard": "fully_shard"}
_OPTIMIZER = re.compile(
    r"SGD|Adam|Adagrad|Adadelta|RMSprop|Rprop|LBFGS|Lion|Adafactor|Muon|Shampoo|LAMB|LARS|Optimizer$"
)
_MODEL_PARAMETER = re.compile(r"(^|_)(model|net|network|module|fsdp|student|policy)$")


@dataclass(frozen=True)
class Wrap:
    """A call that shards a model, or a call of a function of the script that does.

    ``interface`` is "FSDP" or "fully_shard". ``models`` are the texts by which the model
    is known around it: the argument, the model whose part it is, and what the result is assigned
    to. With ``follows`` (FSDP1's ``use_orig_params=True``) optimizers go on with what was sharded.
    """

    call: ast.Call
    interface: str
    models: frozenset[str]
    follows: bool


def last_part(name: str) -> str:
    """``a.b.c`` gives ``c``."""
    return name.rpartition(".")[2]


def argument(call: ast.Call, name: str, place: int | None = None) -> ast.expr | None:
    """The argument called ``name``, else the one at ``place``; None if it is not there."""
    named = next((each.value for each in call.keywords if each.arg == name), None)
    if named is None and place is not None and place < len(call.args):
        return call.args[place]
    return named


def receiver(node: ast.AST, *methods: str) -> ast.expr | None:
    """``a.b`` for the call ``a.b.method(...)`` of one of ``methods`` (of any, if none is named)."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    return node.func.value if not methods or node.func.attr in methods else None


class Script:
    """One script. Raises `SyntaxError` if it is not Python."""

    def __init__(self, text: str, path: str = "script.py"):
        self.path = path
        self.tree = ast.parse(text, path)
        self.parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }
        self.aliases = dict(_aliases(self.tree))

    def finding(
        self, node: ast.expr | ast.stmt, severity: Severity, what: str, means: str, fix: str
    ) -> Finding:
        """A finding in the line of ``node``."""
        return Finding(severity, what, means, fix, f"{self.path}:{node.lineno}")

    def name_of(self, node: ast.AST) -> str:
        """The dotted name of ``node`` with imports resolved; "" for what is not a plain name."""
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.aliases.get(node.id, node.id), *reversed(parts)])

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around ``node``, from the inside out."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def scope_of(self, node: ast.AST) -> Scope:
        """The function in which ``node`` stands, else the module."""
        return next(each for each in self.above(node) if isinstance(each, Scope))

    @cached_property
    def calls(self) -> list[ast.Call]:
        """All calls, in the order of the text."""
        found = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        return sorted(found, key=_position)

    def calls_of(self, name: str) -> list[ast.Call]:
        """The calls of what is called ``name``, wherever it comes from."""
        return [call for call in self.calls if last_part(self.name_of(call.func)) == name]

    @cached_property
    def assignments(self) -> list[tuple[str, ast.expr, ast.stmt]]:
        """Each plain assignment: the target's text, the value, the statement; in text order."""
        found: list[tuple[str, ast.expr, ast.stmt]] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign):
                found += [(ast.unparse(target), node.value, node) for target in node.targets]
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                found.append((ast.unparse(node.target), node.value, node))
        return sorted(found, key=lambda each: _position(each[2]))

    def values_of(self, text: str) -> list[ast.expr]:
        """All that is ever assigned to ``text``."""
        return [value for target, value, _ in self.assignments if target == text]

    @cached_property
    def functions(self) -> dict[str, Function]:
        """Functions and methods by name; of several with one name none, as it is not clear."""
        found: dict[str, list[Function]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                found.setdefault(node.name, []).append(node)
        return {name: each[0] for name, each in found.items() if len(each) == 1}

    def called_function(self, call: ast.Call) -> Function | None:
        """The function of this script that ``call`` calls by its plain name or on ``self``."""
        if isinstance(call.func, ast.Name):
            function = self.functions.get(call.func.id)
            is_method = function and isinstance(self.parents[function], ast.ClassDef)
            return None if is_method else function
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "self":
            return self.functions.get(call.func.attr)
        return None

    @cached_property
    def wraps(self) -> list[Wrap]:
        """Everything in the script that shards, in the order of the text."""
        direct = {}
        for call in self.calls:
            interface = _WRAPPERS.get(last_part(self.name_of(call.func)))
            if interface is not None and (call.args or call.keywords):
                model = call.args[0] if call.args else call.keywords[0].value
                kept = argument(call, "use_orig_params")
                follows = isinstance(kept, ast.Constant) and kept.value is True
                direct[call] = Wrap(call, interface, self._models(call, [model]), follows)
        found = dict(direct)
        for call in self.calls:
            function = self.called_function(call)
            if function is None or call in direct:
                continue
            inside = [each for each in direct.values() if self.scope_of(each.call) is function]
            wrapped = {name for each in inside for name in each.models}
            names = [each.arg for each in function.args.args]
            given = [
                value for name, value in zip(names, call.args, strict=False) if name in wrapped
            ]
            returned = any(
                node.value in direct or ast.unparse(node.value) in wrapped
                for node in ast.walk(function)
                if isinstance(node, ast.Return) and node.value is not None
            )
            if given or returned:
                models = self._models(call, given, with_target=returned)
                follows = all(each.follows for each in inside)
                found[call] = Wrap(call, inside[0].interface, models, follows)
        return sorted(found.values(), key=lambda wrap: _position(wrap.call))

    def _models(
        self, call: ast.Call, arguments: list[ast.expr], with_target: bool = True
    ) -> frozenset[str]:
        models = set()
        for given in arguments:
            if isinstance(given, ast.Name | ast.Attribute | ast.Subscript):
                models |= {ast.unparse(given), *self._owner(given)}
        parent = self.parents[call]
        if with_target and isinstance(parent, ast.Assign) and parent.value is call:
            models |= {ast.unparse(target) for target in parent.targets}
        return frozenset(models)

    def _owner(self, part: ast.expr) -> set[str]:
        """The model to which ``part`` belongs: ``model`` for ``model.layers[0]``.

        Also for ``block`` in ``for block in model.layers``.
        """
        if isinstance(part, ast.Name):
            for node in self.above(part):
                if isinstance(node, ast.For) and part.id in _names(node.target):
                    inner = node.iter
                    while isinstance(inner, ast.Call):  # enumerate(model.layers), model.modules()
                        inner = inner.args[0] if inner.args else inner.func
                    own = {inner.id} if isinstance(inner, ast.Name) else set()
                    return own if part.id in own else own | self._owner(inner)
            return set()
        inner = part
        while isinstance(inner, ast.Attribute | ast.Subscript):
            text, inner = ast.unparse(inner), inner.value
            if isinstance(inner, ast.Name):
                return {text} if inner.id == "self" else {inner.id}
        return set()

    @cached_property
    def knows_sharding(self) -> bool:
        """Whether the script shards a model or imports anything about sharding."""
        origins = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp", "fullshard")
        imported = any(name.startswith(origins) for name in self.aliases.values())
        return bool(self.wraps) or imported

    @cached_property
    def wraps_with_pytorch(self) -> bool:
        """Whether the script shards with PyTorch's own FSDP1."""
        own = "torch.distributed.fsdp.FullyShardedDataParallel"
        return any(self.name_of(wrap.call.func) == own for wrap in self.wraps)

    def is_sharded(self, node: ast.expr, interface: str = "") -> bool:
        """Return whether ``node`` seems to be a sharded model (by that ``interface``).

        It is if its function shards it further up, if its function has it from outside and another
        one shards it, or if it is a parameter with the name of a model.
        """
        text, scope = ast.unparse(node).removesuffix(".module"), self.scope_of(node)
        wraps = [wrap for wrap in self.wraps if text in wrap.models]
        here = [wrap for wrap in wraps if self.scope_of(wrap.call) is scope]
        if here:
            before = [wrap for wrap in here if _position(wrap.call) < _position(node)]
            return any(wrap.interface == interface or not interface for wrap in before)
        scopes = [self.scope_of(each) for target, _, each in self.assignments if target == text]
        if scope in scopes:
            return False  # this function has made it itself and not sharded it
        if wraps:
            return any(wrap.interface == interface or not interface for wrap in wraps)
        parameters = [] if isinstance(scope, ast.Module) else scope.args.args
        from_outside = any(each.arg == text for each in parameters) or not scopes
        interfaces = {wrap.interface for wrap in self.wraps}
        possible = interface in interfaces if interface else self.knows_sharding
        return possible and from_outside and _MODEL_PARAMETER.search(text) is not None

    def is_sharded_above(self, node: ast.expr) -> bool:
        """Return whether ``node`` is a model that its own function has sharded before."""
        scope = self.scope_of(node)
        here = any(self.scope_of(wrap.call) is scope for wrap in self.wraps)
        return here and self.is_sharded(node)

    def is_optimizer_call(self, call: ast.Call) -> bool:
        """Return whether ``call`` makes an optimizer of a model's parameters."""
        name = self.name_of(call.func)
        known = name.startswith("torch.optim.") and "lr_scheduler" not in name
        return known or _OPTIMIZER.search(last_part(name)) is not None

    def is_optimizer(self, node: ast.expr) -> bool:
        """Return whether ``node`` is assigned from such a call, or named like an optimizer."""
        made = (each for each in self.values_of(ast.unparse(node)) if isinstance(each, ast.Call))
        usual = last_part(ast.unparse(node)) in ("optimizer", "optim", "opt")
        return usual or any(map(self.is_optimizer_call, made))

    def is_before(self, first: ast.expr | ast.stmt, second: ast.expr | ast.stmt) -> bool:
        """Return whether ``first`` comes before ``second`` in one function, and both can run."""
        if self.scope_of(first) is not self.scope_of(second):
            return False
        arms = dict(self._arms(first))
        apart = any(arms.get(branch, arm) != arm for branch, arm in self._arms(second))
        return _position(first) < _position(second) and not apart

    def _arms(self, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
        """Each ``if`` around ``node`` within its function, and in which arm it stands."""
        below = node
        for each in self.above(node):
            if isinstance(each, Scope):
                return
            if isinstance(each, ast.If | ast.IfExp):
                orelse = each.orelse if isinstance(each.orelse, list) else [each.orelse]
                yield each, "else" if below in orelse else "then"
            below = each


def _position(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _names(target: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def _aliases(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    yield alias.asname, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
