# SPDX-License-Identifier: Apache-2.0
"""The best configuration as code for a script of the user's own, by both interfaces."""

from fullshard.plan.choose.settings import strategy_name
from fullshard.plan.model.decoder import Decoder
from fullshard.plan.predict import Prediction
from fullshard.plan.run import Recompute, Run, Wrap


def code_of(prediction: Prediction, *, fsdp2: bool = False) -> str:
    """Write the wrapper's arguments, or with ``fsdp2`` calls of ``fully_shard``."""
    run, model = prediction.run, prediction.model
    block, attention, feed_forward = ("Block", "Attention", "FeedForward")
    if isinstance(model, Decoder):
        block, attention, feed_forward = model.classes
    full, selective = (run.recompute is each for each in (Recompute.FULL, Recompute.SELECTIVE))
    adapted = run.lora_rank > 0
    notes = {
        f"every {block} through torch.utils.checkpoint (use_reentrant=False)": full,
        f"every {block} through selective checkpointing, each second product kept": selective,
        "forward within torch.autograd.graph.save_on_cpu(pin_memory=True)": run.offload_activations,
        f'forward within torch.autocast("cuda", torch.{run.autocast})': run.autocast,
        f"after adapters of rank {run.lora_rank} are in place, and the model is frozen": adapted,
        f"every {block} through torch.compile": run.compiled,
    }
    lines = [f"# {words}" for words, so in notes.items() if so]
    lines += _calls_of_shard_experts(prediction)
    if fsdp2:
        lines += _calls_of_fully_shard(prediction)
    else:
        units = {
            Wrap.NONE: [],
            Wrap.BLOCK: [block],
            Wrap.BLOCK_AND_ENDS: [block],
            Wrap.PART: [attention, feed_forward],
        }[run.wrap]
        lines += ["model = FullyShardedDataParallel(", "    model,"]
        lines += [f"    {each}," for each in _arguments(prediction, units)]
        lines.append(")")
    depth = run.prefetch
    if (depth.forward, depth.backward) != (1, 1):
        lines.append(f"set_prefetch(model, forward={depth.forward}, backward={depth.backward})")
    if run.accumulate > 1 and run.sync_each:
        lines.append(f"# one optimizer step for {run.accumulate} micro-batches")
    elif run.accumulate > 1:
        quiet = "model.set_requires_gradient_sync(False)" if fsdp2 else "model.no_sync()"
        lines.append(f"# {quiet} for all but the last of {run.accumulate} micro-batches")
    return "\n".join(lines)


def _ends(prediction: Prediction) -> list[str]:
    """Paths of the units that lie in no block: embedding and head."""
    run, model = prediction.run, prediction.model
    if run.wrap not in (Wrap.BLOCK_AND_ENDS, Wrap.PART):
        return []
    inside = tuple(f"{each}." for each in model.blocks)
    return [each for each in model.parts if not each.startswith(inside)]


def _precision(run: Run) -> str:
    chosen = {"param_dtype": run.precision.compute, "reduce_dtype": run.precision.reduce}
    return ", ".join(f"{name}=torch.{dtype}" for name, dtype in chosen.items() if dtype)


def _mesh(prediction: Prediction) -> str:
    run, world = prediction.run, prediction.cluster.devices
    replicas = run.replicas if run.strategy.sharding.sharded else world
    shards = world // replicas
    return _call("init_device_mesh", _dims({"replicate": replicas, "shard": shards}))


def _dims(dims: dict[str, int]) -> str:
    names = ", ".join(f'"{name}"' for name in dims)
    return f'"cuda", ({", ".join(map(str, dims.values()))}), mesh_dim_names=({names})'


