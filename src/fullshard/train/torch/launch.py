# SPDX-License-Identifier: Apache-2.0
"""From one command to many ranks: join those that a launcher started, or start some here."""

import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fullshard.core.errors import ConfigurationError, FullshardError
from fullshard.distributed import default_nproc
from fullshard.launchers import launcher_environment, threads_per_rank, usable_cores
from fullshard.train.config import Config, check_world
from fullshard.train.data import load
from fullshard.train.torch.loop import train
from fullshard.train.torch.world import joined

__all__ = ["launch"]


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


def _start_local(config: Config, nproc: int) -> int:
    cores = usable_cores()
    given = os.environ.get("OMP_NUM_THREADS")
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(nproc, cores)))
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
