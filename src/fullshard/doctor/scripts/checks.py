# SPDX-License-Identifier: Apache-2.0
"""Mistakes in how a script builds, feeds and calls a sharded model."""

import ast
import re
from collections.abc import Iterator

from fullshard.doctor.findings import Finding
from fullshard.doctor.scripts.script import Script, Wrap, last_part

__all__ = [
    "data_not_shared_out",
    "foreign_names",
    "forward_bypassed",
    "moved_whole",
    "optimizer_before_sharding",
    "sampler_without_epoch",
    "unsafe_load",
]

_BY_RANK = re.compile(r"rank|world|shard|split_dataset_by_node|process_index")


def optimizer_before_sharding(script: Script) -> Iterator[Finding]:
    """Optimizers that hold the parameters from before the model was sharded."""
    for call in script.calls:
        models = _models_of_optimizer(script, call) if script.is_optimizer_call(call) else set()
        owners = {owner for model in models for owner in _owners(model)}
        for wrap in script.wraps:
            whole = {ast.unparse(argument) for argument in wrap.call.args[:1]}
            model = min((models & wrap.models) | (owners & whole), default=None)
            if model is None or wrap.follows or not script.is_before(call, wrap.call):
                continue
            if _is_made_anew(script, model, call, wrap):
                continue
            yield Finding(
                "severe",
                f"the optimizer is made before {model} is sharded (line {wrap.call.lineno})",
                "It keeps the parameters of before: what it updates, the model no longer uses.",
                "Make the optimizer after the last call of FullyShardedDataParallel or "
                "fully_shard; FSDP(model, use_orig_params=True) allows it before.",
                script.at(call),
            )
            break


def _models_of_optimizer(script: Script, call: ast.Call) -> set[str]:
    """The texts of the models whose ``.parameters()`` the arguments are.

    They stand in the arguments, or in what a variable among them was given before.
    """
    names = {ast.unparse(given) for given in [*call.args, *(each.value for each in call.keywords)]}
    sources: list[ast.expr] = [call]
    sources += [
        value
        for target, value, statement in script.assignments
        if target in names and script.is_before(statement, call)
    ]
    return {
        ast.unparse(node.func.value)
        for source in sources
        for node in ast.walk(source)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("parameters", "named_parameters")
    }


def _owners(text: str) -> set[str]:
    """``a.b.c`` is part of ``a.b`` and of ``a``."""
    parts = text.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}


def _is_made_anew(script: Script, model: str, first: ast.expr, wrap: Wrap) -> bool:
    """Whether ``model`` is bound to another model between ``first`` and ``wrap``."""
    return any(
        target == model
        and script.is_before(first, statement)
        and script.is_before(statement, wrap.call)
        and not _mentions(value, model)
        for target, value, statement in script.assignments
    )


def _mentions(node: ast.AST, text: str) -> bool:
    return any(
        isinstance(each, ast.Name | ast.Attribute) and ast.unparse(each) == text
        for each in ast.walk(node)
    )


def moved_whole(script: Script) -> Iterator[Finding]:
    """Models that are on the device as a whole before they are sharded."""
    told = set()
    for wrap in script.wraps:
        if not wrap.call.args:
            continue
        argument = wrap.call.args[0]
        text = ast.unparse(argument)
        moves = [argument] if _moves_to_device(script, argument) else []
        moves += [
            call
            for call in script.calls
            if _moves_to_device(script, call)
            and _moved_model(script, call) == text
            and script.is_before(call, wrap.call)
            and not _is_made_anew(script, text, call, wrap)
        ]
        for move in moves[:1]:
            if move not in told:
                told.add(move)
                yield Finding(
                    "warning",
                    f"the whole model is moved to the device before it is sharded "
                    f"(line {wrap.call.lineno})",
                    "Each device must hold all of it for a moment: out of memory for a model that "
                    "only fits sharded.",
                    "Leave it on the CPU: FSDP(model, device_id=...) moves it unit by unit; with "
                    "fully_shard build it on the meta device and call model.to_empty(...) after.",
                    script.at(move),
                )


