# SPDX-License-Identifier: Apache-2.0
"""Checks of a machine and its environment: each reads a `Machine` and yields findings."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from fullshard.core.tested import TESTED_TORCH
from fullshard.doctor.findings import Finding, Severity
from fullshard.doctor.machine.snapshot import Machine
from fullshard.launchers import launcher_environment

OLDEST_TORCH, NEWEST_TORCH = (
    tuple(map(int, TESTED_TORCH[place].split(".")[:2])) for place in (0, -1)
)
SHARED_BYTES_PER_RANK = 256 * 2**20
LITTLE_DISK_BYTES = 5 * 2**30
LITTLE_LOCKED_BYTES = 2**30


def check_machine(machine: Machine) -> list[Finding]:
    """Return all findings of all checks; empty for a machine without faults."""
    return [finding for check in MACHINE_CHECKS for finding in check(machine)]


def files_needed(world_size: int) -> int:
    """File descriptors that a rank on Gloo may need.

    Measured with three communicators on 2 to 6 ranks: up to 25 and 5 for each rank. Twice that,
    rounded up, leaves room for data loaders and hybrid sharding's further groups.
    """
    return 128 + 10 * world_size


def _versions(machine: Machine) -> Iterator[Finding]:
    version = machine.packages.get("torch") or ""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return
    number = (int(match[1]), int(match[2]))
    tested = f"{_dotted(OLDEST_TORCH)} to {_dotted(NEWEST_TORCH)}"
    if number < OLDEST_TORCH:
        yield Finding(
            "severe",
            f"torch {version}",
            f"fullshard is tested with torch {tested}; older ones lack calls that it makes.",
            f"pip install 'torch>={_dotted(OLDEST_TORCH)}'",
        )
    elif number > NEWEST_TORCH:
        yield Finding(
            "warning",
            f"torch {version} is newer than what fullshard was tested with ({tested})",
            "It may work; a change in torch's internals would show as an error at start.",
            f"If something odd happens: pip install 'torch=={_dotted(NEWEST_TORCH)}.*'",
        )


def _devices(machine: Machine) -> Iterator[Finding]:
    if machine.driver and not machine.gpus:
        if machine.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "NoDevFiles"):
            why, fix = "CUDA_VISIBLE_DEVICES hides all devices.", "Unset CUDA_VISIBLE_DEVICES."
        elif machine.torch_cuda is None:
            why = f"torch {machine.packages.get('torch')} is built without CUDA."
            fix = "Install the CUDA build of torch that fits the driver (pytorch.org shows which)."
        else:
            why = f"torch's CUDA {machine.torch_cuda} cannot open a device under this driver."
            fix = "Run nvidia-smi; a driver older than torch's CUDA must be updated."
        what = f"an NVIDIA driver ({machine.driver}) but no GPU that torch can use"
        yield Finding("warning", what, f"{why} Training runs on the CPU.", fix)
    if not machine.gpus:
        return
    if machine.local_ranks > len(machine.gpus):
        yield Finding(
            "severe",
            f"{machine.local_ranks} ranks on this host, {len(machine.gpus)} GPUs",
            "Two ranks on one GPU: NCCL refuses them.",
            f"Start at most {len(machine.gpus)} ranks here (--nproc-per-node).",
        )
    if len({(gpu.name, gpu.total_bytes) for gpu in machine.gpus}) > 1:
        yield Finding(
            "warning",
            "GPUs of different kinds: " + ", ".join(gpu.name for gpu in machine.gpus),
            "Shards are equal: the smallest memory limits all, the slowest sets the pace.",
            "Choose equal ones with CUDA_VISIBLE_DEVICES.",
        )
    for number, gpu in enumerate(machine.gpus):
        if gpu.free_bytes < 0.8 * gpu.total_bytes:
            yield Finding(
                "warning",
                f"GPU {number}: {gpu.free_bytes / 2**30:.1f} GiB free of "
                f"{gpu.total_bytes / 2**30:.1f}",
                "Another process holds the rest; this rank runs out of memory before the others.",
                "See nvidia-smi for who; end it, or leave the device out (CUDA_VISIBLE_DEVICES).",
            )
    if min(gpu.capability for gpu in machine.gpus) < (8, 0):
        yield Finding(
            "note",
            "a GPU without bfloat16 in hardware (compute capability below 8.0)",
            "MixedPrecision(param_dtype=torch.bfloat16) is emulated there, and slow.",
            "Use float16 with ShardedGradScaler, or stay in float32.",
        )
    if machine.no_peer_access:
        pairs = ", ".join(f"{a}-{b}" for a, b in machine.no_peer_access)
        yield Finding(
            "warning",
            f"no peer access between GPUs {pairs}",
            "What these send each other goes through host memory, at a fraction of the bandwidth.",
            "See 'nvidia-smi topo -m'; in a virtual machine, ask for devices on one switch.",
        )


def _backends(machine: Machine) -> Iterator[Finding]:
    wanted = "nccl" if machine.gpus else "gloo"
    if wanted not in machine.backends:
        yield Finding(
            "severe",
            f"torch has no {wanted} backend (it has: {', '.join(machine.backends) or 'none'})",
            "Ranks cannot be joined on these devices.",
            "Install a build of torch with torch.distributed, such as the official wheels.",
        )


def _shared_memory(machine: Machine) -> Iterator[Finding]:
    space, wanted_bytes = machine.shared_memory, SHARED_BYTES_PER_RANK * machine.local_ranks
    if space is not None and space.free_bytes < wanted_bytes:
        yield Finding(
            "warning",
            f"/dev/shm: {space.free_bytes / 2**20:.0f} MiB free of "
            f"{space.total_bytes / 2**20:.0f} MiB, for {machine.local_ranks} ranks",
            "DataLoader workers hand batches over in it, NCCL has its buffers there: when it is "
            "full, workers die of a bus error.",
            "docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir with medium Memory "
            "at /dev/shm; else DataLoader(num_workers=0).",
        )


def _limits(machine: Machine) -> Iterator[Finding]:
    needed, limit = files_needed(machine.world_size), machine.open_files
    if limit is not None and limit < needed:
        hard = machine.open_files_hard
        enough = hard is None or hard >= needed
        yield Finding(
            "severe",
            f"at most {limit} open files, {machine.world_size} ranks may need {needed} each",
            "Each rank keeps connections to all others, in several groups: 'Too many open files'.",
            f"ulimit -n {needed if hard is None else hard}, in the shell that starts the ranks."
            if enough
            else f"Raise the hard limit (nofile in limits.conf, LimitNOFILE of a service, docker "
            f"--ulimit nofile={needed}).",
        )
    locked = machine.locked_bytes
    if machine.gpus and locked is not None and locked < LITTLE_LOCKED_BYTES:
        yield Finding(
            "warning" if machine.several_hosts else "note",
            f"at most {locked / 2**20:.2f} MiB of locked memory",
            "NCCL over InfiniBand locks its buffers (ibv_reg_mr fails), and pinned host memory for "
            "offload may be refused.",
            "ulimit -l unlimited; docker run --ulimit memlock=-1; memlock in limits.conf.",
        )


def _cores(machine: Machine) -> Iterator[Finding]:
    ranks, cores = machine.local_ranks, machine.cores
    each = max(1, cores // ranks)
    given = machine.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if ranks > cores:
        yield Finding(
            "warning",
            f"{ranks} ranks on {cores} core{'s'[: cores > 1]}",
            "Ranks take turns; with Gloo each wait of one is a wait of all.",
            f"Start at most {cores} ranks here.",
        )
    elif given.isdigit() and int(given) * ranks > cores:
        yield Finding(
            "warning",
            f"OMP_NUM_THREADS={given} x {ranks} ranks on {cores} cores",
            "More threads than cores slow each other down, often several times.",
            f"export OMP_NUM_THREADS={each}",
        )
    elif not given and ranks > 1 and "RANK" in machine.environ:
        yield Finding(
            "warning",
            f"OMP_NUM_THREADS is not set, for {ranks} ranks on this host",
            f"Each rank starts a thread for every core: {ranks * cores} threads on {cores} cores.",
            f"export OMP_NUM_THREADS={each}",
        )
    elif given == "1" and not machine.gpus and each >= 4:
        yield Finding(
            "note",
            f"OMP_NUM_THREADS=1 with {cores} cores for {ranks} ranks",
            "torchrun sets it so if it is not set; ranks on CPU leave most cores idle.",
            f"export OMP_NUM_THREADS={each}",
        )


def _network(machine: Machine) -> Iterator[Finding]:
    severity: Severity = "severe" if machine.several_hosts else "note"
    own = machine.hostname_addresses
    chosen = any(name in machine.environ for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"))
    fix = (
        f"Give '{machine.hostname}' its real address in DNS or /etc/hosts, or name the interface: "
        "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0"
    )
    if not own:
        yield Finding(
            "warning" if severity == "note" else severity,
            f"the host's name '{machine.hostname}' does not resolve",
            "Gloo binds to the address behind it: it falls back to the loopback interface, on "
            "which other hosts cannot be reached.",
            fix,
        )
    elif all(_is_loopback(address) for address in own) and not chosen:
        yield Finding(
            severity,
            f"the host's name '{machine.hostname}' resolves to {own[0]} only",
            "Gloo binds to that address: good for ranks on this host, not for those on others.",
            fix,
        )
    yield from _interfaces(machine)
    master = machine.environ.get("MASTER_ADDR")
    if master is None:
        return
    if not machine.master_addresses:
        yield Finding(
            "severe",
            f"MASTER_ADDR={master} does not resolve here",
            "Ranks meet at it: this host's wait until they time out.",
            "Use the first host's address as the others see it.",
        )
    elif machine.several_hosts and all(_is_loopback(each) for each in machine.master_addresses):
        yield Finding(
            "severe",
            f"MASTER_ADDR={master} is this host itself, but ranks run on several hosts",
            "Each host waits for the others at its own address until it times out.",
            "Set MASTER_ADDR (torchrun: --rdzv-endpoint) to the first host's address.",
        )


def _interfaces(machine: Machine) -> Iterator[Finding]:
    """GLOO_SOCKET_IFNAME lists names; NCCL_SOCKET_IFNAME prefixes, '=' names, '^' exclusions."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = machine.environ.get(variable, "")
        if not value or value.startswith("^"):
            continue
        exact = variable == "GLOO_SOCKET_IFNAME" or value.startswith("=")
        names = [name.split(":")[0] for name in value.removeprefix("=").split(",") if name]
        found = {
            name: [each for each in machine.interfaces if each == name]
            if exact
            else [each for each in machine.interfaces if each.startswith(name)]
            for name in names
        }
        # NCCL takes those that exist, Gloo fails on the first that does not.
        missing = [name for name, interfaces in found.items() if not interfaces]
        if missing if exact and variable.startswith("GLOO") else len(missing) == len(names):
            yield Finding(
                "severe",
                f"{variable}={value}: there is no interface {', '.join(missing)}",
                "Ranks on this host cannot join the others.",
                f"This host has: {', '.join(machine.interfaces)}.",
            )
        elif machine.several_hosts and all(
            each.startswith("lo") for interfaces in found.values() for each in interfaces
        ):
            yield Finding(
                "severe",
                f"{variable}={value}, but ranks run on several hosts",
                "The loopback interface reaches this host only.",
                f"Name the interface to the other hosts; there are: "
                f"{', '.join(machine.interfaces)}.",
            )


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _disk(machine: Machine) -> Iterator[Finding]:
    if machine.disk is not None and machine.disk.free_bytes < LITTLE_DISK_BYTES:
        free_bytes = machine.disk.free_bytes
        yield Finding(
            "warning",
            f"{free_bytes / 2**30:.2f} GiB of disk free in this folder",
            "A checkpoint with Adam's state takes 12 bytes a parameter (float32): there is room "
            f"for one of {free_bytes / 12e6:,.0f} million.",
            "Free some, or write runs and checkpoints to a larger disk.",
        )


