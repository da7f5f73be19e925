# SPDX-License-Identifier: Apache-2.0
"""Mistakes around ``if rank == 0``: what all ranks must call, and what one rank writes alone."""

import ast
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fullshard.doctor.findings import Finding
from fullshard.doctor.scripts.rank_conditions import Condition, RankConditions
from fullshard.doctor.scripts.script import Function, Script, argument, last_part, receiver

__all__ = ["CHECKS"]

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
_SHARED = re.compile(r"any_rank|stop_together|reduce|gather|broadcast")
_SAVING = re.compile(r"^(?!load|set).*state|full_tensor|save")


class _Place(NamedTuple):
    """A call that all ranks must make, by name, and the line where the collective itself is."""

    call: ast.Call
    what: str
    line: int


def _collectives_on_some_ranks(script: Script) -> Iterator[Finding]:
    """Find collectives, also inside functions of the script, that only some ranks reach."""
    ranks = RankConditions(script)
    places = list(_places(script, ranks))
    conditions = {place.call: ranks.of(place.call) for place in places}
    signs: dict[tuple[ast.AST, str], set[int]] = {}
    for call, condition in conditions.items():
        if condition is not None:
            signs.setdefault((script.scope_of(call), _called(call)), set()).add(condition.sign)
    flagged: set[ast.AST] = set()
    for place in places:
        condition = conditions[place.call]
        if condition is None or any(each in flagged for each in script.above(place.call)):
            continue
        # One rank here and the others there: all of them call it.
        if len(signs[script.scope_of(place.call), _called(place.call)]) == 1:
            flagged.add(place.call)
            yield _on_some(script, place, condition)
    yield from _loops_left(script, ranks, places)


def _on_some(script: Script, place: _Place, condition: Condition) -> Finding:
    here = ast.unparse(place.call.func)
    through, fix = "", "Call it on every rank, outside the condition; print or write inside."
    if place.line != place.call.lineno:
        through = f", which calls {place.what} (line {place.line})"
        fix = f"Call {here}() on every rank; inside it, put the condition around the writing alone."
    elif _SAVING.search(last_part(place.what)):
        fix = (
            "Call it on every rank, outside the condition, and keep only the writing inside: "
            f"state = {here}(...); if rank == 0: torch.save(state, path)"
        )
    return script.finding(
        place.call,
        "severe",
        f"{here}() runs on {condition}{through}",
        "All ranks must call it: this one waits for the others until the group's timeout, or gets "
        "its own part alone.",
        fix,
    )


def _loops_left(
    script: Script, ranks: RankConditions, places: Sequence[_Place]
) -> Iterator[Finding]:
    """Find each ``break`` by which some ranks leave the collectives of a loop to the others."""
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.Break):
            continue
        around = list(script.above(node))
        loop = next(each for each in around if isinstance(each, ast.For | ast.While))
        place = next((each for each in places if loop in script.above(each.call)), None)
        condition = ranks.of(node)
        tests = [each.test for each in around[: around.index(loop)] if isinstance(each, ast.If)]
        own = next((test for test in tests if _is_of_this_rank(script, test, loop)), None)
        if condition is not None and condition.line >= loop.lineno:
            why = f"on {condition}"
        elif own is not None:
            why = f"where {ast.unparse(own)}, which each rank finds for itself"
        else:
            continue
        if place is not None:
            yield script.finding(
                node,
                "severe",
                f"this break ends the loop {why}",
                f"The others go on to {place.what} (line {place.call.lineno}) and wait there until "
                "the group's timeout.",
                "Let all ranks decide alike: if any_rank(flag): break, with any_rank of "
                "fullshard.torch, or dist.all_reduce the flag before the test.",
            )


def _is_of_this_rank(script: Script, test: ast.expr, loop: ast.AST) -> bool:
    """Return whether ``test`` looks at a loss of the loop that ranks have not shared."""
    looked_at = {each.id for each in ast.walk(test) if isinstance(each, ast.Name)}
    mine = {name for name in looked_at if "loss" in name} & {
        target for target, _, statement in script.assignments if loop in script.above(statement)
    }
    texts = [ast.unparse(call) for call in script.calls]
    texts += [f"{name} = {ast.unparse(v)}" for name in mine for v in script.values_of(name)]
    shared = " ".join(text for text in texts if _SHARED.search(text))
    return any(not re.search(rf"\b{name}\b", shared) for name in mine)


def _places(script: Script, ranks: RankConditions) -> Iterator[_Place]:
    """All calls that all ranks must make, in the order of the text."""
    functions = _collective_functions(script, ranks)
    for call in script.calls:
        what = _collective(script, call)
        function = script.called_function(call)
        if what:
            yield _Place(call, what, call.lineno)
        elif function in functions and not _is_about_another_model(
            script, call, function, *functions[function]
        ):
            yield _Place(call, *functions[function])


def _is_about_another_model(
    script: Script, call: ast.Call, function: Function | None, what: str, line: int
) -> bool:
    """Return whether ``what`` acts on a parameter of ``function`` that is not sharded here."""
    if function is None or not function.lineno <= line <= (function.end_lineno or line):
        return False
    names = [each.arg for each in function.args.args]
    if isinstance(call.func, ast.Attribute):  # on self
        names = names[1:]
    model = what.partition(".")[0]
    given = argument(call, model, names.index(model) if model in names else None)
    return given is not None and not script.is_sharded(given)


def _called(call: ast.Call) -> str:
    return last_part(ast.unparse(call.func))


