# SPDX-License-Identifier: Apache-2.0
"""The settings that a search may change, and the candidates that they make."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fullshard.core.errors import ConfigurationError
from fullshard.core.strategy import Prefetch, ShardingStrategy
from fullshard.plan.choose.settings import OFFLOADS
from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.run import Recompute, Run, Wrap

AXES = ("strategy", "wrap", "micro_batch", "recompute", "offload", "prefetch", "replicas")
"""The settings that a search may choose."""

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)


@dataclass(frozen=True)
class SearchSpace:
    """The runs among which to choose: ``base``, and the names in `AXES` that are free.

    ``global_batch`` is samples of a step over all devices: candidates accumulate up to it. 0 leaves
    the micro-batches of a step as ``base`` has them.
    """

    base: Run
    free: frozenset[str] = frozenset(AXES)
    global_batch: int = 0

    def __post_init__(self) -> None:
        unknown = self.free - set(AXES)
        if unknown:
            raise ConfigurationError(f"cannot search over {sorted(unknown)}; axes: {AXES}")

    def check(self, cluster: Cluster) -> None:
        """Raise `ConfigurationError` if no micro-batch adds up to the global batch."""
        if not self.global_batch:
            return
        ranks = cluster.devices // self.base.tensor_parallel
        each, rest = divmod(self.global_batch, ranks)
        if rest or each < 1:
            near = max(1, round(self.global_batch / ranks)) * ranks
            raise ConfigurationError(
                f"a batch of {self.global_batch} samples cannot be spread over {ranks} ranks; "
                f"the nearest that can is {near}"
            )
        if "micro_batch" not in self.free and each % self.base.micro_batch:
            raise ConfigurationError(
                f"{each} samples a rank are no multiple of micro-batches of "
                f"{self.base.micro_batch}; {each} itself and its divisors are"
            )

    def structures(self, cluster: Cluster) -> Iterator[Run]:
        """Runs that differ in how units are made and kept: strategy and replicas."""
        base = self.base
        every = (
            ShardingStrategy.FULL_SHARD,
            ShardingStrategy.SHARD_GRAD_OP,
            ShardingStrategy.NO_SHARD,
        )
        for strategy in every if "strategy" in self.free else (base.strategy,):
            if not strategy.sharding.sharded or "replicas" not in self.free:
                yield replace(base, strategy=strategy)
                continue
            for replicas in _replicas(cluster, base):
                yield replace(base, strategy=strategy, replicas=replicas)

    def recomputing(self, run: Run) -> Iterator[Run]:
        """``run`` with each way to recompute."""
        kinds = tuple(Recompute) if "recompute" in self.free else (run.recompute,)
        if run.offload_activations:
            kinds = tuple(each for each in kinds if each is not Recompute.SELECTIVE)
        return (replace(run, recompute=each) for each in kinds)

    def batches(self, run: Run, cluster: Cluster) -> Iterator[Run]:
        """``run`` with growing micro-batches."""
        if "micro_batch" not in self.free:
            yield with_batch(run, run.micro_batch, self.global_batch, cluster)
            return
        each = self.global_batch * run.tensor_parallel // cluster.devices
        for size in _SIZES:
            if not each or (size <= each and each % size == 0):
                yield with_batch(run, size, self.global_batch, cluster)

    def offloading(self, run: Run) -> Iterator[Run]:
        """``run`` with more and more of its state on the host; the first is without."""
        levels = tuple(OFFLOADS.values()) if "offload" in self.free else (run.offload,)
        return (replace(run, offload=each) for each in levels)

    def wrapping(self, run: Run) -> Iterator[Run]:
        """``run`` with smaller and smaller units; the first is by block."""
        wraps = [Wrap.BLOCK, Wrap.BLOCK_AND_ENDS, Wrap.PART] if "wrap" in self.free else [run.wrap]
        return (replace(run, wrap=each) for each in wraps)

    def refinements(self, run: Run) -> Iterator[Run]:
        """``run`` with other units and deeper prefetch: small changes, worth trying on the best."""
        depths = [Prefetch(), Prefetch(2, 2)] if "prefetch" in self.free else [run.prefetch]
        for wrapped in self.wrapping(run):
            for depth in depths:
                changed = replace(wrapped, prefetch=depth)
                if changed != run:
                    yield changed


def _replicas(cluster: Cluster, base: Run) -> list[int]:
    """One group; one for each host; and halvings between, for large clusters."""
    ranks = cluster.devices // base.tensor_parallel
    found = {1}
    replicas = cluster.hosts
    while replicas > 1 and len(found) < 5:
        if ranks % (replicas * base.expert_parallel) == 0:
            found.add(replicas)
        replicas //= 4
    return sorted(found)


def with_batch(run: Run, micro_batch: int, global_batch: int, cluster: Cluster) -> Run:
    """``run`` with that micro-batch, accumulated up to ``global_batch`` samples (0: unchanged)."""
    if not global_batch:
        return replace(run, micro_batch=micro_batch)
    each = global_batch * run.tensor_parallel // cluster.devices
    return replace(run, micro_batch=micro_batch, accumulate=max(1, each // micro_batch))