def _calls_of_shard_experts(prediction: Prediction) -> list[str]:
    """Deal experts out, before anything else is sharded."""
    run, model = prediction.run, prediction.model
    degree, replicas = run.expert_parallel, run.replicas
    if degree == 1:
        return []
    shards = prediction.cluster.devices // degree // replicas
    if not run.strategy.sharding.sharded:
        replicas, shards = shards, 1
    around = {"replicate": replicas} if replicas > 1 else {}
    blocks, _, first = model.blocks[-len(model.experts)].rpartition(".")
    inside = model.experts[0].rpartition(".experts")[0].split(f"{blocks}.{first}.")[-1]
    options = {"mesh": "mesh", "experts": '"experts"'}
    policy = []
    if _precision(run):
        policy = ["policy = MixedPrecisionPolicy(", f"    {_precision(run)}", ")"]
        options["mp_policy"] = "policy"
    stack = f"block.{inside}.experts"
    return [
        f"# {inside} sends tokens to experts and back: docs/howto/experts.md",
        f"mesh = init_device_mesh(\n    {_dims({**around, 'shard': shards, 'experts': degree})}\n)",
        *policy,
        f"for block in model.{blocks}[{first}:]:",
        f"    {stack} = shard_experts(",
        *(f"        {each}," for each in (stack, *map("=".join, options.items()))),
        "    )",
    ]


def _call(name: str, arguments: str) -> str:
    """Write a call, over three lines if it is long."""
    if len(arguments) < 30:
        return f"{name}({arguments})"
    return f"{name}(\n        {arguments}\n    )"


def _arguments(prediction: Prediction, units: list[str]) -> list[str]:
    run = prediction.run
    arguments = []
    if units and not _ends(prediction):
        arguments.append(f"auto_wrap_policy=ModuleWrapPolicy({{{', '.join(units)}}})")
    elif units:
        kinds = units[0] if len(units) == 1 else f"({', '.join(units)})"
        ends = "".join(f"model.{each}, " for each in _ends(prediction)).strip()
        ends = ends if ends.count(",") == 1 else ends.removesuffix(",")
        chosen = f"isinstance(module, {kinds})\n        or module in ({ends})"
        arguments.append(f"auto_wrap_policy={_call('CustomPolicy', f'lambda module: {chosen}')}")
    arguments.append(f"sharding_strategy=ShardingStrategy.{strategy_name(run)}")
    if run.replicas > 1 and run.strategy.sharding.sharded:
        arguments.append(f"device_mesh={_mesh(prediction)}")
    if _precision(run):
        arguments.append(f"mixed_precision={_call('MixedPrecision', _precision(run))}")
    if run.offload.to_host:
        offload = "offload_params=True" if run.offload.params else "offload_optimizer=True"
        arguments.append(f"cpu_offload=CPUOffload({offload})")
    return arguments


def _calls_of_fully_shard(prediction: Prediction) -> list[str]:
    run, model = prediction.run, prediction.model
    sharding = run.strategy.sharding
    settings = {"reshard_after_forward": str(sharding.reshard_after_forward)}
    if (run.replicas > 1 and sharding.sharded) or not sharding.sharded:
        settings["mesh"] = _mesh(prediction)
    if _precision(run):
        settings["mp_policy"] = _call("MixedPrecisionPolicy", _precision(run))
    if run.offload.to_host:
        settings["offload_policy"] = "CPUOffloadPolicy()"
    lines = []
    if run.offload.to_host and not run.offload.params:
        lines.append("# this offloads parameters, too; the wrapper can leave them on the device")
    lines += [
        "settings = dict(",
        *(f"    {name}={value}," for name, value in settings.items()),
        ")",
    ]
    lists = dict.fromkeys(each.rpartition(".")[0] for each in model.blocks)
    inside = [each.partition(f"{model.blocks[0]}.")[2] for each in model.parts]
    parts = ", ".join(f"block.{each}" for each in inside if each)
    for path in lists if run.wrap is not Wrap.NONE else ():
        lines.append(f"for block in model.{path}:")
        if run.wrap is Wrap.PART:
            lines += [f"    for part in ({parts}):", "        fully_shard(part, **settings)"]
        else:
            lines.append("    fully_shard(block, **settings)")
    lines += [f"fully_shard(model.{each}, **settings)" for each in _ends(prediction)]
    return [*lines, "fully_shard(model, **settings)"]
