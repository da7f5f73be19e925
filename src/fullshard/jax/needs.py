# SPDX-License-Identifier: Apache-2.0
"""The needs of a step, told before it runs: memory and traffic, beside other ways to lay it out.

Figures are those of compiled programs, for each device. Nothing is allocated to make them, and only
compiling takes time: some seconds for each row of a table.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from fullshard.core.errors import ConfigurationError
from fullshard.core.text import in_columns
from fullshard.jax.hlo import StepTraffic, memory_of, traffic_of
from fullshard.jax.rule import Rule
from fullshard.jax.step import TrainStep

__all__ = ["Needs", "NeedsTable", "communication", "compare", "memory_analysis", "overlap_flags"]

_FLAGS = {
    "gpu": (
        "--xla_gpu_enable_latency_hiding_scheduler=true",
        "--xla_gpu_enable_pipelined_all_gather=true",
        "--xla_gpu_enable_pipelined_reduce_scatter=true",
        "--xla_gpu_enable_pipelined_all_reduce=true",
        "--xla_gpu_enable_while_loop_double_buffering=true",
        "--xla_gpu_all_gather_combine_threshold_bytes=134217728",
        "--xla_gpu_reduce_scatter_combine_threshold_bytes=134217728",
    ),
    "tpu": (
        "--xla_tpu_enable_async_collective_fusion=true",
        "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
        "--xla_tpu_overlap_compute_collective_tc=true",
        "--xla_enable_async_all_gather=true",
    ),
    "cpu": (),
}


@dataclass(frozen=True)
class Needs:
    """The needs of one step, in bytes on each device.

    ``state_bytes`` is what rests between steps: parameters, optimizer state and the rest;
    ``temporary_bytes`` what a step takes beside it, gradients among it; ``peak_bytes`` both, the
    batch, and results that have no place in the state given.
    """

    devices: int
    state_bytes: int
    temporary_bytes: int
    peak_bytes: int
    communication: StepTraffic

    @property
    def sent_bytes(self) -> int:
        """Bytes that each device sends in a step."""
        return self.communication.sent_bytes


class NeedsTable(dict[str, Needs]):
    """Ways to run the same step by name, each with what it needs; printed as a table."""

    def __str__(self) -> str:
        head = ("bytes per device", "devices", "state", "temporary", "peak", "sent in a step")
        rows = [(name, x.devices, x.state_bytes, x.temporary_bytes, x.peak_bytes, x.sent_bytes)
                for name, x in self.items()]  # fmt: skip
        return in_columns([head, *rows], right=(1, 2, 3, 4, 5))


def communication(step: TrainStep, batch: Any) -> StepTraffic:
    """Read what ``step`` sends for batches like this one (arrays or shapes) from its program.

    Nothing is allocated. Loops count as often as they run.
    """
    return traffic_of(step.compiled(batch).as_text() or "", step.mesh.size)


def compare(steps: Mapping[str, TrainStep], batch: Any) -> NeedsTable:
    """Tell what each of ``steps`` needs for batches like this one (arrays or shapes); compiles all.

    `TrainStep.variant` makes steps of one model on other meshes, in other modes and by other rules.
    """
    table = NeedsTable()
    for name, step in steps.items():
        memory = memory_of(step.compiled(batch))
        state = sum(
            leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
            for leaf in jax.tree.leaves(step.abstract_state())
        )
        sent = communication(step, batch)
        table[name] = Needs(step.mesh.size, state, memory["temporary"], memory["peak"], sent)
    return table


def memory_analysis(step: TrainStep, batch: Any) -> NeedsTable:
    """``step`` beside the same step with every array on every device: "sharded", "unsharded".

    Exact for the devices of the step's mesh. ``batch`` (arrays or shapes) is the global one.
    """
    whole = step.variant(rule=Rule(replicate=("",)), mode="jit")
    return compare({"sharded": step, "unsharded": whole}, batch)


def overlap_flags(platform: str) -> str:
    """The flags of XLA that run collectives beside computation on "gpu", "tpu" or "cpu" (none).

    One line, to be put into ``XLA_FLAGS`` (of TPUs ``LIBTPU_INIT_ARGS``) before JAX looks for
    devices. Gathers of the next layer and reductions of the last then run while a layer computes,
    at the cost of one more layer in memory. Raises `ConfigurationError` for another platform.
    """
    if platform not in _FLAGS:
        raise ConfigurationError(f"platform={platform!r} is none of {', '.join(_FLAGS)}")
    return " ".join(_FLAGS[platform])
