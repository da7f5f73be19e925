# SPDX-License-Identifier: Apache-2.0
"""Checks of the environment: variables of launchers, and switches that cost time or hang."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from fullshard.doctor.findings import Finding, Severity
from fullshard.doctor.machine.snapshot import Machine
from fullshard.launchers import launcher_environment


def check_environment(machine: Machine) -> list[Finding]:
    """Findings about ``machine.environ``; empty if there is nothing to say."""
    return [*_launcher(machine.environ), *_switches(machine)]


def _launcher(environ: Mapping[str, str]) -> Iterator[Finding]:
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
