# SPDX-License-Identifier: Apache-2.0
"""This machine as training will find it: read once, into data that the checks look at."""

import platform
import re
import resource
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fullshard.core.tested import installed_version
from fullshard.launchers import usable_cores

PACKAGES = (
    *("torch", "fullshard", "numpy", "safetensors", "rich"),
    *("transformers", "accelerate", "lightning"),
)


@dataclass(frozen=True)
class Gpu:
    """One CUDA device. ``free_bytes`` is what no process has taken."""

    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Space:
    """A file system's size and what is free of it."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Machine:
    """Facts about one host that checks need; the defaults are a machine without faults.

    ``local_ranks`` is how many ranks run, or would run, on this host; ``world_size`` how many in
    all. A limit is None where there is none. ``packages`` maps a name to its version, None if it is
    not installed. ``hostname_addresses`` and ``master_addresses`` are what the names resolve to.
    """

    packages: Mapping[str, str | None]
    local_ranks: int = 1
    world_size: int = 1
    python: tuple[int, int] = (3, 11)
    environ: Mapping[str, str] = field(default_factory=dict)
    cores: int = 8
    hostname: str = "host"
    hostname_addresses: tuple[str, ...] = ("10.0.0.1",)
    master_addresses: tuple[str, ...] = ("10.0.0.1",)
    interfaces: tuple[str, ...] = ("lo", "eth0")
    backends: tuple[str, ...] = ("gloo", "nccl")
    gpus: tuple[Gpu, ...] = ()
    no_peer_access: tuple[tuple[int, int], ...] = ()
    torch_cuda: str | None = None
    driver: str | None = None
    nccl: str | None = None
    shared_memory: Space | None = None
    disk: Space | None = None
    open_files: int | None = None
    open_files_hard: int | None = None
    locked_bytes: int | None = None

    @property
    def several_hosts(self) -> bool:
        """True if ranks run on other hosts, too."""
        return self.world_size > self.local_ranks


def read_machine(local_ranks: int, world_size: int, environ: Mapping[str, str]) -> Machine:
    """Look at this machine. Starts nothing and talks to no other rank; on GPUs it opens CUDA."""
    gpus = _gpus()
    files = _limit("RLIMIT_NOFILE")
    nccl: Any = torch.cuda.nccl.version  # has no types
    return Machine(
        packages={name: installed_version(name) for name in PACKAGES},
        local_ranks=local_ranks,
        world_size=world_size,
        python=(sys.version_info.major, sys.version_info.minor),
        environ=dict(environ),
        cores=usable_cores(),
        hostname=socket.gethostname(),
        hostname_addresses=_addresses(socket.gethostname()),
        master_addresses=_addresses(environ.get("MASTER_ADDR", socket.gethostname())),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        backends=tuple(_backends()),
        gpus=gpus,
        no_peer_access=_no_peer_access(len(gpus)),
        torch_cuda=torch.version.cuda,
        driver=_driver(Path("/proc/driver/nvidia/version")),
        nccl=".".join(map(str, nccl())) if gpus else None,
        shared_memory=_space("/dev/shm"),
        disk=_space("."),
        open_files=files[0],
        open_files_hard=files[1],
        locked_bytes=_limit("RLIMIT_MEMLOCK")[0],
    )


def facts(machine: Machine) -> dict[str, str]:
    """Describe the machine, good or bad, as names and values for people."""
    known = {
        "host": f"{machine.hostname}, {machine.cores} cores, {platform.system()}",
        "python": ".".join(map(str, machine.python)),
    }
    known |= {name: version for name, version in machine.packages.items() if version}
    for number, gpu in enumerate(machine.gpus):
        known[f"GPU {number}"] = (
            f"{gpu.name}, {_gib(gpu.free_bytes)} of {_gib(gpu.total_bytes)} free, "
            f"compute capability {gpu.capability[0]}.{gpu.capability[1]}"
        )
    if not machine.gpus:
        known["GPU"] = "none"
    versions = {"CUDA of torch": machine.torch_cuda, "driver": machine.driver, "NCCL": machine.nccl}
    known |= {name: version for name, version in versions.items() if version}
    known["backends"] = ", ".join(machine.backends) or "none"
    for name, space in (("/dev/shm", machine.shared_memory), ("disk", machine.disk)):
        if space is not None:
            known[name] = f"{_gib(space.free_bytes)} of {_gib(space.total_bytes)} free"
    files, locked = machine.open_files, machine.locked_bytes
    known["open files"] = "unlimited" if files is None else f"at most {files}"
    known["locked memory"] = "unlimited" if locked is None else _gib(locked)
    return known


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"


def _addresses(host: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def _backends() -> list[str]:
    there = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    return [name for name, is_there in there.items() if is_there]


def _gpus() -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    found = []
    for number in range(torch.cuda.device_count()):
        free_bytes, total_bytes = torch.cuda.mem_get_info(number)
        capability = torch.cuda.get_device_capability(number)
        name = torch.cuda.get_device_name(number)
        found.append(Gpu(name, total_bytes, free_bytes, capability))
    return tuple(found)


def _no_peer_access(count: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs of devices that cannot read each other's memory."""
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    return tuple(pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair))


def _driver(path: Path) -> str | None:
    """Return the version of NVIDIA's kernel module, None without one."""
    try:
        match = re.search(r"\b\d+\.\d+(\.\d+)?\b", path.read_text("utf-8", "replace"))
    except OSError:
        return None
    return match[0] if match else "unknown"


def _space(path: str) -> Space | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return Space(usage.total, usage.free)


def _limit(name: str) -> tuple[int | None, int | None]:
    """Return the soft and the hard limit of this process; None: unlimited."""
    limits = resource.getrlimit(getattr(resource, name))
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return soft, hard