def _moved_model(script: Script, call: ast.Call) -> str:
    """The text of the model that ``call`` moves: its receiver, or what the result is named."""
    assert isinstance(call.func, ast.Attribute)
    parent = script.parents[call]
    if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
        return ast.unparse(parent.targets[0])
    return ast.unparse(call.func.value)


def _moves_to_device(script: Script, node: ast.expr) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr == "cuda":
        return True
    given = [*node.args[:1], *(each.value for each in node.keywords if each.arg == "device")]
    if node.func.attr != "to" or not given:
        return False
    return not _is_on_host(script, given[0])


def _is_on_host(script: Script, device: ast.expr) -> bool:
    """Whether a first argument of ``.to`` is a dtype, the CPU or the meta device."""
    text = ast.unparse(device)
    values = [ast.unparse(value) for target, value, _ in script.assignments if target == text]
    return any(
        re.fullmatch(r"(torch\.device\()?['\"](cpu|meta)['\"]\)?", each)
        or re.search(r"dtype|^torch\.(b?float|half|double)", each)
        for each in (values or [text])
    )


def sampler_without_epoch(script: Script) -> Iterator[Finding]:
    """Shuffling DistributedSamplers in a script with epochs and without ``set_epoch``."""
    text_of_loops = [
        ast.unparse(node.test)
        if isinstance(node, ast.While)
        else ast.unparse(node.target) + ast.unparse(node.iter)
        for node in ast.walk(script.tree)
        if isinstance(node, ast.For | ast.While)
    ]
    if not any("epoch" in text.lower() for text in text_of_loops):
        return
    called = {call.func.attr for call in script.calls if isinstance(call.func, ast.Attribute)}
    if "set_epoch" in called:
        return
    for call in script.calls:
        if last_part(script.name_of(call.func)) != "DistributedSampler":
            continue
        shuffle = _keyword(call, "shuffle")
        if not (isinstance(shuffle, ast.Constant) and shuffle.value is False):
            yield Finding(
                "warning",
                "a DistributedSampler, a loop over epochs, and no set_epoch",
                "Every epoch has the same order: the sampler shuffles by its epoch's number, which "
                "stays 0.",
                "At the start of each epoch: sampler.set_epoch(epoch)",
                script.at(call),
            )
            return


def data_not_shared_out(script: Script) -> Iterator[Finding]:
    """Shuffling DataLoaders that give every rank samples of the whole data set."""
    prepared = any(
        last_part(ast.unparse(call.func)) in ("prepare", "prepare_data_loader", "setup_dataloaders")
        for call in script.calls
    )
    if prepared or not script.wraps:
        return
    for call in script.calls:
        if last_part(script.name_of(call.func)) != "DataLoader" or len(call.args) > 3:
            continue
        given = {keyword.arg for keyword in call.keywords}
        shuffle = _keyword(call, "shuffle") or (call.args[2] if len(call.args) == 3 else None)
        by_hand = {None, "sampler", "batch_sampler"} & given
        shuffles = isinstance(shuffle, ast.Constant) and shuffle.value is True
        if by_hand or not shuffles or _is_cut_by_rank(script, call):
            continue
        yield Finding(
            "warning",
            "DataLoader(shuffle=True) without a sampler, in a script that shards",
            "Every rank draws from all samples: with equal seeds all train on the same batches, "
            "with different ones an epoch has some samples twice and others never.",
            "sampler = DistributedSampler(dataset, shuffle=True); DataLoader(dataset, "
            "sampler=sampler, ...); sampler.set_epoch(epoch) in each epoch",
            script.at(call),
        )


def _is_cut_by_rank(script: Script, call: ast.Call) -> bool:
    dataset = call.args[0] if call.args else _keyword(call, "dataset")
    if dataset is None:
        return True
    text = ast.unparse(dataset)
    values = [ast.unparse(value) for target, value, _ in script.assignments if target == text]
    return any(_BY_RANK.search(each) for each in [text, *values])


