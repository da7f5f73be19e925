# SPDX-License-Identifier: Apache-2.0
"""Mistakes in how a script builds, feeds, calls and steps a sharded model."""

import ast
import re
from collections.abc import Callable, Iterator

from fullshard.doctor.findings import Finding, Severity
from fullshard.doctor.scripts.rank_conditions import RankConditions
from fullshard.doctor.scripts.script import Script, Wrap, argument, last_part, receiver

__all__ = ["CHECKS"]

Place = tuple[ast.expr, str]  # where something was found, and what

_BY_RANK = re.compile(r"rank|world|shard|split_dataset_by_node|process_index")
_ON_HOST = re.compile(
    r"(torch\.device\()?['\"](cpu|meta)['\"]\)?|.*dtype.*|torch\.(b?float|half|double).*"
)
_CLIPS = ("clip_grad_norm_", "clip_grad_value_")
_PREPARES = ("prepare", "prepare_data_loader", "setup_dataloaders")
_OURS = "PyTorch raises here; under 'fullshard run' or fullshard.torch it works."

CHECKS: list[Callable[[Script], Iterator[Finding]]] = []


def _rule(
    severity: Severity, means: str, fix: str
) -> Callable[[Callable[[Script], Iterator[Place]]], None]:
    """Make a check of a function that finds places of one mistake."""

    def register(find: Callable[[Script], Iterator[Place]]) -> None:
        def check(script: Script) -> Iterator[Finding]:
            for node, what in find(script):
                yield script.finding(node, severity, what, means, fix)

        CHECKS.append(check)

    return register


@_rule(
    "severe",
    "It keeps the unsharded parameters, which the model no longer uses, and trains nothing.",
    "Make the optimizer after the last call of FullyShardedDataParallel or fully_shard; "
    "FSDP(model, use_orig_params=True) allows it before.",
)
def _optimizer_before_sharding(script: Script) -> Iterator[Place]:
    for call in script.calls:
        models = _models_of_optimizer(script, call) if script.is_optimizer_call(call) else set()
        owners = {owner for model in models for owner in _owners(model)}
        for wrap in script.wraps:
            whole = {ast.unparse(given) for given in wrap.call.args[:1]}
            model = min((models & wrap.models) | (owners & whole), default=None)
            if model is None or wrap.follows or not script.is_before(call, wrap.call):
                continue
            if not _is_made_anew(script, model, call, wrap):
                line = wrap.call.lineno
                yield call, f"the optimizer is made before {model} is sharded (line {line})"
                break


def _models_of_optimizer(script: Script, call: ast.Call) -> set[str]:
    """The texts of the models whose ``.parameters()`` the arguments are, or were given before."""
    names = {ast.unparse(given) for given in [*call.args, *(each.value for each in call.keywords)]}
    sources = [call] + [
        value
        for target, value, statement in script.assignments
        if target in names and script.is_before(statement, call)
    ]
    owners = [
        receiver(node, "parameters", "named_parameters")
        for source in sources
        for node in ast.walk(source)
    ]
    return {ast.unparse(owner) for owner in owners if owner is not None}


def _owners(text: str) -> set[str]:
    """``a.b.c`` is part of ``a.b`` and of ``a``."""
    parts = text.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}


def _is_made_anew(script: Script, model: str, first: ast.expr, wrap: Wrap) -> bool:
    """Return whether ``model`` is bound to another model between ``first`` and ``wrap``."""
    return any(
        target == model
        and script.is_before(first, statement)
        and script.is_before(statement, wrap.call)
        and model not in map(ast.unparse, _names_in(value))
        for target, value, statement in script.assignments
    )


def _names_in(node: ast.AST) -> list[ast.AST]:
    return [each for each in ast.walk(node) if isinstance(each, ast.Name | ast.Attribute)]


@_rule(
    "warning",
    "Each device must hold all of it for a moment: a model that only fits sharded runs out of "
    "memory.",
    "Leave it on the CPU: FSDP(model, device_id=...) moves it unit by unit; with fully_shard "
    "build it on the meta device and call model.to_empty(...) after.",
)
def _moved_whole(script: Script) -> Iterator[Place]:
    told = set()
    for wrap in script.wraps:
        text = ast.unparse(wrap.call.args[0]) if wrap.call.args else ""
        moves = [each for each in wrap.call.args[:1] if _moved_model(script, each)]
        moves += [
            call
            for call in script.calls
            if _moved_model(script, call) == text != ""
            and script.is_before(call, wrap.call)
            and not _is_made_anew(script, text, call, wrap)
        ]
        if moves and moves[0] not in told:
            told.add(moves[0])
            what = "the whole model is moved to the device before it is sharded"
            yield moves[0], f"{what} (line {wrap.call.lineno})"


