# SPDX-License-Identifier: Apache-2.0
"""Runs of days on thousands of devices: failures, stragglers, checkpoints, and what is left."""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fullshard.core.errors import ConfigurationError
from fullshard.core.strategy import ShardingStrategy
from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.model.operations import Model
from fullshard.plan.predict import Prediction, predict
from fullshard.plan.run import Run

CLUSTER_SIZES = tuple(8 * 2**doubling for doubling in range(12))
"""8 to 16,384."""

_SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Faults:
    """Rates and costs of faults; all are estimates, and users know theirs better.

    ``device_mtbf_s`` is the mean time between failures of one device with its share of host and
    network. The default is that of Llama 3's training: 419 unexpected interruptions in 54 days on
    16,384 devices (arXiv:2407.21783, section 3.3.4). ``detect_s`` passes until a failure is
    noticed, ``restart_s`` until the job runs again; loading a checkpoint comes on top.
    ``storage_bandwidth`` is what one device's share of the storage takes and gives, in bytes/s: 2
    TB/s over 16,384 devices there. Of a save ``blocking_share`` holds training up; the rest runs
    beside it, and the save counts only when it is over. A host is slow ``slow_rate`` of the time,
    and everybody is then ``slow_factor`` times as slow.
    """

    device_mtbf_s: float = 54 * 86_400 * 16_384 / 419
    detect_s: float = 120.0
    restart_s: float = 300.0
    storage_bandwidth: float = 2e12 / 16_384
    blocking_share: float = 0.1
    slow_rate: float = 2e-5
    slow_factor: float = 1.3

    def __post_init__(self) -> None:
        positive = ("device_mtbf_s", "storage_bandwidth")
        for name in (*positive, "detect_s", "restart_s", "blocking_share", "slow_rate"):
            value = getattr(self, name)
            least = "above 0" if name in positive else "0 or more"
            if math.isnan(value) or value < 0 or (name in positive and value == 0):
                raise ConfigurationError(f"{name} must be {least}, got {value!r}")
        for name in ("blocking_share", "slow_rate"):
            if getattr(self, name) > 1:
                raise ConfigurationError(f"{name} is a share, at most 1, got {getattr(self, name)}")
        if not self.slow_factor >= 1:
            raise ConfigurationError(f"slow_factor must be at least 1, got {self.slow_factor!r}")

    def mtbf_s(self, devices: int) -> float:
        """Mean seconds between failures of any of ``devices``."""
        return self.device_mtbf_s / devices

    def save_s(self, bytes_per_device: float) -> float:
        """Seconds to write, or to read, what one device keeps."""
        return bytes_per_device / self.storage_bandwidth

    def best_interval_s(self, devices: int, bytes_per_device: float) -> float:
        """Seconds between saves that lose the least, by Young's rule (1974).

        The square root of 2 x the seconds that a save holds training up x the mean time between
        failures; never less than a save takes.
        """
        blocking_s = self.save_s(bytes_per_device) * self.blocking_share
        best = math.sqrt(2 * blocking_s * self.mtbf_s(devices))
        return max(best, self.save_s(bytes_per_device), 1.0)


@dataclass(frozen=True)
class LongRun:
    """A run of many steps of ``step_s`` on every host, of which the slowest is waited for.

    Each host takes longer by an exponential time with the mean ``jitter_s``; so each doubling of
    the hosts adds ``jitter_s`` x ln 2 to a step. ``state_bytes`` is what one device saves.
    """

    step_s: float
    devices: int
    hosts: int
    state_bytes: float
    jitter_s: float = 0.0

    def __post_init__(self) -> None:
        if self.step_s <= 0 or self.devices < 1 or self.hosts < 1 or self.jitter_s < 0:
            raise ConfigurationError(
                "a run needs a step above 0 s, at least one device and host, and no negative "
                f"jitter, got {self}"
            )


@dataclass(frozen=True)
class Goodput:
    """Shares of the time of a run; ``goodput`` is what was kept of the work.

    ``steps`` were kept, at the pace of ``LongRun.step_s`` with nobody to wait for. The shares of
    ``lost`` (work after the last save), ``down`` (noticing, restarting, loading), ``saving``,
    ``jitter`` and ``slow`` (waiting for slow hosts) make up the rest. ``failures`` is how many
    there were.
    """

    goodput: float
    steps: int
    failures: int
    shares: Mapping[str, float]
    interval_s: float