def _collective_functions(
    script: Script, ranks: RankConditions
) -> dict[Function | None, tuple[str, int]]:
    """The script's functions that call a collective whenever they run, and which, in what line."""
    found: dict[Function | None, tuple[str, int]] = {}
    for _ in range(len(script.functions) + 1):
        before = len(found)
        for call in script.calls:
            scope = script.scope_of(call)
            if not isinstance(scope, Function) or scope in found:
                continue
            what, called = _collective(script, call), script.called_function(call)
            inside = (what, call.lineno) if what else found.get(called)
            if inside is not None and called is not scope and ranks.of(call) is None:
                found[scope] = inside
        if len(found) == before:
            break
    return found


def _collective(script: Script, call: ast.Call) -> str:
    """The name of the collective that ``call`` is; "" if it is none."""
    name, text = script.name_of(call.func), ast.unparse(call.func)
    last = last_part(text) if receiver(call) is not None else last_part(name)
    keywords = {keyword.arg for keyword in call.keywords}
    if name.startswith("torch.distributed.checkpoint.") and last in _OF_CHECKPOINT:
        return "" if "no_dist" in keywords else name
    if name.startswith("torch.distributed.") and last in _OF_GROUP:
        among_some = argument(call, "group", _GROUP_PLACE.get(last)) is not None
        return "" if among_some else name.replace("torch.distributed", "dist")
    if not script.knows_sharding:
        return ""
    if last in _OF_STATE:
        return last
    if last in _OF_ACCELERATE and "accelerator" in name:
        return name
    model = receiver(call, *_OF_MODEL)
    if model is not None and last == "load_state_dict":  # right on one rank, before sharding
        is_collective = script.is_sharded_above(model)
    elif model is not None:
        seen = last == "state_dict" and _sees_full_parameters(script, call)
        is_collective = script.is_sharded(model) and not seen
    else:  # a forward
        wraps = any(wrap.call is call for wrap in script.wraps)
        plain = isinstance(call.func, ast.Name | ast.Attribute) and not wraps
        own = plain and script.called_function(call) is not None
        is_collective = plain and not own and script.is_sharded(call.func)
    return text if is_collective else ""


def _sees_full_parameters(script: Script, call: ast.Call) -> bool:
    return any(
        isinstance(node, ast.With)
        and any("summon_full_params" in ast.unparse(item.context_expr) for item in node.items)
        for node in script.above(call)
    )


def _parts_saved_as_whole(script: Script) -> Iterator[Finding]:
    """Find state of one rank that one rank, or all to one file, write as if it were whole."""
    ranks = RankConditions(script)
    for call in script.calls if script.knows_sharding else ():
        alone = ranks.of(call) is not None
        if alone and _kind_of(script, call) == "optimizer" and not _is_shared(script, call):
            yield _part(script, call, call, "on one rank")
        if script.name_of(call.func) != "torch.save" or not call.args:
            continue
        if not alone and not _is_one_file(script, call):
            continue
        for node in ast.walk(call.args[0]):
            # On one rank, calls have been told: above, or as collectives on some ranks.
            if isinstance(node, ast.Name if alone else ast.expr) and _kind_of(script, node):
                yield _part(
                    script, call, node, "on one rank" if alone else "by every rank to one file"
                )
                break


def _is_one_file(script: Script, save: ast.Call) -> bool:
    """Return whether ``torch.save`` seems to get the same path on all ranks."""
    if len(save.args) < 2:
        return False
    path = [save.args[1]]
    for node in ast.walk(save.args[1]):
        if isinstance(node, ast.Name) and node.id not in script.aliases:
            values = script.values_of(node.id)
            if not values and not re.search("epoch|step", node.id):
                return False  # from outside: it may differ
            path += values
    return not any(re.search("rank|process|shard", ast.unparse(each)) for each in path)


def _is_shared(script: Script, call: ast.Call) -> bool:
    """Return whether ``call`` is in the arguments of a collective."""
    return any(
        isinstance(each, ast.Call) and _collective(script, each) for each in script.above(call)
    )


def _kind_of(script: Script, node: ast.AST) -> str:
    """The owner of the state of which ``node`` is one rank's part: "optimizer", "model" or "".

    ``node`` may be a call of ``state_dict()``, a dict that holds an optimizer's, or a name that
    always refers to one of these.
    """
    owner = receiver(node, "state_dict")
    if owner is not None and script.is_optimizer(owner):
        return "optimizer"
    if owner is not None:
        return "model" if script.is_sharded(owner, "fully_shard") else ""
    if not isinstance(node, ast.Name):
        return ""
    kinds = set()
    for value in script.values_of(node.id):
        parts = value.values if isinstance(value, ast.Dict) else [value]
        found = {_kind_of(script, part) for part in parts if isinstance(part, ast.Call)}
        plain = found - {"model"} if isinstance(value, ast.Dict) else found
        kinds.add(max(plain, default=""))
    return kinds.pop() if len(kinds) == 1 else ""


def _part(script: Script, call: ast.Call, part: ast.AST, how: str) -> Finding:
    text = ast.unparse(part)
    if _kind_of(script, part) == "optimizer":
        what, function = "the optimizer's state", "get_optimizer_state_dict(model, optimizer, "
        fsdp1 = " (or FSDP.optim_state_dict(model, optimizer))"
    else:
        what, function, fsdp1 = "the model's", "get_model_state_dict(model, ", ""
    return script.finding(
        call,
        "severe",
        f"{text} is written {how}",
        f"It holds this rank's part of {what}; the others' are lost, and the file cannot be "
        "resumed from.",
        f"On every rank: state = {function}options=StateDictOptions(full_state_dict=True, "
        f"cpu_offload=True)){fsdp1}; or write all parts with torch.distributed.checkpoint.save.",
    )


CHECKS = (_collectives_on_some_ranks, _parts_saved_as_whole)
