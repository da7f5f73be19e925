# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fullshard plan``, read into what a search needs."""

import argparse
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullshard.core.errors import ConfigurationError, check_new
from fullshard.core.text import HelpFormatter
from fullshard.plan.choose.changes import parse_question
from fullshard.plan.choose.settings import GIGABIT, RUN_KEYS, Setup, with_setting
from fullshard.plan.choose.space import AXES, SearchSpace
from fullshard.plan.cluster.devices import cluster_of, device_names, named_device
from fullshard.plan.model.config_json import ARCHITECTURES, read_model
from fullshard.plan.model.named import MODEL_NAMES
from fullshard.plan.model.operations import Model
from fullshard.plan.run import Run


def _listed(what: str, names: Iterable[str]) -> str:
    return textwrap.fill(f"{what}: {', '.join(names)}", 78, break_on_hyphens=False)


_EXAMPLES = f"""\
examples:
  fullshard plan llama3-70b --devices 256 --device h100
  fullshard plan model/config.json --devices 16 --device a100-80 --sequence 4096
  fullshard plan llama3-8b --devices 8 --micro-batch 1 --recompute full
  fullshard plan llama3-8b --devices 64 --what-if strategy=FULL_SHARD,NO_SHARD
  fullshard plan llama3-8b --devices 64 --what-if between=50,400 --tokens 1e12
  fullshard plan mpt-7b --devices 32 --device a100-40 --global-batch 1024 --json

{_listed("models", MODEL_NAMES)}
{_listed("config.json of", ARCHITECTURES)}
{_listed("devices", device_names())}

{_listed("What is not given is chosen", [name.replace("_", "-") for name in AXES])}.
"""
_MOST_TOKENS, _MOST_GIB = 1e18, 1e6
_FIXING = {name.replace("_", "-"): name for name in AXES}


@dataclass(frozen=True)
class Asked:
    """The request to ``fullshard plan``: a model, where to begin, what is free, what to show."""

    model: Model
    setup: Setup
    space: SearchSpace
    budget_bytes: int | None
    questions: tuple[tuple[str, tuple[str, ...]], ...]
    tokens: float
    top: int
    as_json: bool
    timeline: bool
    scale: bool
    draw: Path | None
    config: Path | None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fullshard plan",
        usage="fullshard plan MODEL --devices N [--device NAME] [options]",
        description="Tell, before anything is launched, whether a training run fits, how fast it\n"
        "will be, and which configuration to choose. Needs no GPU and no framework.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a preset's name, or a config.json of Hugging Face's")
    where = parser.add_argument_group("cluster")
    where.add_argument("--devices", type=int, default=8, metavar="N", help="how many (default 8)")
    where.add_argument("--device", default="h100", metavar="NAME", help="which (default h100)")
    where.add_argument("--per-host", type=int, metavar="N", help="devices in a host")
    where.add_argument("--inside", type=float, metavar="GB/S", help="link of a device in its host")
    where.add_argument("--between", type=float, metavar="GBIT/S", help="link of a device to others")
    where.add_argument("--memory", type=float, metavar="GIB", help="budget of one device")
    runs = parser.add_argument_group("run (what is given is kept, the rest is chosen)")
    for key in RUN_KEYS:
        runs.add_argument(f"--{key}", metavar="X", help=_HELP.get(key))
    runs.add_argument("--global-batch", type=int, default=0, metavar="N", help="samples of a step")
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--what-if", action="append", default=[], metavar="KEY=A,B,C")
    shown.add_argument("--tokens", type=float, default=0.0, help="tokens of the whole run")
    shown.add_argument("--top", type=int, default=8, metavar="N", help="rows of the table")
    shown.add_argument("--timeline", action="store_true", help="memory and streams over a step")
    shown.add_argument("--scale", action="store_true", help="8 to 16,384 devices, with failures")
    shown.add_argument("--draw", type=Path, metavar="FOLDER", help="the same as SVG and PNG files")
    shown.add_argument("--config", type=Path, metavar="FILE", help="settings of fullshard train")
    shown.add_argument("--json", action="store_true", help="everything as JSON")
    return parser


