# SPDX-License-Identifier: Apache-2.0
"""From one command to many ranks: join those that a launcher started, or start some here."""

import logging
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fullshard.core.errors import ConfigurationError, FullshardError
from fullshard.train.config import Config, check_world
from fullshard.train.data import load
from fullshard.train.loop import train
from fullshard.train.world import joined

__all__ = ["default_nproc", "launch", "launcher_environment", "threads_per_rank"]

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launch(config: Config, nproc: int | None = None) -> int:
    """Train as ``config`` says, on the ranks of a launcher or on ``nproc`` local ones.

    Returns the exit status. Raises `ConfigurationError` before any rank is started.
    """
    found = launcher_environment(os.environ, local_only=nproc is not None)
    if found is not None:
        os.environ.update(found)
        check_world(config, int(os.environ["WORLD_SIZE"]))
        with joined() as world:
            train(config, world)
        return 0
    nproc = default_nproc() if nproc is None else nproc
    if nproc < 1:
        raise ConfigurationError(f"--nproc must be at least 1, got {nproc}")
    gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and nproc > gpus:
        raise ConfigurationError(f"--nproc {nproc} ranks need a GPU each, but there are {gpus}")
    check_world(config, nproc)
    load(config)  # only to see that it can be: a missing corpus is refused here, once
    return _start_local(config, nproc)


def default_nproc() -> int:
    """One rank for each GPU; two where there is none, so that there is something to shard over."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 2


def threads_per_rank(nproc: int, cores: int) -> int:
    """Threads for each of ``nproc`` ranks on one machine: together no more than its cores."""
    return max(1, cores // nproc)


def launcher_environment(
    environ: Mapping[str, str], *, local_only: bool = False
) -> dict[str, str] | None:
    """What to add to the environment to join the ranks of torchrun or SLURM; None without either.

    A SLURM task (``srun``) is known by SLURM_PROCID and more than one SLURM_NTASKS. With
    ``local_only`` (an explicit --nproc) SLURM is passed over, so that ranks can be started inside
    of an allocation; under torchrun that is a contradiction and raises `ConfigurationError`.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        missing = [name for name in _TORCHRUN if name not in environ]
        if missing:
            raise ConfigurationError(
                f"a launcher set some of {', '.join(_TORCHRUN)}, but not {', '.join(missing)}: "
                "start with torchrun, or unset them to let fullshard start the ranks"
            )
        if local_only:
            raise ConfigurationError(
                "--nproc starts local ranks, but a launcher has started this one already "
                f"(RANK={environ['RANK']}, WORLD_SIZE={environ['WORLD_SIZE']}): leave --nproc out"
            )
        return {}
    if local_only or "SLURM_PROCID" not in environ or int(environ.get("SLURM_NTASKS", "1")) < 2:
        return None
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ.get("SLURM_STEP_NUM_TASKS", environ["SLURM_NTASKS"]),
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or _first_host(nodes),
        # Any port that all tasks work out alike and that two jobs on one node do not share.
        "MASTER_PORT": environ.get("MASTER_PORT")
        or str(20_000 + int(environ.get("SLURM_JOB_ID", "0")) % 20_000),
    }


def _first_host(nodes: str) -> str:
    """The first host of SLURM's short form: ``gpu[03-05,09],cpu1`` gives ``gpu03``."""
    match = re.match(r"([^,\[]+)(?:\[([0-9]+)[^\]]*\])?", nodes)
    return match[1] + (match[2] or "") if match else "localhost"


def _start_local(config: Config, nproc: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    given = os.environ.get("OMP_NUM_THREADS")
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(nproc, cores or 1)))
    place = "one GPU each" if torch.cuda.is_available() else f"{cores} cores, no GPU"
    source = " (from OMP_NUM_THREADS)" if given else ""
    print(f"starting {nproc} rank{'s'[: nproc > 1]}: {place}, {threads} CPU threads each{source}")
    sys.stdout.flush()
    # What went wrong is shown once, below; elastic would log it again around its own frames.
    logging.disable(logging.ERROR)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.2,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(),
    )
    with tempfile.TemporaryDirectory(prefix="fullshard-") as reports:
        try:
            elastic_launch(settings, _rank_main)(config, reports)
        except ChildFailedError as failed:
            print(f"\n{_first_failure(failed, Path(reports))}", file=sys.stderr)
            return 1
        except SignalException as stopped:
            print("\nfullshard train: interrupted; all ranks have ended", file=sys.stderr)
            return 128 + int(stopped.sigval)
    return 0


def _rank_main(config: Config, reports: str) -> None:
    # Ctrl-C reaches every process of the terminal: ranks just end, the launching one reports.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with joined() as world:
            train(config, world)
    except Exception as error:
        known = isinstance(error, FullshardError)
        text = str(error) if known else traceback.format_exc()
        rank = os.environ["RANK"]
        Path(reports, rank).write_text(f"{time.time_ns()}\n{text}", encoding="utf-8")
        # One failing rank makes the others fail at their next collective. The wait lets the
        # launcher see one that was killed, and wrote no report, before those that noticed.
        time.sleep(0.5)
        os._exit(1)


def _first_failure(failed: ChildFailedError, reports: Path) -> str:
    """What to show: the earliest report of a rank, or how a rank without a report ended."""
    rank, first = failed.get_first_failure()
    found = [(path.read_text(encoding="utf-8").split("\n", 1), path) for path in reports.iterdir()]
    if found and first.exitcode > 0:
        (_, text), path = min(found, key=lambda report: int(report[0][0]))
        return f"fullshard train: rank {path.name} failed: {text}"
    return f"fullshard train: rank {rank} ended with exit code {first.exitcode}: {first.message}"
