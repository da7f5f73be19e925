# SPDX-License-Identifier: Apache-2.0
"""Rates of this machine's device and links, measured as a training step uses them."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fullshard.doctor.links.measure import Links, RankClock, measure_links
from fullshard.host_memory import host_total_bytes
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.unit.buffers import FlatBuffer

__all__ = ["Calibration", "calibrate"]

_LINK_BYTES = (1 << 20, 1 << 24)
_BUFFER_BYTES = 1 << 26
_SHAPES = {  # (m, n, k) of matrix products: large ones, and with one short dimension
    "cpu": ((512, 1024, 1024), (512, 512, 512), (64, 1024, 1024), (512, 1024, 128)),
    "cuda": ((8192, 8192, 8192), (8192, 4096, 1024), (4096, 1024, 4096), (16384, 768, 768)),
}


@dataclass(frozen=True)
class Calibration:
    """Measured constants of a machine. Rates are in FLOP/s and bytes/s, times in seconds.

    ``ramp`` is the inner dimension at which a matrix product takes twice its time at full speed.
    ``links`` is None without other ranks; ``contention`` is how much longer compute takes while a
    collective runs. ``fresh`` is the rate at which a CPU's system hands out memory, None on GPUs.
    """

    title: str
    cpu: bool
    dtype: str
    memory_bytes: int
    flops: float
    ramp: float
    attention_flops: float
    bandwidth: float
    kernel_s: float
    contention: float
    links: Links | None
    fresh: float | None = None

    @property
    def link(self) -> tuple[float, float]:
        """Bytes/s and latency of a link, by the two sizes that were timed; zeros without links."""
        if self.links is None:
            return 0.0, 0.0
        small, large = self.links.times[0], self.links.times[-1]
        ranks = self.links.ranks
        moved = (large.full_bytes - small.full_bytes) * (ranks - 1) / ranks
        spent = max(large.gather_s - small.gather_s, 1e-9)
        bandwidth = moved / spent
        latency = small.gather_s - small.full_bytes * (ranks - 1) / ranks / bandwidth
        return bandwidth, max(latency, 1e-6)

    def toml(self, key: str, per_host: int) -> str:
        """Return the calibration as a file that ``--device FILE.toml`` takes."""
        bandwidth, latency = self.link
        assumed = [] if self.links is not None else ["inside", "between"]
        link = (bandwidth or 1e9, latency or 1e-4)
        lines = [
            "# SPDX-License-Identifier: Apache-2.0",
            f"[{key}]",
            f'title = "{self.title}"',
            f"flops = {{ {self.dtype} = {self.flops:.6g} }}",
            "sustained = 1.0",
            f"attention = {{ flash2 = {self.attention_flops / self.flops:.4f} }}",
            f"memory_bytes = {self.memory_bytes}",
            f"bandwidth = {self.bandwidth:.6g}",
            "power_w = 100",
            f"host_link = {self.bandwidth:.6g}",
            f"per_host = {per_host}",
            f"inside = {{ bandwidth = {link[0]:.6g}, latency_s = {link[1]:.6g} }}",
            f"between = {{ bandwidth = {link[0]:.6g}, latency_s = {link[1]:.6g} }}",
            "context_bytes = 0",
            f"cpu = {str(self.cpu).lower()}",
            *([] if self.fresh is None else [f"fresh = {self.fresh:.6g}"]),
            f"assumed = {assumed}".replace("'", '"'),
            'origin = "measured by fullshard calibrate"',
            "",
            f"[{key}.constants]",
            "matmul_share = 1.0",
            f"matmul_ramp = {self.ramp:.6g}",
            "attention_share = 1.0",
            "memory_share = 1.0",
            "inside_share = 1.0",
            "between_share = 1.0",
            f"contention = {self.contention:.4f}",
            f"kernel_s = {self.kernel_s:.6g}",
            f"step_s = {20 * self.kernel_s:.6g}",
            "straggle_s = 0.0",
        ]
        return "\n".join(lines) + "\n"


def calibrate(device: torch.device, comm: Comm | None = None, backend: str = "") -> Calibration:
    """Measure ``device``, and the links of ``comm`` if there is one. Collective over ``comm``.

    All ranks compute at once, as in training: where they share a processor they share its speed.
    Every rank returns what the slowest of them measured for compute.
    """
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    clock = _StepClock(device, comm)
    flops, ramp = _matmuls(clock, dtype)
    rates = [flops, _attention(clock, dtype), _bandwidth(clock), 1 / _kernel_s(clock)]
    rates = clock.slowest([*rates, _fresh(clock) if device.type == "cpu" else 0.0])
    links = None if comm is None else measure_links(comm, device, backend, _LINK_BYTES)
    contention = 0.0 if comm is None else clock.slowest([-_contention(clock, comm)])[0]
    memory = host_total_bytes()
    if device.type == "cuda":
        memory = torch.cuda.mem_get_info(device)[1]
    return Calibration(
        title=torch.cuda.get_device_name(device) if device.type == "cuda" else "this host's CPU",
        cpu=device.type == "cpu",
        dtype=str(dtype).removeprefix("torch."),
        memory_bytes=memory,
        flops=rates[0],
        ramp=ramp,
        attention_flops=rates[1],
        bandwidth=rates[2],
        kernel_s=1 / rates[3],
        contention=max(0.0, -contention),
        links=links,
        fresh=rates[4] or None,
    )


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