def _dotted(version: tuple[int, ...]) -> str:
    return f"{version[0]}.{version[1]}"


def _launcher(machine: Machine) -> Iterator[Finding]:
    environ = machine.environ
    try:
        launcher_environment(environ)
    except ValueError as error:  # ours, or a number that is none
        what, _, fix = str(error).partition(": ")
        means = "The ranks cannot be joined."
        yield Finding("severe", what, means, fix or "Start with torchrun or srun.")
        return
    if "RANK" in environ:
        yield from _torchrun(environ)
    elif _whole(environ, "SLURM_NTASKS", 1) > 1 and "SLURM_PROCID" not in environ:
        yield Finding(
            "warning",
            f"SLURM gave {environ['SLURM_NTASKS']} tasks, but this is none of them",
            "A line of an sbatch script runs once, on the first host: no other rank starts.",
            "Put srun in front of the command.",
        )


def _torchrun(environ: Mapping[str, str]) -> Iterator[Finding]:
    rank, world_size = _whole(environ, "RANK", -1), _whole(environ, "WORLD_SIZE", -1)
    if not 0 <= rank < world_size:
        yield Finding(
            "severe",
            f"RANK={environ['RANK']} with WORLD_SIZE={environ['WORLD_SIZE']}",
            "Ranks count from 0 to WORLD_SIZE - 1.",
            "Let torchrun set both.",
        )
    local_rank, local_size = (
        _whole(environ, "LOCAL_RANK", 0),
        _whole(environ, "LOCAL_WORLD_SIZE", world_size),
    )
    if "LOCAL_RANK" not in environ and world_size > 1:
        yield Finding(
            "warning",
            "RANK is set and LOCAL_RANK is not",
            "Scripts choose their GPU by LOCAL_RANK: all ranks of a host would take GPU 0.",
            "Start with torchrun, or set LOCAL_RANK for each rank (SLURM: $SLURM_LOCALID).",
        )
    elif not 0 <= local_rank < local_size <= world_size:
        yield Finding(
            "severe",
            f"LOCAL_RANK={environ['LOCAL_RANK']}, LOCAL_WORLD_SIZE="
            f"{environ.get('LOCAL_WORLD_SIZE', '')}, WORLD_SIZE={environ['WORLD_SIZE']}",
            "Local ranks count from 0 to LOCAL_WORLD_SIZE - 1, which is at most WORLD_SIZE.",
            "Let torchrun set all three.",
        )