_HELP = {
    "micro-batch": "samples of a device and forward",
    "sequence": "their length in tokens",
    "accumulate": "micro-batches of a step",
    "strategy": "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD",
    "replicas": "groups of hybrid sharding",
    "wrap": "none, block, block+ends, part",
    "precision": "bf16, bf16-pure, bf16-reduce, bf16-amp, fp16, fp32, tf32, fp8",
    "recompute": "none, selective, full",
    "offload": "none, optimizer, params",
    "offload-activations": "true or false: what blocks keep waits on the host",
    "use-cache": "true or false: the model hands out keys and values",
    "prefetch": "units gathered ahead: N, or FORWARD/BACKWARD",
    "optimizer": "adamw, lion, momentum, sgd",
    "optimizer-kernels": "fused, foreach, loop",
    "lora": "rank of adapters; the model itself is frozen",
    "lora-on": "matrices with adapters: all, attention, query-value",
    "lora-dtype": "that of adapters: float32 (PEFT's, if not told), bfloat16",
    "compiled": "true or false",
    "fused-parts": "true or false: norms, rotations, gates are kernels, as Liger's",
    "loss": "plain, kept, freed, native, compiled, fused, fused-float32, fused-linear, chunked",
    "attention": "flash2, flash3, flash4, cudnn, masked, efficient, eager, math",
    "engine": "fullshard, PyTorch's fsdp1 and fsdp2, or other: DeepSpeed, Megatron",
    "expandable-segments": "true or false: PYTORCH_CUDA_ALLOC_CONF says so",
    "overhead": "milliseconds that the loop adds to a step: data, logging",
    "tensor-parallel": "devices that share each layer",
    "cut-embedding": "true or false: they share the table of tokens, too",
    "expert-parallel": "devices that experts are dealt out over",
    "experts": "how they are computed: grouped, fused, padded, loop, sliced",
    "imbalance": "tokens of the fullest of these, or padded expert, in shares",
    "kept-router-loss": "true or false: routers keep their loss, and its graph",
}


def parse(argv: Sequence[str]) -> Asked:
    """Read the arguments; raises `ConfigurationError` for what cannot be."""
    given = _parser().parse_args(argv)
    model = read_model(given.model)
    device = named_device(given.device)
    cluster = cluster_of(
        device,
        given.devices,
        per_host=given.per_host,
        inside_bandwidth=None if given.inside is None else given.inside * 1e9,
        between_bandwidth=None if given.between is None else given.between * GIGABIT,
    )
    halves = "bf16" if "bfloat16" in device.flops else "fp16"
    precision = "fp32" if device.cpu else halves
    setup = with_setting(Setup(Run(), cluster), "precision", precision)
    fixed: set[str] = set()
    for key in RUN_KEYS:
        value = getattr(given, key.replace("-", "_"))
        if value is not None:
            setup = with_setting(setup, key, value)
            fixed.add(_FIXING.get(key, ""))
            if key == "strategy" and "HYBRID" in value.upper():
                fixed.add("replicas")
    if "strategy" in fixed and given.replicas is None:
        fixed.add("replicas")
    for name in ("top", "global_batch", "tokens"):
        value = getattr(given, name)
        if not 0 <= value <= _MOST_TOKENS:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} must be between 0 and {_MOST_TOKENS:g}, got {value}"
            )
    if given.memory is not None and not 0 < given.memory <= _MOST_GIB:
        raise ConfigurationError(
            f"--memory is in GiB, above 0 and at most {_MOST_GIB:g}, got {given.memory}"
        )
    if given.config is not None:
        check_new("--config", given.config)
    return Asked(
        model,
        setup,
        SearchSpace(setup.run, frozenset(AXES) - fixed, given.global_batch),
        None if given.memory is None else int(given.memory * 2**30),
        tuple(parse_question(text) for text in given.what_if),
        given.tokens,
        given.top,
        given.json,
        given.timeline,
        given.scale,
        given.draw,
        given.config,
    )