def _moved_model(script: Script, node: ast.expr) -> str:
    """The text of the model that ``node`` moves: its receiver, or what the result is named."""
    model = receiver(node, "cuda")
    if model is None and isinstance(node, ast.Call):
        device = argument(node, "device", 0)
        if device is not None and not _is_on_host(script, device):
            model = receiver(node, "to")
    if model is None:
        return ""
    parent = script.parents[node]
    if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
        model = parent.targets[0]
    return ast.unparse(model)


def _is_on_host(script: Script, device: ast.expr) -> bool:
    """Return whether an argument of ``.to`` is a dtype, the CPU or the meta device."""
    values = script.values_of(ast.unparse(device)) or [device]
    return any(_ON_HOST.fullmatch(ast.unparse(each)) for each in values)


@_rule(
    "warning",
    "Right on one host only: the second host has no GPU of that number.",
    'Choose by the number on the host: int(os.environ["LOCAL_RANK"]), or '
    "rank % torch.cuda.device_count().",
)
def _global_rank_as_device(script: Script) -> Iterator[Place]:
    ranks = RankConditions(script)
    for call in script.calls:
        chosen = argument(call, "device_id")
        if script.name_of(call.func) == "torch.cuda.set_device":
            chosen = argument(call, "device", 0)
        number = chosen
        while isinstance(number, ast.Call) and last_part(script.name_of(number.func)) == "device":
            number = number.args[-1] if number.args else None
        if chosen is not None and number is not None and ranks.is_global_rank(number):
            text = ast.unparse(chosen)
            yield call, f"{text} chooses a GPU, but counts the ranks of all hosts"


@_rule(
    "warning",
    "Every epoch has the same order: the sampler shuffles by its epoch's number, which stays 0.",
    "At the start of each epoch: sampler.set_epoch(epoch)",
)
def _sampler_without_epoch(script: Script) -> Iterator[Place]:
    loops = [node for node in ast.walk(script.tree) if isinstance(node, ast.For | ast.While)]
    heads = [ast.unparse(loop).partition("\n")[0] for loop in loops]
    sets = any(receiver(call, "set_epoch") is not None for call in script.calls)
    if not sets and any("epoch" in head.lower() for head in heads):
        for call in script.calls_of("DistributedSampler"):
            if not _is_constant(argument(call, "shuffle"), False):
                yield call, "a DistributedSampler, a loop over epochs, and no set_epoch"
                return


@_rule(
    "warning",
    "Every rank draws from all samples: with equal seeds all train on the same batches, with "
    "different ones an epoch has some samples twice and others never.",
    "sampler = DistributedSampler(dataset, shuffle=True); DataLoader(dataset, sampler=sampler, "
    "...); sampler.set_epoch(epoch) in each epoch",
)
def _data_not_shared_out(script: Script) -> Iterator[Place]:
    if any(last_part(ast.unparse(call.func)) in _PREPARES for call in script.calls):
        return
    for call in script.calls_of("DataLoader") if script.wraps else ():
        given = {keyword.arg for keyword in call.keywords}
        by_hand = len(call.args) > 3 or {None, "sampler", "batch_sampler"} & given
        data = argument(call, "dataset", 0)
        if by_hand or data is None or not _is_constant(argument(call, "shuffle", 2), True):
            continue
        texts = map(ast.unparse, [data, *script.values_of(ast.unparse(data))])
        if not any(map(_BY_RANK.search, texts)):
            yield call, "DataLoader(shuffle=True) without a sampler, in a script that shards"


@_rule(
    "severe",
    "The model runs without its parameters, or keeps them gathered.",
    "Call the model itself: model(...).",
)
def _forward_bypassed(script: Script) -> Iterator[Place]:
    for call in script.calls:
        model, inside = receiver(call, "module"), receiver(call, "forward")
        if isinstance(inside, ast.Attribute) and inside.attr == "module":
            model, inside = inside, None
        wrapped = model is not None and script.is_sharded(model, "FSDP")
        if wrapped or (inside is not None and script.is_sharded(inside, "fully_shard")):
            yield call, f"{ast.unparse(call.func)}() goes past what gathers the parameters"


