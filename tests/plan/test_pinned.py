# SPDX-License-Identifier: Apache-2.0
"""Forecasts stay as they are: each number of the planner moves one of these.

``FULLSHARD_GOLDEN=write`` writes them anew; how good they are, other tests say.
"""

from pathlib import Path

from support.golden import check_golden

from fullshard.core.strategy import Precision, ShardingStrategy
from fullshard.plan import (
    Engine,
    ExpertKernel,
    Loss,
    Recompute,
    Run,
    cluster_of,
    named_device,
    named_model,
    predict,
)
from fullshard.plan.run import AttentionKernel, Offload, OptimizerKernels

PINNED = {
    "eager": ("llama3-8b", "h100", 8, {}),
    "compiled, expandable": (
        "llama3-8b",
        "b200",
        8,
        {"compiled": True, "expandable_segments": True},
    ),
    "short, other engine": ("Qwen3-0.6B", "a100-80", 4, {"sequence": 256, "engine": Engine.OTHER}),
    "offloaded": ("llama3-8b", "h100", 8, {"offload": Offload(params=True, optimizer=True)}),
    "foreach": ("Qwen3-0.6B", "h200", 2, {"optimizer_kernels": OptimizerKernels.FOREACH}),
    "loop behind FSDP2": (
        "Qwen3-0.6B",
        "h100",
        2,
        {"optimizer_kernels": OptimizerKernels.LOOP, "engine": Engine.FSDP2},
    ),
    "adapters behind FSDP1": (
        "llama3-8b",
        "a100-80",
        4,
        {"lora_rank": 16, "engine": Engine.FSDP1, "recompute": Recompute.FULL, "sequence": 1024},
    ),
    "float8, four hosts": ("llama3-8b", "h100", 32, {"fp8": True, "gather_dtype": "float8_e4m3fn"}),
    "hybrid": ("llama3-8b", "h100", 32, {"replicas": 4}),
    "replicas alone": ("Qwen3-0.6B", "l40s", 8, {"strategy": ShardingStrategy.NO_SHARD}),
    "tensor parallel": ("llama3-70b", "h100", 64, {"tensor_parallel": 8}),
    "narrow heads": ("tinyllama-1.1b", "rtx-4090", 2, {"sequence": 8192}),
    "Triton": ("mpt-1b", "a100-40", 8, {"attention": AttentionKernel.TRITON}),
    "beside a mask": ("llama3-8b", "h100", 8, {"attention": AttentionKernel.MASKED}),
    "written out": ("llama3-8b", "mi300x", 8, {"attention": AttentionKernel.EAGER}),
    "in float32": ("Qwen3-0.6B", "a100-80", 1, {"precision": Precision()}),
    "experts that travel": (
        "Qwen3-30B-A3B",
        "h100",
        32,
        {"expert_parallel": 8, "experts": ExpertKernel.GROUPED, "recompute": Recompute.FULL},
    ),
    "experts, how is not told": ("mixtral-8x7b", "h100", 64, {"recompute": Recompute.FULL}),
    "padded experts": (
        "mixtral-8x7b",
        "h100",
        64,
        {"experts": ExpertKernel.PADDED, "recompute": Recompute.FULL},
    ),
    "experts in a loop": (
        "mixtral-8x7b",
        "h100",
        64,
        {"experts": ExpertKernel.LOOP, "recompute": Recompute.FULL},
    ),
    "loss in pieces": (
        "Qwen3-0.6B",
        "h100",
        8,
        {"loss": Loss.CHUNKED, "recompute": Recompute.FULL, "micro_batch": 2},
    ),
    "on CPUs": ("Qwen3-0.6B", "cpu", 2, {"sequence": 512}),
}


def told(model, device, devices, settings):
    run = Run(**{"micro_batch": 1, "sequence": 4096, **settings})
    found = predict(named_model(model), run, cluster_of(named_device(device), devices))
    interval = found.interval
    ends = (interval.low_s, found.step_s, interval.high_s)
    gib = found.memory.peak_bytes / 2**30
    times = f"{' '.join(f'{each:.5g}' for each in ends)} s ({interval.share:.3f})"
    return f"{times}, {gib:.5g} GiB, {found.watts:.4g} W"


def test_forecasts_are_as_they_were():
    lines = [f"{name}: {told(*configuration)}" for name, configuration in PINNED.items()]
    check_golden(Path(__file__).parent / "golden" / "pinned.txt", "\n".join(lines), 100)
