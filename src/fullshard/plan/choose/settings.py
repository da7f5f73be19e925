# SPDX-License-Identifier: Apache-2.0
"""Settings as people write them: ``recompute=full``, read into runs and clusters; runs in words."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, get_args, get_type_hints

from fullshard.core.errors import ConfigurationError
from fullshard.core.strategy import Offload, Precision, Prefetch, ShardingStrategy
from fullshard.core.text import did_you_mean
from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.cluster.devices import cluster_of, named_device
from fullshard.plan.run import OPTIMIZERS, Recompute, Run, Wrap

GIGABIT = 1e9 / 8

PRECISIONS: Mapping[str, tuple[str, Precision]] = {
    "bf16": ("float32", Precision(compute="bfloat16", reduce="float32")),
    "bf16-pure": ("bfloat16", Precision()),
    "bf16-reduce": ("float32", Precision(compute="bfloat16", reduce="bfloat16")),
    "bf16-amp": ("float32", Precision()),
    "fp16": ("float32", Precision(compute="float16", reduce="float32")),
    "fp32": ("float32", Precision()),
    "tf32": ("float32", Precision()),
}
OFFLOADS: Mapping[str, Offload] = {
    "none": Offload(),
    "optimizer": Offload(optimizer=True),
    "params": Offload(params=True, optimizer=True),
}


@dataclass(frozen=True)
class Setup:
    """A run on a cluster."""

    run: Run
    cluster: Cluster


def choose_one(key: str, value: str, known: tuple[str, ...]) -> str:
    """``value`` if it is known; else raise `ConfigurationError` with the nearest that is."""
    if value in known:
        return value
    hint = did_you_mean(value, known, cutoff=0.3)
    raise ConfigurationError(f"{key}={value!r}: {hint}it may be {', '.join(known)}")


def _member(kind: type[Enum]) -> Callable[[str, str], Enum]:
    names = tuple(str(each.value) for each in kind)
    return lambda key, text: kind(choose_one(key, text.lower(), names))


def _whole(key: str, value: str) -> int:
    try:
        return int(value.replace("_", ""))
    except ValueError:
        raise ConfigurationError(f"{key} must be a whole number, got {value!r}") from None


def _number(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigurationError(f"{key} must be a number, got {value!r}") from None


def _flag(key: str, value: str) -> bool:
    return choose_one(key, value.lower(), ("true", "false")) == "true"


def _strategy(run: Run, value: str) -> Run:
    names = tuple(each.name for each in ShardingStrategy)
    name = choose_one("strategy", value.upper(), names)
    strategy = ShardingStrategy[name]
    if name.endswith("ZERO2"):
        return replace(run, strategy=ShardingStrategy.SHARD_GRAD_OP)
    if strategy is ShardingStrategy.HYBRID_SHARD:
        return replace(run, strategy=ShardingStrategy.FULL_SHARD)
    return replace(run, strategy=strategy, replicas=1)


def _precision(run: Run, value: str) -> Run:
    if value == "fp8":
        return replace(_precision(run, "bf16"), fp8=True)
    dtype, precision = PRECISIONS[choose_one("precision", value, (*PRECISIONS, "fp8"))]
    autocast = "bfloat16" if value == "bf16-amp" else None
    told = {"param_dtype": dtype, "precision": precision, "autocast": autocast}
    return replace(run, **told, fp8=False, tf32=value == "tf32")  # type: ignore[arg-type]


def _reduce(run: Run, value: str) -> Run:
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    dtype = names[choose_one("reduce", value, tuple(names))]
    return replace(run, precision=replace(run.precision, reduce=dtype))


def _prefetch(run: Run, value: str) -> Run:
    forward, _, backward = value.partition("/")
    depth = _whole("prefetch", forward)
    return replace(run, prefetch=Prefetch(depth, _whole("prefetch", backward or forward)))


def _overhead(run: Run, value: str) -> Run:
    seconds = _number("overhead", value) / 1e3
    if not 0 <= seconds < 3600:
        raise ConfigurationError(f"overhead is in milliseconds of a step, got {value!r}")
    return replace(run, overhead_s=seconds)


def _field(
    key: str, read: Callable[[str, str], object], name: str = ""
) -> Callable[[Run, str], Run]:
    """Set the field that ``key`` names, or the one called ``name``, to what ``read`` makes."""
    name = name or key.replace("-", "_")
    return lambda run, text: replace(run, **{name: read(key, text)})  # type: ignore[arg-type]


def _by_type(key: str) -> Callable[[Run, str], Run]:
    """Set the field that ``key`` names to what its annotation reads."""
    told = get_type_hints(Run)[key.replace("-", "_")]
    kind = (get_args(told) or (told,))[0]
    plain = {int: _whole, bool: _flag, float: _number}
    return _field(key, plain[kind] if kind in plain else _member(kind))


_SPECIAL: Mapping[str, Callable[[Run, str], Run]] = {
    "strategy": _strategy,
    "precision": _precision,
    "reduce": _reduce,
    "offload": _field(
        "offload", lambda key, text: OFFLOADS[choose_one(key, text, tuple(OFFLOADS))]
    ),
    "prefetch": _prefetch,
    "optimizer": _field("optimizer", lambda key, text: choose_one(key, text, tuple(OPTIMIZERS))),
    "lora": _field("lora", _whole, "lora_rank"),
    "lora-dtype": _field(
        "lora-dtype", lambda key, text: choose_one(key, text, ("float32", "bfloat16", "float16"))
    ),
    "overhead": _overhead,
}
RUN_KEYS: Mapping[str, Callable[[Run, str], Run]] = {
    key: _SPECIAL.get(key) or _by_type(key)
    for key in (
        *("micro-batch", "sequence", "accumulate", "strategy", "replicas", "wrap", "precision"),
        *("reduce", "recompute", "recompute-every", "offload", "offload-activations", "use-cache"),
        *("prefetch", "optimizer", "optimizer-kernels", "lora", "lora-on", "lora-dtype"),
        *(
            "compiled",
            "fused-parts",
            "loss",
            "attention",
            "engine",
            "tensor-parallel",
            "cut-embedding",
        ),
        *("expert-parallel", "imbalance", "kept-router-loss", "experts", "expandable-segments"),
        *("overhead", "sync-each"),
    )
}
"""The effect of each setting on a run, by its name."""

KEYS: tuple[str, ...] = (*RUN_KEYS, "devices", "device", "per-host", "inside", "between")
"""All names of settings."""


def with_setting(setup: Setup, key: str, value: str) -> Setup:
    """``setup`` with one setting changed.

    Links are in GB/s inside a host and Gbit/s between hosts, of one device in one direction. A
    hybrid strategy without replicas gets one for each host. Raises `ConfigurationError` for an
    unknown key or value, with the nearest that is known.
    """
    choose_one("setting", key, KEYS)
    if key in RUN_KEYS:
        run = RUN_KEYS[key](setup.run, value)
        if key == "strategy" and "HYBRID" in value.upper() and run.replicas == 1:
            run = replace(run, replicas=setup.cluster.hosts)
        return replace(setup, run=run)
    return replace(setup, cluster=_with_cluster(setup.cluster, key, value))


_OF_CLUSTER: Mapping[str, tuple[str, Callable[[str, str], float], float]] = {
    "devices": ("devices", _whole, 1),
    "per-host": ("per_host", _whole, 1),
    "inside": ("inside_bandwidth", _number, 1e9),
    "between": ("between_bandwidth", _number, GIGABIT),
}


def _with_cluster(cluster: Cluster, key: str, value: str) -> Cluster:
    """Change one thing; with another device links are that one's usual ones."""
    device, alone = cluster.device, cluster.hosts == 1
    if key == "device":
        return cluster_of(named_device(value), cluster.devices)
    told: dict[str, Any] = {
        "devices": cluster.devices,
        "per_host": max(cluster.per_host, device.per_host) if alone else cluster.per_host,
        "inside_bandwidth": cluster.inside.bandwidth,
        "between_bandwidth": cluster.between.bandwidth,
    }
    told |= {f"{link}_bandwidth": None for link in cluster.untold}
    name, read, unit = _OF_CLUSTER[key]
    return cluster_of(device, **{**told, name: read(key, value) * unit})


