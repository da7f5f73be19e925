# SPDX-License-Identifier: Apache-2.0
"""Rates of this machine's device and links, measured as a training step uses them."""

import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fullshard.doctor.links.measure import Links, RankClock, measure_links
from fullshard.host_memory import host_total_bytes
from fullshard.plan.cluster.cluster import Device, Link
from fullshard.plan.cluster.devices import fitted_constants
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.unit.buffers import FlatBuffer

__all__ = ["calibrate", "link_of"]

_LINK_BYTES = (1 << 20, 1 << 24)
_BUFFER_BYTES = 1 << 26
_MEASURED_SHARES = [
    f"{part}_share" for part in ("matmul", "attention", "memory", "inside", "between")
]
_SHAPES = {  # (m, n, k) of matrix products: large ones, and with one short dimension
    "cpu": ((512, 1024, 1024), (512, 512, 512), (64, 1024, 1024), (512, 1024, 128)),
    "cuda": ((8192, 8192, 8192), (8192, 4096, 1024), (4096, 1024, 4096), (16384, 768, 768)),
}


def calibrate(device: torch.device, comm: Comm | None = None, backend: str = "") -> Device:
    """Measure ``device``, and the links of ``comm`` if there is one. Collective over ``comm``.

    All ranks compute at once, as in training: where they share a processor they share its speed.
    Every rank returns what the slowest of them measured for compute, with all ranks on one host;
    links are assumed where there are no other ranks.
    """
    cpu, dtype = device.type == "cpu", "float32" if device.type == "cpu" else "bfloat16"
    clock = _StepClock(device, comm)
    flops, ramp = _matmuls(clock, getattr(torch, dtype))
    rates = [flops, _attention(clock, getattr(torch, dtype)), _bandwidth(clock)]
    rates = clock.slowest([*rates, 1 / _kernel_s(clock), _fresh(clock) if cpu else 0.0])
    flops, attention, bandwidth, kernels, fresh = rates
    link, contention = Link(1e9, 1e-4), 0.0
    if comm is not None:
        link = link_of(measure_links(comm, device, backend, _LINK_BYTES))
        contention = -clock.slowest([-_contention(clock, comm)])[0]
    return Device(
        key="this-machine",
        title="this host's CPU" if cpu else torch.cuda.get_device_name(device),
        flops={dtype: flops},
        sustained=1.0,
        attention={"flash2": attention / flops},
        memory_bytes=host_total_bytes() if cpu else torch.cuda.mem_get_info(device)[1],
        bandwidth=bandwidth,
        power_w=100,
        host_link=bandwidth,
        per_host=1 if comm is None else comm.size,
        inside=link,
        between=link,
        context_bytes=0,
        assumed=() if comm is not None else ("inside", "between"),
        origin="measured by fullshard calibrate",
        cpu=cpu,
        fresh=fresh or None,
        constants=replace(
            fitted_constants(),
            **dict.fromkeys(_MEASURED_SHARES, 1.0),
            matmul_ramp=ramp,
            contention=max(0.0, contention),
            kernel_s=1 / kernels,
            step_s=20 / kernels,
            straggle_s=0.0,
        ),
    )


def link_of(links: Links) -> Link:
    """Return bytes/s and latency by the line through the first and the last size that was timed."""
    small, large = links.times[0], links.times[-1]
    part = (links.ranks - 1) / links.ranks
    spent = max(large.gather_s - small.gather_s, 1e-9)
    bandwidth = (large.full_bytes - small.full_bytes) * part / spent
    return Link(bandwidth, max(small.gather_s - small.full_bytes * part / bandwidth, 1e-6))


class _StepClock(RankClock):
    """Medians of repeated work on a device, begun by all ranks together."""

    def median_s(self, work: Callable[[], object], repeats: int = 7) -> float:
        return statistics.median(self.times_s(work, repeats))

    def slowest(self, rates: list[float]) -> list[float]:
        """Return the least of each rate over the ranks."""
        return [min(column) for column in zip(*self.of_all(rates), strict=True)]


def _matmuls(clock: _StepClock, dtype: torch.dtype) -> tuple[float, float]:
    """Fit the rate of large products, and how short dimensions slow it."""
    points = []
    for m, n, k in _SHAPES[clock.device.type]:
        a = torch.randn(m, k, device=clock.device, dtype=dtype)
        b = torch.randn(k, n, device=clock.device, dtype=dtype)
        out = a @ b
        seconds = clock.median_s(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))  # type: ignore[misc]
        points.append(((1 / m + 1 / n + 1 / k) / 3, seconds / (2.0 * m * n * k)))
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread)
    each = mean_y - slope * mean_x
    least = min(y for _, y in points)
    each = min(max(each, 0.5 * least), least)
    return 1 / each, slope / each


def _attention(clock: _StepClock, dtype: torch.dtype) -> float:
    heads, length, width = (4, 256, 64) if clock.device.type == "cpu" else (32, 4096, 128)
    query = torch.randn(1, heads, length, width, device=clock.device, dtype=dtype)
    query.requires_grad_()

    def both() -> None:
        mixed: Tensor = F.scaled_dot_product_attention(query, query, query, is_causal=True)
        mixed.sum().backward()  # type: ignore[no-untyped-call]

    flops = 3.5 * 2.0 * heads * length * length * width
    return flops / clock.median_s(both, 5)


def _bandwidth(clock: _StepClock) -> float:
    """Return bytes read and written by an element-wise operation, a second."""
    a = torch.ones(_BUFFER_BYTES // 4, device=clock.device)
    b = torch.empty_like(a)
    return 2 * _BUFFER_BYTES / clock.median_s(lambda: torch.mul(a, 2.0, out=b), 5)


def _fresh(clock: _StepClock) -> float:
    """Measure the bytes a second that the system hands out, beyond the time of writing."""
    buffer = FlatBuffer([(_BUFFER_BYTES // 4, torch.float32)], clock.device)
    kept_s = clock.median_s(lambda: buffer.flats[0].fill_(1.0), 5)

    def anew() -> None:
        buffer.release()
        buffer.allocate()
        buffer.flats[0].fill_(1.0)

    return _BUFFER_BYTES / max(clock.median_s(anew, 5) - kept_s, 0.05 * kept_s)


def _kernel_s(clock: _StepClock) -> float:
    small = torch.ones(8, device=clock.device)

    def many() -> None:
        for _ in range(200):
            small.add_(1.0)

    return clock.median_s(many, 5) / 200


def _contention(clock: _StepClock, comm: Comm) -> float:
    """Return how much longer products take during a gather, as a share of its time."""
    size = 1 << 22
    shard = torch.ones(size // comm.size, device=clock.device)
    full = torch.ones(shard.numel() * comm.size, device=clock.device)
    side = 512 if clock.device.type == "cpu" else 4096
    a = torch.randn(side, side, device=clock.device)

    def gather() -> None:
        comm.all_gather([(full, shard)], label="contention").wait()

    alone_s = clock.median_s(gather, 3)
    one_s = clock.median_s(lambda: a @ a, 3)
    count = max(1, round(1.5 * alone_s / one_s))

    def products() -> None:
        for _ in range(count):
            a @ a

    def beside() -> None:
        work = comm.all_gather([(full, shard)], label="contention")
        products()
        work.wait()

    plain_s = clock.median_s(products, 3)
    return min(1.0, max(0.0, (clock.median_s(beside, 3) - plain_s) / alone_s))
