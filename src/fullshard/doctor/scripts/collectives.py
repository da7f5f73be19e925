# SPDX-License-Identifier: Apache-2.0
"""Mistakes around ``if rank == 0``: what all ranks must call, and what one rank writes alone."""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from fullshard.doctor.findings import Finding
from fullshard.doctor.scripts.rank_conditions import Condition, rank_conditions
from fullshard.doctor.scripts.script import Function, Script, last_part

__all__ = ["collectives_on_some_ranks", "parts_saved_as_whole"]

_OF_STATE = {
    *("full_optim_state_dict", "sharded_optim_state_dict", "optim_state_dict"),
    *("optim_state_dict_to_load", "scatter_full_optim_state_dict", "get_model_state_dict"),
    *("get_optimizer_state_dict", "get_state_dict", "set_model_state_dict"),
    *("set_optimizer_state_dict", "set_state_dict", "save_full_weights", "full_tensor"),
    *("summon_full_params", "unshard", "redistribute"),
}
# Of other objects too: collective if the receiver is a sharded model.
_OF_MODEL = {"state_dict", "load_state_dict", "clip_grad_norm_", "forward", "generate"}
_OF_CHECKPOINT = {"save", "load", "async_save", "save_state_dict", "load_state_dict"}
_OF_GROUP = {
    *("barrier", "monitored_barrier", "all_reduce", "broadcast", "reduce", "gather", "scatter"),
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object"),
    *("gather_object", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"),
    *("all_to_all", "all_to_all_single", "broadcast_object_list", "scatter_object_list"),
    *("all_gather_coalesced", "all_reduce_coalesced", "new_group", "init_device_mesh"),
}
# The place of `group` among the arguments, where it may be given without its name.
_GROUP_PLACE = {
    **dict.fromkeys(("barrier", "monitored_barrier"), 0),
    **dict.fromkeys(("all_reduce", "all_gather", "broadcast", "all_gather_object"), 2),
    **dict.fromkeys(("all_gather_into_tensor", "broadcast_object_list"), 2),
}
_OF_ACCELERATE = {"wait_for_everyone", "save_state", "get_state_dict", "gather_for_metrics"}
_LOADING = {"load_state_dict", "set_model_state_dict", "set_optimizer_state_dict"}


class _Place(NamedTuple):
    """A call that all ranks must make, by name, and the line where the collective itself is."""

    call: ast.Call
    what: str
    line: int


def collectives_on_some_ranks(script: Script) -> Iterator[Finding]:
    """Collectives, also inside functions of the script, that only some ranks reach."""
    conditions = rank_conditions(script)
    collective_functions = _collective_functions(script, conditions)
    places = []
    for call in script.calls:
        what = _collective(script, call)
        function = script.called_function(call)
        if what:
            places.append(_Place(call, what, call.lineno))
        elif function in collective_functions and not _is_about_another_model(
            script, call, function, *collective_functions[function]
        ):
            places.append(_Place(call, *collective_functions[function]))
    signs: dict[tuple[ast.AST, str], set[int]] = {}
    for place in places:
        if place.call in conditions:
            key = (script.scope_of(place.call), _called(place.call))
            signs.setdefault(key, set()).add(conditions[place.call].sign)
    flagged: set[ast.AST] = set()
    for place in places:
        condition = conditions.get(place.call)
        inside_another = any(each in flagged for each in script.above(place.call))
        if condition is None or inside_another:
            continue
        # One rank here and the others there: all of them call it.
        if len(signs[script.scope_of(place.call), _called(place.call)]) == 1:
            flagged.add(place.call)
            yield _finding(script, place, condition)


def _finding(script: Script, place: _Place, condition: Condition) -> Finding:
    here = ast.unparse(place.call.func)
    is_inside = place.line != place.call.lineno
    through = f", which calls {place.what} (line {place.line})" if is_inside else ""
    who = "one rank only" if condition.sign > 0 else "all ranks but one"
    name = last_part(place.what)
    if is_inside:
        mend = (
            f"Call {here}() on every rank; inside it, put the condition around the writing alone."
        )
    elif name in _LOADING:
        mend = "Load on every rank, outside the condition."
    elif "state" in name or name in ("full_tensor", "save_full_weights", "save"):
        mend = (
            "Call it on every rank, outside the condition, and keep only the writing inside: "
            f"state = {here}(...); if {condition.text}: torch.save(state, path)"
        )
    else:
        mend = "Call it on every rank, outside the condition; print or write inside."
    return Finding(
        "severe",
        f"{here}() runs on {who} (line {condition.line}: {condition.text}){through}",
        "All ranks must call it: this one waits for the others until the group's timeout, or gets "
        "its own part alone.",
        mend,
        script.at(place.call),
    )


def _is_about_another_model(
    script: Script, call: ast.Call, function: Function | None, what: str, line: int
) -> bool:
    """Whether ``what`` is done to a parameter of ``function`` that is no sharded model here."""
    if function is None or not function.lineno <= line <= (function.end_lineno or line):
        return False
    names = [each.arg for each in function.args.args]
    if isinstance(call.func, ast.Attribute):  # on self
        names = names[1:]
    given = dict(zip(names, call.args, strict=False))
    given |= {each.arg: each.value for each in call.keywords if each.arg is not None}
    model = given.get(what.partition(".")[0])
    return model is not None and not script.is_sharded(model)


def _called(call: ast.Call) -> str:
    return last_part(ast.unparse(call.func))


def _collective_functions(
    script: Script, conditions: dict[ast.Call, Condition]
) -> dict[Function | None, tuple[str, int]]:
    """The script's functions that call a collective whenever they run, and which, in what line."""
    found: dict[Function | None, tuple[str, int]] = {}
    for _ in range(len(script.functions) + 1):
        before = len(found)
        for call in script.calls:
            scope = script.scope_of(call)
            if not isinstance(scope, Function) or scope in found or call in conditions:
                continue
            what = _collective(script, call)
            called = script.called_function(call)
            if what:
                found[scope] = (what, call.lineno)
            elif called in found and called is not scope:
                found[scope] = found[called]
        if len(found) == before:
            break
    return found


def _collective(script: Script, call: ast.Call) -> str:
    """The name of what ``call`` does if all ranks must do it together, else ""."""
    name = script.name_of(call.func)
    last = last_part(name) or (call.func.attr if isinstance(call.func, ast.Attribute) else "")
    keywords = {keyword.arg for keyword in call.keywords}
    if name.startswith("torch.distributed.checkpoint.") and last in _OF_CHECKPOINT:
        return "" if "no_dist" in keywords else name
    if name.startswith("torch.distributed.") and last in _OF_GROUP:
        place = _GROUP_PLACE.get(last)
        among_some = "group" in keywords or (place is not None and len(call.args) > place)
        return "" if among_some else name.replace("torch.distributed", "dist")
    if not script.knows_sharding:
        return ""
    if last in _OF_STATE:
        return last
    if last in _OF_ACCELERATE and "accelerator" in name:
        return name
    if isinstance(call.func, ast.Attribute) and last in _OF_MODEL:
        model = call.func.value
        if last == "load_state_dict":  # on one rank, before sharding, it is right
            is_collective = script.is_sharded_above(model)
        else:
            seen = last == "state_dict" and _sees_full_parameters(script, call)
            is_collective = script.is_sharded(model) and not seen
        if is_collective:
            return ast.unparse(call.func)
    if isinstance(call.func, ast.Name | ast.Attribute) and _is_forward(script, call):
        return ast.unparse(call.func)
    return ""


def _is_forward(script: Script, call: ast.Call) -> bool:
    is_model = script.called_function(call) is None and script.is_sharded(call.func)
    return is_model and not any(wrap.call is call for wrap in script.wraps)


def _sees_full_parameters(script: Script, call: ast.Call) -> bool:
    return any(
        isinstance(node, ast.With)
        and any("summon_full_params" in ast.unparse(item.context_expr) for item in node.items)
        for node in script.above(call)
    )


def parts_saved_as_whole(script: Script) -> Iterator[Finding]:
    """A rank's part of the state, written by one rank, or by all to one file, as if it were all."""
    if not script.knows_sharding:
        return
    conditions = rank_conditions(script)
    for call in script.calls:
        if call not in conditions:
            part = _own_part(script, call)
            if part is not None:
                yield _part(script, call, *part, "by every rank to one file")
            continue
        if _is_optimizer_state(script, call) and not _is_argument_of_collective(script, call):
            yield _part(script, call, ast.unparse(call), "optimizer")
        if script.name_of(call.func) != "torch.save" or not call.args:
            continue
        for node in ast.walk(call.args[0]):
            if isinstance(node, ast.Name):
                kind = _kind_of_state(script, node.id)
                if kind:
                    yield _part(script, call, node.id, kind)


def _own_part(script: Script, call: ast.Call) -> tuple[str, str] | None:
    """The text and kind of a part that ``call`` writes to a file of one name everywhere."""
    if script.name_of(call.func) != "torch.save" or len(call.args) < 2:
        return None
    path = [call.args[1]]
    for node in ast.walk(call.args[1]):
        if isinstance(node, ast.Name) and node.id not in script.aliases:
            values = [value for target, value, _ in script.assignments if target == node.id]
            if not values and not re.search("epoch|step", node.id):
                return None  # from outside: it may differ
            path += values
    if any(re.search("rank|process|shard", ast.unparse(each)) for each in path):
        return None
    for node in ast.walk(call.args[0]):
        if _is_optimizer_state(script, node):
            return ast.unparse(node), "optimizer"
        if isinstance(node, ast.Name) and _kind_of_state(script, node.id):
            return node.id, _kind_of_state(script, node.id)
        if _is_part_of_model(script, node):
            return ast.unparse(node), "model"
    return None


def _is_argument_of_collective(script: Script, call: ast.Call) -> bool:
    return any(
        isinstance(each, ast.Call) and _collective(script, each) for each in script.above(call)
    )


def _is_optimizer_state(script: Script, node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    text = ast.unparse(node.func.value)
    return node.func.attr == "state_dict" and (
        text in script.optimizer_names or last_part(text) in ("optimizer", "optim", "opt")
    )


def _has_optimizer_state(script: Script, node: ast.expr) -> bool:
    """An optimizer's state, or a literal dict in which one is."""
    parts = node.values if isinstance(node, ast.Dict) else [node]
    return any(_is_optimizer_state(script, part) for part in parts)


def _kind_of_state(script: Script, name: str) -> str:
    """What part ``name`` holds if it always does: "optimizer", "model", else ""."""
    values = [value for target, value, _ in script.assignments if target == name]
    if values and all(_has_optimizer_state(script, value) for value in values):
        return "optimizer"
    if values and all(_is_part_of_model(script, value) for value in values):
        return "model"
    return ""


def _is_part_of_model(script: Script, node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "state_dict"
        and script.is_sharded(node.func.value, "fully_shard")
    )


def _part(
    script: Script, call: ast.Call, text: str, kind: str, how: str = "on one rank"
) -> Finding:
    if kind == "optimizer":
        what, function = "the optimizer's state", "get_optimizer_state_dict(model, optimizer, "
        fsdp1 = " (or FSDP.optim_state_dict(model, optimizer))"
    else:
        what, function, fsdp1 = "the model's", "get_model_state_dict(model, ", ""
    return Finding(
        "severe",
        f"{text} is written {how}",
        f"It holds this rank's part of {what}; the others' are lost, and the file cannot be "
        "resumed from.",
        f"On every rank: state = {function}options=StateDictOptions(full_state_dict=True, "
        f"cpu_offload=True)){fsdp1}; or write all parts with torch.distributed.checkpoint.save.",
        script.at(call),
    )
