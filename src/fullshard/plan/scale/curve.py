# SPDX-License-Identifier: Apache-2.0
"""One configuration on more and more devices, and two strategies beside each other."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fullshard.core.errors import ConfigurationError
from fullshard.core.strategy import ShardingStrategy
from fullshard.plan.cluster.cluster import Cluster, Constants
from fullshard.plan.cluster.read import fitted_constants
from fullshard.plan.draw.curves import Curve, draw_curves
from fullshard.plan.draw.drawing import Drawing
from fullshard.plan.model.model import Model
from fullshard.plan.predict import Prediction, predict
from fullshard.plan.run import Run
from fullshard.plan.scale.faults import Faults
from fullshard.plan.scale.simulation import Goodput, Work, simulate

__all__ = [
    "DEVICES",
    "Crossover",
    "ScalePoint",
    "draw_scaling",
    "scaling_curve",
    "where_hybrid_wins",
]

DEVICES = tuple(8 * 2**doubling for doubling in range(12))
"""8 to 16,384."""

_SEEDS = (0, 1, 2)


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


@dataclass(frozen=True)
class Crossover:
    """Where FULL_SHARD loses to HYBRID_SHARD with ``group`` ranks that share slices.

    ``devices`` is the smallest cluster on which it does, None if on none that was looked at. It
    need not lose on all larger ones: the all-reduce between groups moves more bytes the more groups
    there are. ``steps`` holds (devices, seconds with FULL_SHARD, seconds with HYBRID_SHARD).
    """

    devices: int | None
    group: int
    steps: tuple[tuple[int, float, float], ...]


def scaling_curve(
    model: Model,
    run: Run,
    cluster: Cluster,
    *,
    devices: Sequence[int] = DEVICES,
    faults: Faults | None = None,
    hours: float = 24.0,
    constants: Constants | None = None,
) -> tuple[ScalePoint, ...]:
    """``run`` on clusters of ``devices`` like ``cluster``, each with its own micro-batch.

    Weak scaling: the batch grows with the cluster. Stragglers of single steps are those of the time
    model's constants, drawn anew for each step.
    """
    constants = constants or fitted_constants()
    faults = faults or Faults()
    points: list[ScalePoint] = []
    for count in devices:
        prediction = predict(model, run, _sized(cluster, count), constants)
        work = _work(prediction, constants)
        runs = [simulate(work, faults, hours=hours, seed=seed) for seed in _SEEDS]
        runs.sort(key=lambda each: each.goodput)
        middle = runs[len(runs) // 2]
        kept = prediction.tokens_per_step / work.step_s * middle.goodput
        first = points[0] if points else None
        best = first.tokens_per_s / first.devices if first else kept / count
        points.append(
            ScalePoint(
                count,
                prediction,
                middle,
                runs[0].goodput,
                runs[-1].goodput,
                kept,
                kept / count / best,
            )
        )
    return tuple(points)


def _sized(cluster: Cluster, devices: int) -> Cluster:
    per_host = min(cluster.per_host, devices)
    if devices % per_host:
        raise ConfigurationError(
            f"{devices} devices do not fill hosts of {per_host}; take a multiple"
        )
    return replace(cluster, devices=devices)


def _work(prediction: Prediction, constants: Constants) -> Work:
    cluster = prediction.cluster
    stragglers = prediction.parts.get("stragglers", 0.0)
    own_s = prediction.step_s - stragglers
    doublings = (cluster.hosts - 1).bit_length()
    resting = prediction.memory.resting
    saved = resting.parameters_bytes + resting.optimizer_bytes
    jitter_s = stragglers / doublings / math.log(2) if doublings else 0.0
    return Work(own_s, cluster.devices, cluster.hosts, saved, jitter_s)


def where_hybrid_wins(
    model: Model,
    run: Run,
    cluster: Cluster,
    *,
    devices: Sequence[int] = DEVICES,
    constants: Constants | None = None,
) -> Crossover:
    """Compare FULL_SHARD with HYBRID_SHARD over whole hosts, on more and more devices.

    The group that shares slices is the smallest number of hosts, doubled each time, in which the
    run fits into the device's memory. Raises `ConfigurationError` if it fits in none.
    """
    constants = constants or fitted_constants()
    group = _smallest_group(model, run, cluster, devices, constants)
    steps = tuple(_compared(model, run, cluster, group, devices, constants))
    wins = (count for count, full_s, hybrid_s in steps if hybrid_s < full_s)
    return Crossover(min(wins, default=None), group, steps)


def _smallest_group(
    model: Model, run: Run, cluster: Cluster, devices: Sequence[int], constants: Constants
) -> int:
    full = replace(run, strategy=ShardingStrategy.FULL_SHARD, replicas=1)
    group, most = cluster.per_host, max(devices)
    while group < most:
        if predict(model, full, _sized(cluster, group), constants).fits:
            return group
        group *= 2
    raise ConfigurationError(
        f"{model.name} with this run does not fit into {cluster.device.title} on {group // 2} "
        "devices; take a smaller micro-batch, recomputation or offload"
    )


def _compared(
    model: Model,
    run: Run,
    cluster: Cluster,
    group: int,
    devices: Sequence[int],
    constants: Constants,
) -> Iterator[tuple[int, float, float]]:
    for count in devices:
        if count <= group or count % group:
            continue
        sized = _sized(cluster, count)
        full = replace(run, strategy=ShardingStrategy.FULL_SHARD, replicas=1)
        hybrid = replace(run, strategy=ShardingStrategy.HYBRID_SHARD, replicas=count // group)
        full_s = predict(model, full, sized, constants).step_s
        yield count, full_s, predict(model, hybrid, sized, constants).step_s


def draw_scaling(points: Sequence[ScalePoint], title: str) -> Drawing:
    """Tokens a second that are kept, beside those without faults and those of a perfect cluster."""
    first = points[0]
    alone = first.prediction.cluster_tokens_per_s / first.devices
    perfect = tuple((float(each.devices), alone * each.devices) for each in points)
    steady = tuple((float(each.devices), each.prediction.cluster_tokens_per_s) for each in points)
    kept = tuple((float(each.devices), each.tokens_per_s) for each in points)
    share = [
        tuple(100 * value / ideal for (_, value), (_, ideal) in zip(line, perfect, strict=True))
        for line in (steady, kept)
    ]
    places = tuple(float(each.devices) for each in points)
    names = ("without faults", "kept, with faults")
    curves = [
        Curve(name, tuple(zip(places, values, strict=True)))
        for name, values in zip(names, share, strict=True)
    ]
    band = [(each.low / each.goodput.goodput, each.high / each.goodput.goodput) for each in points]
    low = tuple(value * edge[0] for value, edge in zip(share[1], band, strict=True))
    high = tuple(value * edge[1] for value, edge in zip(share[1], band, strict=True))
    curves[1] = replace(curves[1], low=low, high=high)
    return draw_curves(curves, title, "devices", "% of perfect scaling")
