# SPDX-License-Identifier: Apache-2.0
"""The command's findings, as data for ``--json`` and as settings of ``fullshard train``."""

from collections.abc import Sequence
from typing import Any

from fullshard.core.errors import NotSupportedError
from fullshard.core.presets import TRANSFORMERS
from fullshard.plan.choose.changes import Answer
from fullshard.plan.choose.search import Choice, pareto, told_speed
from fullshard.plan.choose.settings import describe, offload_name, strategy_name
from fullshard.plan.command.recipe import code_of
from fullshard.plan.predict import Prediction
from fullshard.plan.run import Recompute, Run


def prediction_data(prediction: Prediction, tokens: float = 0.0) -> dict[str, Any]:
    """One prediction as plain data; times in seconds, sizes in bytes."""
    memory = prediction.memory
    data = {
        "configuration": _run_data(prediction.run),
        "memory": {
            "peak_bytes": memory.peak_bytes,
            "reserved_bytes": memory.reserved_bytes,
            "allocated_bytes": memory.allocated_bytes,
            "host_bytes": memory.host_bytes,
            "host_bytes_per_host": prediction.host_bytes,
            "interval_bytes": list(prediction.memory_interval),
            "by_category": dict(memory.peak),
            "cause": memory.cause,
            "fits": prediction.fits,
        },
        "step_s": prediction.step_s,
        "step_interval_s": [prediction.interval.low_s, prediction.interval.high_s],
        "step_interval_share": prediction.interval.share,
        "parts_s": dict(prediction.parts),
        "communication_s": prediction.communication_s,
        "tokens_per_s_per_device": prediction.tokens_per_s,
        "tokens_per_s_told": told_speed(prediction),
        "tokens_per_s": prediction.cluster_tokens_per_s,
        "mfu": prediction.mfu,
        "unknowns": {
            each.name: {"later": each.later, "sooner": each.sooner}
            for each in prediction.interval.unknowns
        },
    }
    if tokens:
        data["run"] = {
            "tokens": tokens,
            "days": tokens / prediction.cluster_tokens_per_s / 86_400,
            "device_hours": prediction.device_hours(tokens),
            "energy_kwh": prediction.energy_kwh(tokens),
        }
    return data


_SAME = (
    *("replicas", "micro_batch", "accumulate", "sequence", "sync_each", "offload_activations"),
    *("use_cache", "param_dtype", "compute_dtype", "optimizer", "expert_parallel", "imbalance"),
    *("overhead_s", "compiled", "tensor_parallel", "cut_embedding", "kept_router_loss", "tf32"),
    *("expandable_segments", "fused_parts"),
)
_BY_VALUE = ("wrap", "recompute", "loss", "attention", "engine")


def _run_data(run: Run) -> dict[str, Any]:
    """The choices of a run by the names of the command's arguments."""
    return {
        "strategy": strategy_name(run),
        **{name: getattr(run, name) for name in _SAME},
        **{name: getattr(run, name).value for name in _BY_VALUE},
        "offload": offload_name(run.offload),
        "prefetch": [run.prefetch.forward, run.prefetch.backward],
        "reduce_dtype": run.precision.grad_dtype(run.param_dtype),
        "lora": run.lora_rank,
        "lora_on": run.lora_on.value if run.lora_rank else None,
        "lora_dtype": run.lora_dtype if run.lora_rank else None,
        "experts": None if run.experts is None else run.experts.value,
        "optimizer_kernels": run.optimizer_kernels and run.optimizer_kernels.value,
    }


def choice_data(choice: Choice, tokens: float, top: int) -> dict[str, Any]:
    """Return the findings of a search."""
    return {
        "model": choice.model.name,
        "device": choice.cluster.device.title,
        "devices": choice.cluster.devices,
        "budget_bytes": choice.budget_bytes,
        "tried": choice.tried,
        "ranked": [prediction_data(each, tokens) for each in choice.ranked[:top]],
        "pareto": [describe(each.run) for each in pareto(choice.ranked)],
        "rejected": [
            {"configuration": describe(each.run), "reason": each.reason} for each in choice.rejected
        ],
        "code": {"wrapper": code_of(choice.best), "fully_shard": code_of(choice.best, fsdp2=True)},
    }


def answers_data(key: str, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return what-if answers as plain data."""
    return [
        {key: each.value, "reason": each.reason}
        if each.prediction is None
        else {key: each.value, **prediction_data(each.prediction)}
        for each in answers
    ]


def train_settings(choice: Choice) -> str:
    """The best configuration as settings of ``fullshard train``, in TOML.

    Raises `NotSupportedError` if it needs what ``fullshard train`` does not have.
    """
    run, best = choice.best.run, choice.best
    name = choice.model.name
    missing = []
    if name not in TRANSFORMERS:
        missing.append(f"the model {name} (it has {', '.join(TRANSFORMERS)})")
    if run.replicas > 1 and run.strategy.sharding.sharded:
        missing.append("replicas")
    missing += [
        word
        for word, wanted in (
            ("recompute", run.recompute is not Recompute.NONE),
            ("offload", run.offload.to_host or run.offload_activations),
            ("accumulation", run.accumulate > 1),
        )
        if wanted
    ]
    if missing:
        raise NotSupportedError(
            f"fullshard train does not have {', '.join(missing)}; take the arguments for a script "
            "of your own, or fix the choice, for example with --recompute none"
        )
    batch = run.micro_batch * best.cluster.devices
    return (
        f'[model]\nname = "gpt"\npreset = "{name}"\n'
        f"context = {run.sequence or choice.model.context}\n\n"
        f'[train]\nbatch = {batch}\ndtype = "{run.param_dtype}"\n\n'
        f'[shard]\nstrategy = "{run.strategy.name}"\n'
    )
