# SPDX-License-Identifier: Apache-2.0
"""From one command to many ranks: join those that a launcher started, or start some here."""

import os
import signal
import sys

import torch

from fullshard.core.errors import CommunicationError
from fullshard.distributed import local_nproc
from fullshard.launchers import launcher_environment, threads_per_rank, usable_cores
from fullshard.local_ranks import run_local_ranks
from fullshard.train.config import Config
from fullshard.train.data import load
from fullshard.train.fits import check_run
from fullshard.train.loop import train
from fullshard.train.signals import COME_AGAIN
from fullshard.train.torch.setup import OPTIONAL, prepare
from fullshard.train.torch.world import joined

__all__ = ["launch"]

GRACE_S = 120.0  # that ranks have to save after a signal


def launch(config: Config, nproc: int | None = None) -> int:
    """Train as ``config`` says, on the ranks of a launcher or on ``nproc`` local ones.

    Returns the exit status. Raises `ConfigurationError` before any rank is started.
    """
    found = launcher_environment(os.environ, local_only=nproc is not None)
    if found is not None:
        os.environ.update(found)
        size = int(os.environ["WORLD_SIZE"])
        check_run(config, size, int(os.environ.get("LOCAL_WORLD_SIZE", size)), _gpu_bytes())
        _train_here(config)
        return 0
    nproc = local_nproc(nproc)
    check_run(config, nproc, nproc, _gpu_bytes())
    load(config)  # only to see that it can be: a missing corpus is refused here, once
    return _start_local(config, nproc)


def _gpu_bytes() -> int | None:
    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def _start_local(config: Config, nproc: int) -> int:
    cores = usable_cores()
    given = os.environ.get("OMP_NUM_THREADS")
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(nproc, cores)))
    place = "one GPU each" if torch.cuda.is_available() else f"{cores} cores, no GPU"
    source = " (from OMP_NUM_THREADS)" if given else ""
    print(f"starting {nproc} rank{'s'[: nproc > 1]}: {place}, {threads} CPU threads each{source}")
    try:
        run_local_ranks(_train_here, (config,), nproc, grace_s=GRACE_S)
    except CommunicationError as error:
        print(f"\nfullshard train: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, SystemExit) as stopped:
        code = int(stopped.code or 0) if isinstance(stopped, SystemExit) else 130
        how = "stopped and saved; --resume goes on" if code == COME_AGAIN else "interrupted"
        print(f"\nfullshard train: {how}; all ranks have ended", file=sys.stderr)
        # Ranks that were not yet training have nothing to save, and end by the signal itself.
        asked = code in (128 + signal.SIGTERM, 128 + signal.SIGUSR1)
        return COME_AGAIN if asked else code
    return 0


def _train_here(config: Config) -> None:
    with joined(ask_hosts=config.model.name in OPTIONAL) as world:
        train(prepare(config, world))
