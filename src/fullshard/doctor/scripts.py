# SPDX-License-Identifier: Apache-2.0
"""Find what is certainly wrong in a training script, without running it.

A finding needs its proof in the script: a name that the installed torch lacks, calls in an order
that fails, or a call that all ranks must make below a test of the rank. Names count as what the
script itself binds them to; the rest is better found by running the script.
"""

import ast
import importlib.util
import re
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch.distributed.fsdp

from fullshard.core.errors import ConfigurationError
from fullshard.doctor.findings import Finding, Severity

_FSDP = "torch.distributed.fsdp"
_WRAPPER = "FullyShardedDataParallel"
_OURS = "PyTorch raises here; under 'fullshard run' or fullshard.torch it works."
_RANK = (
    r"(?:(?:\w+\.)*(?:get_(?:local_|global_)?rank\(\)|(?:local_|global_)?rank)"
    r"|(?:int\()?\w+\.(?:environ\[|environ\.get\(|getenv\()'(?:LOCAL_)?RANK'.*?)"
)
_OF_RANK = re.compile(rf"not {_RANK}|(?:not )?{_RANK} [!=]= '?0'?")
_OF_MODEL = {"state_dict", "save_pretrained", "clip_grad_norm_", "generate"}
_OF_STATE = re.compile(
    r"(full_|sharded_)?optim_state_dict|[gs]et_(model_|optimizer_)?state_dict|summon_full_params"
    r"|save_full_weights"
)
_OF_GROUP = re.compile(
    r"barrier|all_reduce|broadcast(_object_list)?|all_gather(_into_tensor|_object)?|all_to_all"
    r"|reduce_scatter_tensor|new_group|init_device_mesh"
)
_Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def check_scripts(paths: Sequence[str]) -> list[Finding]:
    """List all findings by line. Raises `ConfigurationError` for a path that cannot be read."""
    findings: list[Finding] = []
    for path in paths:
        try:
            with open(path, "rb") as file:
                findings += check_script(file.read(), path)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"cannot read the script {path!r}: {error}") from error
    return findings


def check_script(text: str | bytes, path: str = "script.py") -> list[Finding]:
    """List the findings of one script's ``text``; ``path`` is the name to show."""
    checks = (_missing_names, _too_early, _on_some_ranks)
    try:
        script = _ParsedScript(ast.parse(text), path)
        findings = [finding for check in checks for finding in check(script)]
    except (SyntaxError, ValueError, RecursionError) as error:
        what = f"this Python cannot read the script: {error}"
        where = f"{path}:{getattr(error, 'lineno', None) or 1}"
        return [Finding("severe", what, "It does not start.", "Fix the line.", where)]
    return sorted(findings, key=lambda finding: int(finding.where.rpartition(":")[2]))


class _ParsedScript:
    """One parsed script: its calls, imports and assignments, and what it shards."""

    def __init__(self, tree: ast.Module, path: str):
        self.path, self.nodes = path, list(ast.walk(tree))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.calls.sort(key=_position)
        self.imports: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for name in node.names:
                    self.imports[name.asname or name.name] = f"{node.module}.{name.name}"
            elif isinstance(node, ast.Import):
                self.imports |= {name.asname: name.name for name in node.names if name.asname}
        self.assigned = [
            (ast.unparse(target), node.value, node)
            for node in self.nodes
            if isinstance(node, ast.Assign)
            for target in node.targets
        ]
        self.sharded: list[tuple[str, ast.Call]] = []
        for call in self.calls:
            kind = re.fullmatch(rf"(?:{_FSDP}|fullshard)\..*\b(\w+)", self.name(call.func))
            if call.args and kind and kind[1] in (_WRAPPER, "fully_shard"):
                names = [target for target, value, _ in self.assigned if value is call]
                names += [ast.unparse(call.args[0])] if kind[1] == "fully_shard" else []
                self.sharded += [(name, call) for name in names]

    def finding(self, node: Any, severity: Severity, what: str, means: str, fix: str) -> Finding:
        return Finding(severity, what, means, fix, f"{self.path}:{node.lineno}")

    def name(self, node: ast.AST) -> str:
        """Return the dotted name of ``node`` with imports resolved; "" for other expressions."""
        parts = re.fullmatch(r"(\w+)((\.\w+)*)", ast.unparse(node))
        return self.imports.get(parts[1], parts[1]) + parts[2] if parts else ""

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Iterate over the nodes around ``node``, from the inside out."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def scope(self, node: ast.AST) -> ast.AST:
        """Return the function in which ``node`` stands, else the module."""
        return next(around for around in self.above(node) if isinstance(around, _Scope))

    def follows(self, first: ast.expr, second: ast.expr, name: str = "") -> bool:
        """Return whether ``second`` runs after ``first``, with ``name`` not bound in between."""
        before, after = list(self.above(first)), [second, *self.above(second)]
        for below, node in pairwise(after):
            if isinstance(node, ast.If) and node in before and below in node.orelse:
                return not {*node.body} & {*before}
        bound = (at for target, value, at in self.assigned if target == name and value != second)
        return (
            self.scope(first) is self.scope(second)
            and _position(first) < _position(second)
            and not any(_position(first) < _position(at) < _position(second) for at in bound)
        )

    def is_sharded(self, name: str, call: ast.Call) -> bool:
        """Return whether the script surely shards ``name`` before ``call``."""
        return any(
            self.follows(at, call, name)
            or (name.startswith("self.") and self.scope(at) is not self.scope(call))
            for known, at in self.sharded
            if known == name and at is not call
        )

    def rank_test(self, node: ast.AST) -> ast.expr | None:
        """Return the innermost test of a rank that decides whether ``node`` runs."""
        for below, around in pairwise([node, *self.above(node)]):
            block = getattr(around, "body", []) if isinstance(below, ast.stmt) else []
            tests = [
                before.test
                for before in (block[: block.index(below)] if below in block else [])
                if isinstance(before, ast.If) and isinstance(before.body[-1], ast.Return)
            ]
            if isinstance(around, ast.If | ast.IfExp) and below is not around.test:
                tests.append(around.test)
            test = next(filter(self._is_of_rank, tests), None)
            if test or isinstance(around, _Scope):
                return test
        return None

    def _is_of_rank(self, test: ast.expr) -> bool:
        """Return whether ``test`` tells rank 0 from the others, perhaps among other conditions."""
        if isinstance(test, ast.BoolOp):
            return isinstance(test.op, ast.And) and any(map(self._is_of_rank, test.values))
        texts = [ast.unparse(value) for at, value, _ in self.assigned if at == ast.unparse(test)]
        return all(map(_OF_RANK.fullmatch, texts or [ast.unparse(test)]))