def _whole(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return the variable as a whole number; -1 if it is not one."""
    text = environ.get(name, str(default)).strip()
    return int(text) if re.fullmatch(r"-?\d+", text) else -1


def _is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


class _Switch(NamedTuple):
    """A variable, by its names, the values that are worth a finding, and the finding's texts."""

    names: str
    means: str
    is_bad: Callable[[str], bool] = _is_on
    severity: Severity = "warning"
    fix: str = ""  # default: unset it
    needs_gpu: bool = True


_SWITCHES = (
    _Switch(
        "NCCL_P2P_DISABLE",
        "GPUs of one host exchange data through host memory, at a fraction of the bandwidth.",
    ),
    _Switch("NCCL_SHM_DISABLE", "GPUs without peer access exchange data through sockets."),
    _Switch(
        "NCCL_IB_DISABLE", "Hosts exchange data over TCP, even where there is InfiniBand or RoCE."
    ),
    _Switch(
        "CUDA_LAUNCH_BLOCKING",
        "The host waits for every kernel: communication no longer runs beside computation.",
    ),
    _Switch(
        "TORCH_NCCL_BLOCKING_WAIT NCCL_BLOCKING_WAIT",
        "wait() blocks the host until the collective is done, so nothing is issued ahead.",
    ),
    _Switch(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING NCCL_ASYNC_ERROR_HANDLING",
        "A collective that fails or times out leaves the other ranks hanging for ever.",
        lambda value: not _is_on(value),
    ),
    _Switch(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "All streams share one queue to the GPU: gathers wait behind computation.",
        lambda value: value.strip() == "1",
        fix="Unset it, except with tensor parallelism that asks for it.",
    ),
    _Switch(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "Every gather allocates and frees device memory, which stops the device.",
    ),
    _Switch(
        "PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF",
        "Units of different sizes fragment the allocator's memory over time.",
        lambda value: "expandable_segments:true" not in value.replace(" ", "").lower(),
        "note",
        "Add expandable_segments:True to it.",
    ),
    _Switch(
        "TORCH_DISTRIBUTED_DEBUG",
        "Every collective is preceded by a check over all ranks: training is much slower.",
        lambda value: value.strip().upper() == "DETAIL",
        needs_gpu=False,
    ),
    _Switch(
        "NCCL_DEBUG",
        "NCCL writes much, TRACE for every call.",
        lambda value: value.strip().upper() in ("INFO", "TRACE"),
        "note",
        "export NCCL_DEBUG=WARN",
    ),
    _Switch(
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
        "torch.load runs whatever code a file holds, even where the script forbids it.",
        needs_gpu=False,
    ),
)


def _switches(machine: Machine) -> Iterator[Finding]:
    for switch in _SWITCHES:
        for name in switch.names.split():
            value = machine.environ.get(name)
            applies = bool(machine.gpus) or not switch.needs_gpu
            if value is not None and applies and switch.is_bad(value):
                fix = switch.fix or f"unset {name}, unless you are looking for a fault."
                yield Finding(switch.severity, f"{name}={value}", switch.means, fix)


MACHINE_CHECKS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    _versions,
    _devices,
    _backends,
    _shared_memory,
    _limits,
    _cores,
    _network,
    _disk,
    _launcher,
    _switches,
)