def simulate(
    work: LongRun,
    faults: Faults | None = None,
    *,
    hours: float = 24.0 * 30,
    interval_s: float | None = None,
    seed: int = 0,
) -> Goodput:
    """Simulate a run of ``hours``, saved every ``interval_s`` seconds (None: the best by rule).

    Failures come at random, waiting for the slowest host by its mean. Equal seeds give equal runs.
    Raises `ConfigurationError` for times that are not above 0.
    """
    faults = faults or Faults()
    if interval_s is None:
        interval_s = faults.best_interval_s(work.devices, work.state_bytes)
    if hours <= 0 or interval_s <= 0:
        raise ConfigurationError(
            f"hours and the seconds between saves must be above 0, got {hours} and {interval_s}"
        )
    # The mean of the largest of n exponential draws is their mean times 1 + 1/2 + ... + 1/n.
    jitter_s = work.jitter_s * sum(1 / host for host in range(1, work.hosts + 1))
    slow_s = work.step_s * (faults.slow_factor - 1) * (1 - (1 - faults.slow_rate) ** work.hosts)
    save_s = faults.save_s(work.state_bytes)
    blocked_s = save_s * faults.blocking_share
    cycle_s = interval_s + blocked_s
    down_s = faults.detect_s + faults.restart_s + save_s
    rate, end_s, draw = 1 / faults.mtbf_s(work.devices), hours * 3600.0, random.Random(seed)
    now = trained_s = saving_s = lost_s = 0.0
    failures = 0
    while now < end_s:
        alive_s = draw.expovariate(rate)
        if now + alive_s >= end_s:  # the last save is made when the run ends
            alive_s = end_s - now
            saves = int(alive_s / cycle_s)
            trained_s += alive_s - saves * blocked_s
            saving_s += saves * blocked_s
            break
        saves = max(0, int((alive_s - (save_s - blocked_s)) / cycle_s))  # those written by then
        trained_s += saves * interval_s
        saving_s += saves * blocked_s
        lost_s += alive_s - saves * cycle_s
        failures += 1
        now += alive_s
        while (again_s := draw.expovariate(rate)) < down_s:  # it fails before it runs again
            failures += 1
            now += again_s
        now += down_s
    total_s = max(now, end_s)
    down_total_s = total_s - trained_s - saving_s - lost_s
    shares = {
        "lost": lost_s / total_s,
        "down": down_total_s / total_s,
        "saving": saving_s / total_s,
    }
    pace_s = work.step_s + jitter_s + slow_s
    for name, extra_s in (("jitter", jitter_s), ("slow", slow_s)):
        shares[name] = trained_s * extra_s / pace_s / total_s
    kept = trained_s * work.step_s / pace_s / total_s
    return Goodput(kept, round(trained_s / pace_s), failures, shares, interval_s)


@dataclass(frozen=True)
class ScalePoint:
    """A number of devices: what is predicted, and what faults leave of it.

    ``goodput``, with ``low`` and ``high`` over several simulated runs, is the share of the time
    whose work is kept at the pace of a step without stragglers; ``tokens_per_s`` is what all
    devices together keep. ``efficiency`` is that of one device against the smallest cluster's.
    """

    devices: int
    prediction: Prediction
    goodput: Goodput
    low: float
    high: float
    tokens_per_s: float
    efficiency: float


def scaling_curve(
    model: Model,
    run: Run,
    cluster: Cluster,
    *,
    devices: Sequence[int] = CLUSTER_SIZES,
    faults: Faults | None = None,
    hours: float = 24.0,
) -> tuple[ScalePoint, ...]:
    """Simulate ``run`` on clusters of ``devices`` like ``cluster``, each with its own micro-batch.

    Weak scaling: the batch grows with the cluster. Stragglers of single steps are those of the time
    model's constants.
    """
    points: list[ScalePoint] = []
    for count in devices:
        prediction = predict(model, run, replace(cluster, devices=count))
        work = _long_run(prediction)
        runs = [simulate(work, faults, hours=hours, seed=seed) for seed in _SEEDS]
        low, middle, high = sorted(runs, key=lambda each: each.goodput)
        kept = prediction.tokens_per_step / work.step_s * middle.goodput
        best = points[0].tokens_per_s / points[0].devices if points else kept / count
        efficiency = kept / count / best
        points.append(
            ScalePoint(count, prediction, middle, low.goodput, high.goodput, kept, efficiency)
        )
    return tuple(points)


def _long_run(prediction: Prediction) -> LongRun:
    cluster = prediction.cluster
    stragglers = prediction.parts.get("stragglers", 0.0)
    doublings = (cluster.hosts - 1).bit_length()
    resting = prediction.memory.resting
    saved = resting.parameters_bytes + resting.optimizer_bytes
    jitter_s = stragglers / doublings / math.log(2) if doublings else 0.0
    own_s = prediction.step_s - stragglers
    return LongRun(own_s, cluster.devices, cluster.hosts, saved, jitter_s)


@dataclass(frozen=True)
class Crossover:
    """The smallest cluster on which FULL_SHARD loses to HYBRID_SHARD with groups of ``group``.

    ``devices`` is None if there is none among those that were looked at. FULL_SHARD need not lose
    on all larger ones: the all-reduce between groups moves more bytes the more groups there are.
    ``steps`` holds (devices, seconds with FULL_SHARD, seconds with HYBRID_SHARD).
    """

    devices: int | None
    group: int
    steps: tuple[tuple[int, float, float], ...]


def where_hybrid_wins(
    model: Model,
    run: Run,
    cluster: Cluster,
    *,
    devices: Sequence[int] = CLUSTER_SIZES,
) -> Crossover:
    """Compare FULL_SHARD with HYBRID_SHARD over whole hosts, on more and more devices.

    The group that shares slices is the smallest number of hosts, doubled each time, in which the
    run fits into the device's memory. Raises `ConfigurationError` if it fits in none.
    """
    full = replace(run, strategy=ShardingStrategy.FULL_SHARD, replicas=1)
    group = cluster.per_host
    while not predict(model, full, replace(cluster, devices=group)).fits:
        group *= 2
        if group >= max(devices):
            raise ConfigurationError(
                f"{model.name} with this run does not fit into {cluster.device.title} on "
                f"{group // 2} devices; take a smaller micro-batch, recomputation or offload"
            )

    def compared() -> Iterator[tuple[int, float, float]]:
        for count in devices:
            if count > group and count % group == 0:
                sized = replace(cluster, devices=count)
                hybrid = replace(
                    run, strategy=ShardingStrategy.HYBRID_SHARD, replicas=count // group
                )
                full_s = predict(model, full, sized).step_s
                yield count, full_s, predict(model, hybrid, sized).step_s

    steps = tuple(compared())
    wins = (count for count, full_s, hybrid_s in steps if hybrid_s < full_s)
    return Crossover(min(wins, default=None), group, steps)
