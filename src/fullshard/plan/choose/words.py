# SPDX-License-Identifier: Apache-2.0
"""Runs in words: short for tables, and as the arguments that people write."""

from fullshard.core.strategy import Offload
from fullshard.plan.run import Recompute, Run, Wrap

__all__ = ["describe", "offload_name", "strategy_name"]


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