@_rule(
    "severe",
    "The limit is compared with gradients that are up to 65,536 times too long, so that every "
    "step is cut down to almost nothing.",
    "Call scaler.unscale_(optimizer) before it.",
)
def _clipped_while_scaled(script: Script) -> Iterator[Place]:
    scaler_calls = [
        (call, ast.unparse(owner))
        for call in script.calls
        if (owner := receiver(call, "step", "unscale_")) and _is_scaler(script, owner)
    ]
    for call in script.calls:
        if last_part(ast.unparse(call.func)) in _CLIPS:
            stepped = {text for each, text in scaler_calls if script.is_before(call, each)}
            unscaled = {text for each, text in scaler_calls if script.is_before(each, call)}
            for text in sorted(stepped - unscaled):
                yield call, f"gradients are clipped while they carry the factor of {text}"


def _is_scaler(script: Script, node: ast.expr) -> bool:
    made = [each for each in script.values_of(ast.unparse(node)) if isinstance(each, ast.Call)]
    if any(_is_constant(argument(call, "enabled"), False) for call in made):
        return False
    names = [ast.unparse(node), *(ast.unparse(call.func) for call in made)]
    return any("scaler" in last_part(name).lower() for name in names)


@_rule(
    "warning",
    "The file may run any code here: never do this with a file from others.",
    "torch.load(path, weights_only=True), or safetensors.",
)
def _unsafe_load(script: Script) -> Iterator[Place]:
    for call in script.calls:
        unsafe = _is_constant(argument(call, "weights_only"), False)
        if unsafe and script.name_of(call.func) == "torch.load":
            yield call, "torch.load(weights_only=False)"


@_rule(
    "note",
    "Safe with the torch that fullshard supports; with torch before 2.6 the file may run any code.",
    "torch.load(path, weights_only=True)",
)
def _load_without_choice(script: Script) -> Iterator[Place]:
    for call in script.calls:
        unsaid = not {"weights_only", None} & {keyword.arg for keyword in call.keywords}
        if unsaid and script.name_of(call.func) == "torch.load":
            yield call, "torch.load without weights_only"


@_rule("note", _OURS, "Import it from torch.distributed.fsdp.")
def _names_on_the_wrapper(script: Script) -> Iterator[Place]:
    wrapper = "torch.distributed.fsdp.FullyShardedDataParallel."
    names = [wrapper + each for each in ("ShardingStrategy", "BackwardPrefetch", "CPUOffload")]
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Attribute) and script.name_of(node) in names:
            yield node, f"{ast.unparse(node)} is not in PyTorch"


@_rule("note", _OURS, "CPUOffload(offload_params=True) offloads the optimizer's state too.")
def _offload_of_the_optimizer(script: Script) -> Iterator[Place]:
    for call in script.calls_of("CPUOffload"):
        ours = argument(call, "offload_optimizer") is not None
        if ours and script.name_of(call.func).startswith("torch."):
            yield call, "CPUOffload(offload_optimizer=...) is not in PyTorch"


@_rule(
    "note",
    "With PyTorch's FSDP1 each rank takes the norm of its own shard alone; with fullshard the "
    "norm is global.",
    "model.clip_grad_norm_(max_norm) is right under both.",
)
def _local_norm(script: Script) -> Iterator[Place]:
    for call in script.calls if script.wraps_with_pytorch else ():
        owners = [receiver(node, "parameters") for node in ast.walk(call)]
        sharded = any(owner is not None and script.is_sharded(owner, "FSDP") for owner in owners)
        if sharded and script.name_of(call.func) == "torch.nn.utils.clip_grad_norm_":
            yield call, "torch.nn.utils.clip_grad_norm_ on an FSDP model"


@_rule(
    "warning",
    "With PyTorch's FSDP1 each rank looks for infinities in its own shard alone: some ranks skip "
    "a step that the others take. With fullshard all ranks skip it.",
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler is right under both.",
)
def _plain_scaler(script: Script) -> Iterator[Place]:
    for call in script.calls_of("GradScaler") if script.wraps_with_pytorch else ():
        if not _is_constant(argument(call, "enabled"), False):
            yield call, "a plain GradScaler for an FSDP model"


def _is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
