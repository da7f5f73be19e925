# SPDX-License-Identifier: Apache-2.0
"""Rates of this machine's device and links, measured as a training step uses them."""

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fullshard.core.errors import ConfigurationError, check_new
from fullshard.core.text import write_whole
from fullshard.distributed import get_device
from fullshard.doctor.links import Links, RankClock, joined, measure_links
from fullshard.host_memory import host_total_bytes
from fullshard.launchers import check_nproc, launcher_environment
from fullshard.local_ranks import run_local_ranks
from fullshard.plan.cluster.cluster import Device, Link
from fullshard.plan.cluster.devices import device_of_driver, fitted_constants
from fullshard.plan.record import corrected, device_toml, read_record
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.unit.buffers import FlatBuffer

_LINK_BYTES = (1 << 20, 1 << 24)
_BUFFER_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}  # more than a GPU's cache holds
_PRODUCTS = {"cpu": 1, "cuda": 10}  # in a timed piece: a GPU takes a while to begin the first
_PIECES = {"cpu": 7, "cuda": 150}  # a GPU slows down after some tenths of a second at full power
_ADDITION_S = 7e-6  # of the host to whose runs the constants of GPUs were fitted: see `_kernel_s`
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
    link, contention = None, 0.0
    if comm is not None:
        link = link_of(measure_links(comm, device, backend, _LINK_BYTES))
        contention = -clock.slowest([-_contention(clock, comm)])[0]
    fitted = fitted_constants()
    host = {"kernel_s": fitted.kernel_s / (kernels * _ADDITION_S)}
    if cpu:
        host = {"kernel_s": 1 / kernels, "step_s": 20 / kernels, "straggle_s": 0.0}
    base = _bare_device() if cpu else _listed_device(device, clock)
    share = base.peak(dtype) / flops if dtype in base.flops else 1.0  # to shares of what is reached
    attention *= 1 + base.attention_ramp / _attention_shape(device)[1]
    return replace(
        base,
        title="this host's CPU" if cpu else torch.cuda.get_device_name(device),
        flops={name: rate / share for name, rate in base.flops.items()} | {dtype: flops},
        sustained=1.0,
        attention={name: share * part for name, part in base.attention.items()}
        | {base.sdpa: attention / flops},
        bandwidth=bandwidth,
        host_link=bandwidth if cpu else base.host_link,
        per_host=1 if comm is None else comm.size,
        inside=link or base.inside,
        between=link or base.between,
        assumed=() if link else ("inside", "between"),
        constants=replace(
            fitted,
            **dict.fromkeys(_MEASURED_SHARES, 1.0),
            matmul_ramp=ramp,
            contention=max(0.0, contention),
            **host,
        ),
        fresh=fresh or None,
    )


def _bare_device() -> Device:
    """Return a CPU of which nothing is known but its memory."""
    link = Link(1e9, 1e-4)
    return Device(
        key="this-machine",
        title="",
        flops={},
        sustained=1.0,
        attention={},
        memory_bytes=host_total_bytes(),
        bandwidth=1.0,
        power_w=100,
        host_link=1.0,
        per_host=1,
        inside=link,
        between=link,
        context_bytes=0,
        assumed=(),
        origin="measured by fullshard calibrate",
        cpu=True,
    )


def _listed_device(device: torch.device, clock: "_StepClock") -> Device:
    """Return what the planner's list says of such GPUs, with this one's memory and host link."""
    bare = replace(_bare_device(), cpu=False)
    known = device_of_driver(torch.cuda.get_device_name(device)) or bare
    free, total = torch.cuda.mem_get_info(device)
    return replace(
        known,
        key=bare.key,
        driver="",
        origin=bare.origin,
        memory_bytes=total,
        host_link=clock.slowest([_host_link(clock)])[0],
        context_bytes=total - free - torch.cuda.memory_reserved(device),
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

        def products(a: Tensor = a, b: Tensor = b, out: Tensor = out) -> None:
            for _ in range(_PRODUCTS[clock.device.type]):
                torch.mm(a, b, out=out)

        seconds = (
            clock.median_s(products, _PIECES[clock.device.type]) / _PRODUCTS[clock.device.type]
        )
        points.append(((1 / m + 1 / n + 1 / k) / 3, seconds / (2.0 * m * n * k)))
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread)
    each = mean_y - slope * mean_x
    least = min(y for _, y in points)
    each = min(max(each, 0.5 * least), least)
    return 1 / each, slope / each


