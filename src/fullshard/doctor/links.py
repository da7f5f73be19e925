# SPDX-License-Identifier: Apache-2.0
"""The speed of the links between ranks: the engine's collectives, timed, and the ranks for that."""

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fullshard.core.errors import CommunicationError
from fullshard.distributed import cleanup, get_device, join, local_nproc
from fullshard.doctor.findings import Finding
from fullshard.local_ranks import run_local_ranks
from fullshard.torch.comm.process_group import ProcessGroupComm
from fullshard.torch.comm.protocol import Comm, Parts, Work

SIZES_BYTES = tuple(2**power for power in range(16, 27, 2))  # 64 KiB ... 64 MiB
RING_BYTES = 4 * 2**20
MOST = 0.8  # of the best bandwidth: what a unit should reach
SLOW_WORK = 1.5
SLOW_LINK = 3.0


@dataclass(frozen=True)
class LinkTime:
    """One size: bytes of the full buffer, and the median times of the slowest rank."""

    full_bytes: int
    gather_s: float
    reduce_s: float


@dataclass(frozen=True)
class Links:
    """Measurements between the ranks.

    Of each rank: ``work_s``, the time of a fixed computation, and ``from_previous_s``, the time of
    RING_BYTES (or the largest size) from the rank before it, all ranks sending at once.
    """

    ranks: int
    backend: str
    times: tuple[LinkTime, ...]
    work_s: tuple[float, ...]
    from_previous_s: tuple[float, ...]

    @classmethod
    def of_json(cls, text: str) -> "Links":
        """Return the reverse of ``json.dumps(dataclasses.asdict(links))``."""
        read: dict[str, Any] = json.loads(text)
        times = tuple(LinkTime(**each) for each in read.pop("times"))
        work_s, from_previous_s = tuple(read.pop("work_s")), tuple(read.pop("from_previous_s"))
        return cls(times=times, work_s=work_s, from_previous_s=from_previous_s, **read)


def bus_bytes_per_s(full_bytes: int, time_s: float, ranks: int) -> float:
    """Return the bytes that each rank sends in a second: (N-1)/N of the buffer in ``time_s``."""
    return full_bytes * (ranks - 1) / ranks / time_s