def strategy_name(run: Run) -> str:
    """FSDP1's name of the strategy, with the hybrid ones for several replicas."""
    if run.replicas == 1 or not run.strategy.sharding.sharded:
        return run.strategy.name
    hybrid = run.strategy.sharding.reshard_after_forward
    return "HYBRID_SHARD" if hybrid else "_HYBRID_SHARD_ZERO2"


def offload_name(offload: Offload) -> str:
    """``none``, ``optimizer`` or ``params``."""
    if offload.params:
        return "params"
    return "optimizer" if offload.optimizer else "none"


def describe(run: Run) -> str:
    """The choices of a run in one line."""
    said = [strategy_name(run)]
    if run.replicas > 1 and run.strategy.sharding.sharded:
        said.append(f"{run.replicas} replicas")
    said.append(f"micro-batch {run.micro_batch}")
    if run.accumulate > 1:
        said.append(f"{run.accumulate} accumulated")
    if run.recompute is not Recompute.NONE:
        said.append(f"{run.recompute.value} recompute")
    if run.wrap is not Wrap.BLOCK:
        said.append(f"units by {run.wrap.value}")
    if run.expert_parallel > 1:
        said.append(f"experts over {run.expert_parallel}")
    if run.offload.to_host:
        said.append(f"{offload_name(run.offload)} on the host")
    if run.offload_activations:
        said.append("activations on the host")
    if (run.prefetch.forward, run.prefetch.backward) != (1, 1):
        said.append(f"prefetch {run.prefetch.forward}/{run.prefetch.backward}")
    return ", ".join(said)