def forward_bypassed(script: Script) -> Iterator[Finding]:
    """Calls of the module inside the wrapper, and of ``forward`` past the hooks."""
    for call in script.calls:
        if not isinstance(call.func, ast.Attribute):
            continue
        owner, method = call.func.value, call.func.attr
        inner = isinstance(owner, ast.Attribute) and owner.attr == "module"
        if method == "module" and script.is_sharded(owner, "FSDP"):
            model = ast.unparse(owner)
        elif method == "forward" and inner and script.is_sharded(owner, "FSDP"):
            model = ast.unparse(owner).removesuffix(".module")
        elif method == "forward" and script.is_sharded(owner, "fully_shard"):
            model = ast.unparse(owner)
        else:
            continue
        yield Finding(
            "severe",
            f"{ast.unparse(call.func)}() goes past what gathers the parameters",
            "The model runs on parameters that are not there, or keeps them gathered.",
            f"Call {model}(...) itself.",
            script.at(call),
        )


def unsafe_load(script: Script) -> Iterator[Finding]:
    """``torch.load`` that runs code from the file, or may."""
    for call in script.calls:
        if script.name_of(call.func) != "torch.load":
            continue
        given = _keyword(call, "weights_only")
        if isinstance(given, ast.Constant) and given.value is False:
            yield Finding(
                "warning",
                "torch.load(weights_only=False)",
                "The file may run any code here: never for a file from others.",
                "torch.load(path, weights_only=True), or safetensors.",
                script.at(call),
            )
        elif given is None and all(keyword.arg for keyword in call.keywords):
            yield Finding(
                "note",
                "torch.load without weights_only",
                "Safe with the torch that fullshard supports; with torch before 2.6 the file may "
                "run any code.",
                "torch.load(path, weights_only=True)",
                script.at(call),
            )


def foreign_names(script: Script) -> Iterator[Finding]:
    """What PyTorch's FSDP does not have or does otherwise, in a script that imports it."""
    wrapper = "torch.distributed.fsdp.FullyShardedDataParallel."
    for node in ast.walk(script.tree):
        name = script.name_of(node) if isinstance(node, ast.Attribute) else ""
        if name in {
            wrapper + each for each in ("ShardingStrategy", "BackwardPrefetch", "CPUOffload")
        }:
            assert isinstance(node, ast.Attribute)
            mend = f"from torch.distributed.fsdp import {node.attr}"
            yield _ours(script, node, ast.unparse(node), mend)
    for call in script.calls:
        name = script.name_of(call.func)
        if last_part(name) == "CPUOffload" and name.startswith("torch."):
            if _keyword(call, "offload_optimizer") is not None:
                mend = "CPUOffload(offload_params=True) offloads the optimizer's state too."
                yield _ours(script, call, "CPUOffload(offload_optimizer=...)", mend)
        elif name == "torch.nn.utils.clip_grad_norm_" and _clips_fsdp1(script, call):
            yield Finding(
                "note",
                "torch.nn.utils.clip_grad_norm_ on an FSDP model",
                "With PyTorch's FSDP1 each rank takes the norm of its own shard alone; with "
                "fullshard the norm is global.",
                "model.clip_grad_norm_(max_norm) is right under both.",
                script.at(call),
            )


def _ours(script: Script, node: ast.expr, text: str, mend: str) -> Finding:
    means = "PyTorch raises here; under 'fullshard run' or fullshard.torch it works."
    return Finding("note", f"{text} is not in PyTorch", means, mend, script.at(node))


def _clips_fsdp1(script: Script, call: ast.Call) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "parameters"
        and script.is_sharded(node.func.value, "FSDP")
        for node in ast.walk(call)
    ) and any(
        script.name_of(wrap.call.func) == "torch.distributed.fsdp.FullyShardedDataParallel"
        for wrap in script.wraps
    )


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((each.value for each in call.keywords if each.arg == name), None)