def _missing_names(script: _ParsedScript) -> Iterator[Finding]:
    """Find names that the installed torch lacks."""
    for node in script.nodes:
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("torch."):
            for alias in node.names:
                if alias.name != "*" and not _exists(str(node.module), alias.name):
                    what = f"the installed torch has no {node.module}.{alias.name}"
                    fix = "Import it from where this version of torch has it."
                    yield script.finding(node, "severe", what, "The script ends here.", fix)
        elif isinstance(node, ast.Attribute):
            name = script.name(node)
            known = dir(torch.distributed.fsdp.FullyShardedDataParallel)
            if name.rpartition(".")[0] == f"{_FSDP}.{_WRAPPER}" and node.attr not in known:
                what = f"{ast.unparse(node)} is not in PyTorch"
                yield script.finding(node, "note", what, _OURS, f"Import it from {_FSDP}.")


def _exists(module: str, name: str) -> bool:
    with warnings.catch_warnings(action="ignore"):  # of modules that torch will remove
        try:
            home = importlib.import_module(module)
        except ImportError as error:  # of another package, it says nothing about torch
            return not (error.name and module.startswith(error.name))
    is_module = hasattr(home, "__path__") and importlib.util.find_spec(f"{module}.{name}")
    return hasattr(home, name) or bool(is_module)


def _too_early(script: _ParsedScript) -> Iterator[Finding]:
    """Find optimizers that are made of a model before it is sharded."""
    for call in script.calls:
        if not re.fullmatch(r"torch\.optim\.[A-Z]\w*", script.name(call.func)):
            continue
        owners = re.findall(r"([\w.]+)\.(?:named_)?parameters\(\)", ast.unparse(call))
        for _, sharding in script.sharded:
            model = ast.unparse(sharding.args[0])
            follows = {"use_orig_params", None} & {keyword.arg for keyword in sharding.keywords}
            if model in owners and not follows and script.follows(call, sharding, model):
                what = f"the optimizer is made before {model} is sharded (line {sharding.lineno})"
                means = "It keeps the unsharded parameters, which the model no longer uses."
                fix = "Make it after the last sharding; FSDP(model, use_orig_params=True) follows."
                yield script.finding(call, "severe", what, means, fix)
                break


def _on_some_ranks(script: _ParsedScript) -> Iterator[Finding]:
    """Find calls that all ranks must make and that a test of the rank keeps from some."""
    tests = {call: script.rank_test(call) for call in script.calls}
    for call, test in tests.items():
        if test is None or not _is_collective(script, call):
            continue
        if any(
            _last(call) == _last(other) and script.scope(call) is script.scope(other)
            for other in script.calls
            if other is not call and tests[other] is not None
        ):
            continue  # one rank here and the others there
        here = ast.unparse(call.func)
        what = f"{here}() runs on some ranks only (line {test.lineno}: {ast.unparse(test)})"
        means = "All ranks must call it: these wait for the others, or get their own part alone."
        fix = "Call it on every rank, outside the condition, and print or write inside."
        yield script.finding(call, "severe", what, means, fix)


def _is_collective(script: _ParsedScript, call: ast.Call) -> bool:
    name = script.name(call.func)
    last = (name or _last(call)).rpartition(".")[2]
    arguments = {keyword.arg for keyword in call.keywords}
    if name.startswith("torch.distributed.checkpoint.") and last in ("save", "load", "async_save"):
        return "no_dist" not in arguments
    if name.startswith("torch.distributed.") and _OF_GROUP.fullmatch(last):
        return "group" not in arguments and len(call.args) < (1 if last == "barrier" else 3)
    if name.startswith(("torch.distributed.", "fullshard.")) and _OF_STATE.fullmatch(last):
        return True
    if last == "save_pretrained" and "state_dict" in arguments:
        return False  # it writes what the ranks have gathered
    model = ast.unparse(call.func).removesuffix(f".{last}" if last in _OF_MODEL else "")
    return script.is_sharded(model, call)


def _last(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _position(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.lineno, node.col_offset
