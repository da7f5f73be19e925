# SPDX-License-Identifier: Apache-2.0
"""See by the planner whether a run fits into memory, before anything is built."""

from dataclasses import replace

from fullshard.core.errors import ConfigurationError
from fullshard.core.presets import transformer
from fullshard.core.strategy import AS_IT_RESTS, ShardingStrategy
from fullshard.core.text import bytes_text
from fullshard.host_memory import host_total_bytes
from fullshard.plan.choose.changes import smallest_change
from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.cluster.devices import cluster_of, named_device
from fullshard.plan.memory import MemoryForecast, forecast_memory
from fullshard.plan.model.decoder import Decoder
from fullshard.plan.model.shape import Experts, shape_of
from fullshard.plan.run import Recompute
from fullshard.plan.run import Run as PlannedRun
from fullshard.plan.step.script import write_script
from fullshard.train.config import Config, check_world
from fullshard.train.loggers import check_loggers


def check_run(config: Config, ranks: int, on_host: int, device_bytes: int | None) -> None:
    """Refuse a batch that ``ranks`` ranks cannot share, a model that they cannot hold, and loggers
    that are not there.

    A rank has ``device_bytes`` of memory, None for its share of a host that has ``on_host`` ranks.
    """
    check_world(config, ranks)
    check_loggers(config.log.to)
    check_memory(config, ranks, device_bytes or host_total_bytes() // on_host)


def check_memory(config: Config, ranks: int, each_bytes: int) -> None:
    """Refuse a run that by the planner needs more than ``each_bytes`` on each of its ranks."""
    needed = needed_bytes(config, ranks) if config.of_text else 0
    if needed > each_bytes:
        raise ConfigurationError(
            f"model.preset={config.model.preset} needs about {bytes_text(needed)} of memory on "
            f"each of {ranks} rank{'s'[: ranks > 1]}, and there are {bytes_text(each_bytes)}: "
            "take a smaller preset, a smaller train.batch or model.context, or more ranks with "
            "memory of their own (fullshard plan tells what fits)"
        )


def needed_bytes(config: Config, ranks: int) -> int:
    """Return a rank's bytes at a step's peak, without context, or the small tower of a vlm."""
    forecast = _forecast(*_planned(config, ranks))
    return forecast.peak_bytes - forecast.peak["context and nccl"]


def way_to_fit(config: Config, ranks: int, each_bytes: int) -> str:
    """Say in the planner's words the smallest change with which a rank needs ``each_bytes``."""
    if not config.of_text:
        return ""
    model, run, cluster = _planned(config, ranks)
    forecast = _forecast(model, run, cluster)
    budget = each_bytes + forecast.peak["context and nccl"]
    if forecast.peak_bytes <= budget:
        needed = bytes_text(needed_bytes(config, ranks))
        return f"The planner expects {needed}, which is there: something else holds memory"
    change = smallest_change(model, run, cluster, budget_bytes=budget)
    if change is None:
        return "The planner knows no three changes with which it fits: take a smaller model"
    peak = bytes_text(change.prediction.memory.peak_bytes)
    return (
        f"The planner's smallest change that fits: {', '.join(change.words)} ({peak} at the peak)"
    )


def _forecast(model: Decoder, run: PlannedRun, cluster: Cluster) -> MemoryForecast:
    return forecast_memory(write_script(model, run, cluster), model, run, cluster)


def _planned(config: Config, ranks: int) -> tuple[Decoder, PlannedRun, Cluster]:
    # The JAX engine gathers a block anew for backward and recomputes it.
    again = config.train.engine == "jax" and config.shard.strategy != "SHARD_GRAD_OP"
    run = PlannedRun(
        micro_batch=max(1, config.train.batch // ranks),
        sequence=config.context,
        strategy=ShardingStrategy[config.shard.strategy],
        param_dtype=config.train.dtype,
        precision=AS_IT_RESTS,
        recompute=Recompute.FULL if again else Recompute.NONE,
    )
    shape = shape_of(transformer(config.model.preset))
    if config.model.name == "moe":
        shape = replace(shape, experts=Experts(config.model.experts, 2, shape.hidden))
    model = Decoder(config.model.preset, shape)
    return model, run, cluster_of(named_device("h100"), ranks, per_host=ranks)
