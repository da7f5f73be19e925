# SPDX-License-Identifier: Apache-2.0
"""A choice of modules to make units of, by their parameters and the links alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.core.errors import ConfigurationError
from fullshard.core.forecast import forecast, step_events, unit_cost
from fullshard.core.grouping import around_of, group_parameters
from fullshard.core.layout import Layout, lay_out
from fullshard.core.schedule import UnitPolicy
from fullshard.core.spec import ParamSpec
from fullshard.core.strategy import AS_IT_RESTS, Precision, Prefetch
from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.cluster.devices import fitted_constants
from fullshard.plan.step.prices import Group, gather_s

MOST_LATENCY = 0.1  # of the time of gathers: with more, units are too small for the link


@dataclass(frozen=True)
class Weighed:
    """The cost of one choice of units: bytes at the peak, seconds of a round of gathers.

    ``latency_share`` of those seconds passes before bytes do.
    """

    paths: tuple[str, ...]
    peak_bytes: int
    gather_s: float
    latency_share: float


def weigh(
    params: Sequence[ParamSpec],
    paths: Sequence[str],
    cluster: Cluster,
    precision: Precision = AS_IT_RESTS,
) -> Weighed:
    """Weigh the cost of making units of the modules at ``paths``, beside the root."""
    ordered = ("", *paths)
    groups = group_parameters(params, ordered)
    layouts = [lay_out(groups[path], cluster.devices, precision) for path in ordered]
    constants = cluster.device.constants or fitted_constants()
    group = Group(cluster.devices, min(cluster.devices, cluster.per_host))
    spent = sum(gather_s(each.full_bytes, group, cluster, constants) for each in layouts)
    whole = sum(each.full_bytes for each in layouts)
    at_once = gather_s(whole, group, cluster, constants)
    latency = gather_s(1e-9, group, cluster, constants)
    peak = _peak_bytes(ordered, layouts)
    calls = sum(each.full_bytes > 0 for each in layouts)
    share = latency * calls / spent if spent else 0.0
    return Weighed(tuple(paths), peak, max(spent, at_once), share)


def choose_wrapping(
    params: Sequence[ParamSpec],
    candidates: Sequence[Sequence[str]],
    cluster: Cluster,
    precision: Precision = AS_IT_RESTS,
) -> Weighed:
    """The candidate with the least memory among those whose gathers are not mostly latency.

    If all of them are, the one with the fastest gathers. Raises `ConfigurationError` if there is no
    candidate.
    """
    if not candidates:
        raise ConfigurationError("there is no candidate to choose units from")
    weighed = [weigh(params, paths, cluster, precision) for paths in candidates]
    wide = [each for each in weighed if each.latency_share <= MOST_LATENCY]
    if not wide:
        return min(weighed, key=lambda each: each.gather_s)
    return min(wide, key=lambda each: (each.peak_bytes, len(each.paths)))


def _peak_bytes(paths: Sequence[str], layouts: Sequence[Layout]) -> int:
    """Return the most that units hold beyond their shards, in a step in the order of ``paths``."""
    trained = [layout.grad_full_bytes > 0 for layout in layouts]
    policies = {
        number: UnitPolicy(
            gathered=layout.shards > 1 and layout.full_bytes > 0,
            reduced=trained[number],
            reshard_after_forward=number > 0,
            full_bytes=layout.full_bytes,
        )
        for number, layout in enumerate(layouts)
    }
    costs = {number: unit_cost(layout) for number, layout in enumerate(layouts)}
    return forecast(step_events(around_of(paths), trained), policies, costs, Prefetch()).peak_bytes