def measure_links(
    comm: Comm, device: torch.device, backend: str, sizes_bytes: Sequence[int] = SIZES_BYTES
) -> Links:
    """Time all-gathers and reduce-scatters of float32 buffers. Collective; all ranks get all times.

    Sizes are rounded up to whole elements for each rank. Raises `CommunicationError` if a rank
    fails or does not answer within the group's timeout.
    """
    clock = RankClock(device, comm)
    numels = [max(1, -(-size // (4 * comm.size))) for size in sorted(sizes_bytes)]
    medians: list[float] = []
    for numel in numels:
        repeats = min(15, max(3, 2**24 // (numel * comm.size)))
        shard = torch.ones(numel, device=device)
        full = torch.ones(numel * comm.size, device=device)
        gather = partial(comm.all_gather, [(full, shard)], "doctor gather")
        reduce = partial(comm.reduce_scatter, [(shard, full)], "doctor reduce")
        for issue in (gather, reduce):
            medians.append(statistics.median(clock.times_s(partial(_wait, issue), repeats)))
    ring = _ring(comm, device, min(RING_BYTES // 4, numels[-1] * comm.size))
    own = [*medians, _work_s(device), min(clock.times_s(partial(_wait, ring), 5))]
    table = clock.of_all(own)
    slowest = [max(column) for column in zip(*table, strict=True)]
    return Links(
        ranks=comm.size,
        backend=backend,
        times=tuple(
            LinkTime(numel * comm.size * 4, *slowest[2 * place : 2 * place + 2])
            for place, numel in enumerate(numels)
        ),
        work_s=tuple(row[-2] for row in table),
        from_previous_s=tuple(row[-1] for row in table),
    )


class RankClock:
    """Times work on a device from a moment at which all ranks of ``comm``, if any, are there."""

    def __init__(self, device: torch.device, comm: Comm | None = None):
        self.device: torch.device = device
        self._comm = comm

    def settle(self) -> None:
        """Wait until the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def times_s(self, work: Callable[[], object], repeats: int) -> list[float]:
        """``repeats`` times, after one that does not count: it makes connections and buffers."""
        work()
        times_s = []
        for _ in range(repeats):
            if self._comm is not None:
                meeting = torch.zeros(1, device=self.device)
                self._comm.all_reduce([meeting], label="doctor meets").wait()
            self.settle()
            begin = time.perf_counter()
            work()
            self.settle()
            times_s.append(time.perf_counter() - begin)
        return times_s

    def of_all(self, own: Sequence[float]) -> list[list[float]]:
        """Return the figures of all ranks, by rank. Collective."""
        if self._comm is None:
            return [list(own)]
        shard = torch.tensor(own, dtype=torch.float64, device=self.device)
        full = shard.new_zeros(len(own) * self._comm.size)
        self._comm.all_gather([(full, shard)], "doctor results").wait()
        rows: list[list[float]] = full.view(self._comm.size, -1).tolist()
        return rows


def _wait(issue: Callable[[], Work]) -> None:
    issue().wait()


def _ring(comm: Comm, device: torch.device, numel: int) -> Callable[[], Work]:
    """Let each rank send to the next alone: a slow link delays one rank and not all."""
    before, behind = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    numels_in = [numel if rank == before else 0 for rank in range(comm.size)]
    numels_out = [numel if rank == behind else 0 for rank in range(comm.size)]
    received = Parts(torch.zeros(numel, device=device), numels_in)
    sent = Parts(torch.ones(numel, device=device), numels_out)
    return lambda: comm.all_to_all(received, sent, "doctor ring")


def _work_s(device: torch.device) -> float:
    """Return the least time of a fixed matrix product: other processes only add to it."""
    matrix = torch.ones(4096 if device.type == "cuda" else 384, device=device).diag()
    return min(RankClock(device).times_s(lambda: torch.mm(matrix, matrix), 7))


def unit_bytes_for_most_bandwidth(links: Links) -> int:
    """Return the least size that reaches MOST of the best rates; the largest where none does."""
    rates = [
        (
            bus_bytes_per_s(each.full_bytes, each.gather_s, links.ranks),
            bus_bytes_per_s(each.full_bytes, each.reduce_s, links.ranks),
        )
        for each in links.times
    ]
    best = [max(column) for column in zip(*rates, strict=True)]
    for each, rate in zip(links.times, rates, strict=True):
        if all(got >= MOST * most for got, most in zip(rate, best, strict=True)):
            return each.full_bytes
    return links.times[-1].full_bytes


def check_links(links: Links) -> list[Finding]:
    """Advise on unit sizes; find ranks and links that are slower than the others."""
    findings = _slow_ones(links)
    if len(links.times) > 1:
        findings.append(_unit_size(links))
    return findings


def _unit_size(links: Links) -> Finding:
    size, largest = unit_bytes_for_most_bandwidth(links), links.times[-1].full_bytes
    rate = max(bus_bytes_per_s(each.full_bytes, each.gather_s, links.ranks) for each in links.times)
    more = " (the largest size measured: more may be better)" if size == largest else ""
    return Finding(
        "note",
        f"units of {_mib(size)} and more reach {MOST:.0%} of the best bandwidth, "
        f"{rate / 1e9:.2f} GB/s a rank{more}",
        "Gathering a smaller unit is mostly latency.",
        f"Wrap so that a unit has at least {size / 2e6:.2g} million parameters if they travel in "
        f"bfloat16, {size / 4e6:.2g} million in float32: "
        f"size_based_auto_wrap_policy(min_num_params={size // 2}), or larger blocks.",
    )


def _slow_ones(links: Links) -> list[Finding]:
    found = []
    usual = statistics.median_low(links.work_s)
    for rank, time_s in enumerate(links.work_s):
        if time_s > SLOW_WORK * usual:
            found.append(
                Finding(
                    "warning",
                    f"rank {rank} computes {time_s / usual:.1f} times slower than the others",
                    "All ranks wait for it, once for each unit.",
                    "Look for other processes on its cores or device (top, nvidia-smi), for heat "
                    "and power limits; leave the host out if that does not help.",
                )
            )
    if links.ranks < 3:  # both directions of one link: nothing to compare
        return found
    usual = statistics.median_low(links.from_previous_s)
    for rank, time_s in enumerate(links.from_previous_s):
        if time_s > SLOW_LINK * usual:
            before = (rank - 1) % links.ranks
            found.append(
                Finding(
                    "warning",
                    f"from rank {before} to rank {rank} data takes {time_s / usual:.1f} times as "
                    "long as between others",
                    "Collectives run at the pace of the slowest link.",
                    "If the two are on different hosts: shard within a host "
                    "(ShardingStrategy.HYBRID_SHARD) and check the network between them; else see "
                    "'nvidia-smi topo -m'.",
                )
            )
    return found


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.4g} MiB"


TIMEOUT_S = 60.0  # for a rank to appear, and for each collective


@contextmanager
def joined() -> Iterator[tuple[ProcessGroupComm, torch.device, str]]:
    """Join the ranks of the launcher, then leave: a communicator, a device, the backend's name.

    Collective. Raises `CommunicationError` if the ranks do not come together within TIMEOUT_S.
    """
    device = get_device()
    backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    try:
        join(backend, TIMEOUT_S)
    except RuntimeError as error:
        rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        first_line = str(error).partition("\n")[0]
        raise CommunicationError(
            f"rank {rank} of {size} could not join the others within {TIMEOUT_S:g} s: {first_line}"
        ) from error
    try:
        assert dist.group.WORLD is not None
        yield ProcessGroupComm(dist.group.WORLD), device, backend
    finally:
        cleanup()


def measure_locally(nproc: int, sizes_bytes: Sequence[int], threads: int) -> Links:
    """Measure between ``nproc`` ranks started here. Raises `CommunicationError` if one fails."""
    text = run_local_ranks(
        _measure_here, (tuple(sizes_bytes), threads), local_nproc(nproc), timeout_s=180.0
    )
    assert text is not None  # rank 0 returns it, or fails
    return Links.of_json(text)


def _measure_here(sizes_bytes: tuple[int, ...], threads: int) -> str:
    torch.set_num_threads(threads)
    with joined() as (comm, device, backend):
        links = measure_links(comm, device, backend, sizes_bytes)
    return json.dumps(dataclasses.asdict(links))
