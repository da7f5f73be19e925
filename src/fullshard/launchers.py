# SPDX-License-Identifier: Apache-2.0
"""The variables of launchers (torchrun, Open MPI's mpirun, SLURM's srun), and this host's cores.

Nothing here asks a device or a network; `fullshard.distributed` acts on what is found.
"""

import contextlib
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path

from fullshard.core.errors import ConfigurationError

__all__ = [
    "check_nproc", "first_host", "launcher_environment", "local_rank_of", "rank_of",
    "threads_per_rank", "usable_cores",
]  # fmt: skip

_MOST_LOCAL_RANKS = 1024  # on one machine

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FIRST_PORT, _PORTS = 20_000, 20_000


def launcher_environment(
    environ: Mapping[str, str], *, local_only: bool = False
) -> dict[str, str] | None:
    """Return variables to add to ``environ`` to join a launcher's ranks; None without one.

    That is nothing under torchrun; else RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and,
    where it is known, LOCAL_WORLD_SIZE. An Open MPI process is known by OMPI_COMM_WORLD_RANK, a
    SLURM task (``srun``) by SLURM_PROCID, each if there is more than one. Of several launchers the
    innermost counts: torchrun, then Open MPI, then SLURM, in whose allocations the others run.

    With ``local_only`` (an explicit --nproc) SLURM is passed over, so that ranks can be started
    inside of an allocation; under the other two that is a contradiction.

    Raises:
        ConfigurationError: for that contradiction, for variables of torchrun that are there in
            part, and if Open MPI's ranks are on several hosts and MASTER_ADDR is not set.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        missing = [name for name in _TORCHRUN if name not in environ]
        if missing:
            raise ConfigurationError(
                f"a launcher set some of {', '.join(_TORCHRUN)}, but not {', '.join(missing)}: "
                "start with torchrun, or unset them to let fullshard start the ranks"
            )
        if local_only:
            _refuse_nproc(f"RANK={environ['RANK']}, WORLD_SIZE={environ['WORLD_SIZE']}")
        return {}
    if _several(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        if local_only:
            _refuse_nproc(f"OMPI_COMM_WORLD_RANK={environ['OMPI_COMM_WORLD_RANK']}")
        return _from_open_mpi(environ)
    if local_only or not _several(environ, "SLURM_PROCID", "SLURM_NTASKS"):
        return None
    return _from_slurm(environ)


def rank_of(environ: Mapping[str, str]) -> int:
    """Return the rank that a launcher has given this process; 0 without one."""
    return int(_found(environ).get("RANK", "0"))


def local_rank_of(environ: Mapping[str, str]) -> int | None:
    """This process's number among those of its host; None where nobody says."""
    local = _found(environ).get("LOCAL_RANK")
    return None if local is None else int(local)


def first_host(nodes: str) -> str:
    """Return the first host of SLURM's short form: ``gpu[03-05,09],cpu1`` gives ``gpu03``."""
    match = re.match(r"([^,\[]+)(?:\[([0-9]+)[^\]]*\])?", nodes)
    return match[1] + (match[2] or "") if match else "localhost"


def usable_cores() -> int:
    """Return the cores that this process may use; a container's quota counts."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = allowed or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
        if quota != "max":
            cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def threads_per_rank(nproc: int, cores: int) -> int:
    """Threads for each of ``nproc`` ranks on one machine: together no more than its cores."""
    return max(1, cores // nproc)


def _found(environ: Mapping[str, str]) -> Mapping[str, str]:
    try:
        return {**environ, **(launcher_environment(environ) or {})}
    except ConfigurationError:
        return environ  # whoever joins the ranks is told


def _several(environ: Mapping[str, str], rank: str, size: str) -> bool:
    return rank in environ and int(environ.get(size, "1")) > 1


def _refuse_nproc(found: str) -> None:
    raise ConfigurationError(
        "--nproc starts local ranks, but a launcher has started this one already "
        f"({found}): leave --nproc out"
    )


def _from_open_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    size = environ["OMPI_COMM_WORLD_SIZE"]
    local_size = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    address = environ.get("MASTER_ADDR") or ("localhost" if local_size == size else None)
    if address is None:
        raise ConfigurationError(
            f"Open MPI started {size} ranks on several hosts and does not say which host has rank "
            "0: name it, as in mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ..."
        )
    # Both are the same on all ranks of a job and differ between jobs (versions 5 and 4).
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    found = {
        "RANK": environ["OMPI_COMM_WORLD_RANK"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        "MASTER_ADDR": address,
        "MASTER_PORT": environ.get("MASTER_PORT") or _port(zlib.crc32(job.encode())),
    }
    return found if local_size is None else {**found, "LOCAL_WORLD_SIZE": local_size}


def _from_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    found = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ.get("SLURM_STEP_NUM_TASKS", environ["SLURM_NTASKS"]),
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": environ.get("MASTER_PORT") or _port(int(environ.get("SLURM_JOB_ID", "0"))),
    }
    # "4(x2)": four tasks on each of two nodes. With "4,3" hosts differ, and no number is right.
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    equal = re.fullmatch(r"(\d+)(?:\(x\d+\))?", tasks)
    return {**found, "LOCAL_WORLD_SIZE": equal[1]} if equal else found


def _port(job: int) -> str:
    """Any port that all ranks work out alike and that two jobs on one node hardly share."""
    return str(_FIRST_PORT + job % _PORTS)


def check_nproc(nproc: int) -> int:
    """Return ``nproc``, the number of ranks to start here; raise `ConfigurationError` if absurd."""
    if not 1 <= nproc <= _MOST_LOCAL_RANKS:
        limit = "at least 1" if nproc < 1 else f"at most {_MOST_LOCAL_RANKS}"
        raise ConfigurationError(f"--nproc must be {limit}, got {nproc}")
    return nproc
