# SPDX-License-Identifier: Apache-2.0
"""See by the planner whether a run fits into memory, before anything is built."""

from dataclasses import replace

from fullshard.core.errors import ConfigurationError
from fullshard.core.presets import transformer
from fullshard.core.strategy import AS_IT_RESTS, ShardingStrategy
from fullshard.core.text import bytes_text
from fullshard.host_memory import host_total_bytes
from fullshard.plan.cluster.read import cluster_of, named_device
from fullshard.plan.memory import forecast_memory
from fullshard.plan.model.decoder import Decoder
from fullshard.plan.model.shape import Experts, shape_of
from fullshard.plan.run import Recompute
from fullshard.plan.run import Run as PlannedRun
from fullshard.plan.step.script import write_script
from fullshard.train.config import Config, check_world

__all__ = ["check_memory", "check_run", "needed_bytes"]


def check_run(config: Config, ranks: int, on_host: int, device_bytes: int | None) -> None:
    """Refuse a batch that ``ranks`` ranks cannot share, and a model that they cannot hold.

    A rank has ``device_bytes`` of memory, None for its share of a host that has ``on_host`` ranks.
    """
    check_world(config, ranks)
    check_memory(config, ranks, device_bytes or host_total_bytes() // on_host)


def check_memory(config: Config, ranks: int, each_bytes: int) -> None:
    """Refuse a run of ``ranks`` ranks that needs more than ``each_bytes`` of memory on each.

    Raises `ConfigurationError` with what the planner expects.
    """
    needed = needed_bytes(config, ranks) if config.of_text else 0
    if needed > each_bytes:
        raise ConfigurationError(
            f"model.preset={config.model.preset} needs about {bytes_text(needed)} of memory on "
            f"each of {ranks} rank{'s'[: ranks > 1]}, and there are {bytes_text(each_bytes)}: "
            "take a smaller preset, a smaller train.batch or model.context, or more ranks with "
            "memory of their own (fullshard plan tells what fits)"
        )


def needed_bytes(config: Config, ranks: int) -> int:
    """Return the bytes of one rank at the peak of a step, without a device's context.

    The tower of a vlm is not counted: its gpt has more than a hundred times as much.
    """
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
    cluster = cluster_of(named_device("h100"), ranks, per_host=ranks)
    forecast = forecast_memory(write_script(model, run, cluster), model, run, cluster)
    return forecast.peak_bytes - forecast.peak["context and nccl"]