def _attention_shape(device: torch.device) -> tuple[int, int, int]:
    """Return heads, tokens and width of a head."""
    return (4, 256, 64) if device.type == "cpu" else (32, 4096, 128)


def _attention(clock: _StepClock, dtype: torch.dtype) -> float:
    heads, length, width = _attention_shape(clock.device)
    query, key, value = (
        torch.randn(1, heads, length, width, device=clock.device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    grad = torch.randn_like(query)

    def both() -> None:
        for _ in range(_PRODUCTS[clock.device.type]):
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            torch.autograd.grad(mixed, (query, key, value), grad)

    flops = 3.5 * 2.0 * heads * length * length * width * _PRODUCTS[clock.device.type]
    return flops / clock.median_s(both, 5)


def _bandwidth(clock: _StepClock) -> float:
    """Return bytes read and written by an element-wise operation, a second."""
    size = _BUFFER_BYTES[clock.device.type]
    a = torch.ones(size // 4, device=clock.device)
    b = torch.empty_like(a)
    return 2 * size / clock.median_s(lambda: torch.mul(a, 2.0, out=b), 5)


def _host_link(clock: _StepClock) -> float:
    """Return bytes a second from page-locked memory of the host to the device."""
    a = torch.ones(_BUFFER_BYTES["cpu"] // 4, pin_memory=True)
    b = torch.empty_like(a, device=clock.device)
    return a.nbytes / clock.median_s(lambda: b.copy_(a, non_blocking=True), 5)


def _fresh(clock: _StepClock) -> float:
    """Measure the bytes a second that the system hands out, beyond the time of writing."""
    size = _BUFFER_BYTES[clock.device.type]
    buffer = FlatBuffer([(size // 4, torch.float32)], clock.device)
    kept_s = clock.median_s(lambda: buffer.flats[0].fill_(1.0), 5)

    def anew() -> None:
        buffer.release()
        buffer.allocate()
        buffer.flats[0].fill_(1.0)

    return size / max(clock.median_s(anew, 5) - kept_s, 0.05 * kept_s)


def _kernel_s(clock: _StepClock) -> float:
    """Measure the time of a small addition, which on a GPU is the host's."""
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


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="fullshard calibrate",
        description="Measure this machine's device and links in about a minute and write what "
        "fullshard plan --device FILE.toml reads. Under torchrun or srun all ranks take part. With "
        "--record nothing is measured: a finished run's tokens/s and memory correct its device.",
    )
    parser.add_argument("--out", type=Path, default=Path("calibration.toml"), metavar="FILE.toml")
    parser.add_argument("--record", type=Path, metavar="RUN.toml", help="of a finished run")
    parser.add_argument("--nproc", type=int, default=1, help="ranks to start on this machine")
    parser.add_argument("--threads", type=int, default=0, help="of each rank on a CPU")
    arguments = parser.parse_args(argv)
    check_nproc(arguments.nproc)
    if not 0 <= arguments.threads <= 4096:
        raise ConfigurationError(
            f"--threads must be 0 (torch's choice) to 4096, got {arguments.threads}"
        )
    target: Path = arguments.out
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise ConfigurationError(
            f"--out must be a file in a folder that is there, got {arguments.out}"
        )
    check_new("--out", target)
    text: str | None
    environment = launcher_environment(os.environ)
    if arguments.record is not None:
        text = device_toml(
            corrected(read_record(arguments.record)), f"corrected by {arguments.record.name}"
        )
    elif environment is not None:
        os.environ.update(environment)
        text = _measured(arguments.threads)
    elif arguments.nproc > 1:
        text = run_local_ranks(_measured, (arguments.threads,), arguments.nproc, 300.0)
    else:
        _set_threads(arguments.threads)
        text = _described(calibrate(get_device()))
    if text is not None:
        write_whole(target, text)
        print(f"{text}\nwritten to {target}: fullshard plan MODEL --device {target}")
    return 0


def _set_threads(threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)


def _measured(threads: int) -> str | None:
    """Measure on all ranks together; None on all but the first."""
    _set_threads(threads)
    with joined() as (comm, device, backend):
        measured = calibrate(device, comm, backend)
        return _described(measured) if comm.rank == 0 else None


def _described(device: Device) -> str:
    return device_toml(device, device.origin)
