# SPDX-License-Identifier: Apache-2.0
"""Seconds of collectives, by algorithm and topology: alpha-beta, on rings through hosts."""

from dataclasses import dataclass

from fullshard.plan.cluster.cluster import Cluster, Constants

__all__ = ["Group", "exchange_s", "gather_s", "reduce_all_s"]


@dataclass(frozen=True)
class Group:
    """Ranks of one communicator: ``size`` of them, ``per_host`` of those in each host."""

    size: int
    per_host: int

    @property
    def hosts(self) -> int:
        """Number of hosts that the group touches."""
        return max(1, self.size // self.per_host)


def _bandwidth(group: Group, cluster: Cluster, constants: Constants) -> float:
    """Bytes/s that one rank receives in a ring.

    Rings enter and leave a host by all its links at once, so that the links of the group's ranks in
    a host add up; inside, each rank has its own.
    """
    inside = cluster.inside.bandwidth * constants.inside_share
    if group.hosts == 1:
        return inside
    between = cluster.between.bandwidth * constants.between_share * group.per_host
    return min(inside, between) if group.per_host > 1 else between


def _latency_s(group: Group, cluster: Cluster) -> float:
    """Seconds before the first bytes have gone all the way round.

    A ring passes every rank; libraries take trees, of log2 hosts, where that would be longer.
    """
    if group.size == 1:
        return 0.0
    across = (group.hosts - 1).bit_length() * cluster.between.latency_s * 2
    return (group.per_host - 1) * cluster.inside.latency_s + across


def gather_s(full_bytes: float, group: Group, cluster: Cluster, constants: Constants) -> float:
    """Seconds to gather ``full_bytes``, or to reduce and scatter them: the same bytes move."""
    if group.size == 1 or not full_bytes:
        return 0.0
    received = full_bytes * (group.size - 1) / group.size
    return _latency_s(group, cluster) + received / _bandwidth(group, cluster, constants)


def exchange_s(sent_bytes: float, group: Group, cluster: Cluster, constants: Constants) -> float:
    """Seconds of an all-to-all in which a rank has ``sent_bytes`` for all, itself among them.

    What goes to ranks in its host and what goes to others travels at once, by links of their own.
    """
    if group.size == 1:
        return 0.0
    each = sent_bytes / group.size
    inside = cluster.inside.bandwidth * constants.inside_share
    between = cluster.between.bandwidth * constants.between_share
    far = group.size - group.per_host
    travel = max((group.per_host - 1) * each / inside, far * each / between)
    return travel + (cluster.between if far else cluster.inside).latency_s


def reduce_all_s(whole_bytes: float, group: Group, cluster: Cluster, constants: Constants) -> float:
    """Seconds of an all-reduce of ``whole_bytes``: a reduce-scatter, then a gather."""
    return 2 * gather_s(whole_bytes, group, cluster, constants)
