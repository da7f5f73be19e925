# SPDX-License-Identifier: Apache-2.0
"""The ranks that measure the links: those of a launcher, or some started here for that."""

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from fullshard.core.errors import CommunicationError, ConfigurationError
from fullshard.distributed import cleanup, get_device, join
from fullshard.doctor.links import Links, measure_links
from fullshard.torch.comm.process_group import ProcessGroupComm

__all__ = ["joined", "measure_locally"]

TIMEOUT_S = 60.0  # for a rank to appear, and for each collective


@contextmanager
def joined() -> Iterator[tuple[ProcessGroupComm, torch.device, str]]:
    """Join the ranks of the launcher, then leave: a communicator, a device, the backend's name.

    Collective. Raises `CommunicationError` if the ranks do not come together within TIMEOUT_S.
    """
    device, backend = get_device(), _backend()
    try:
        join(backend, TIMEOUT_S)
    except RuntimeError as error:
        rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        first_line = str(error).partition("\n")[0]
        raise CommunicationError(
            f"rank {rank} of {size} could not join the others within {TIMEOUT_S:g} s: {first_line}"
        ) from error
    try:
        yield _world(), device, backend
    finally:
        cleanup()


def _world() -> ProcessGroupComm:
    world = dist.group.WORLD
    assert world is not None
    return ProcessGroupComm(world)


def _backend() -> str:
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def measure_locally(
    nproc: int, sizes_bytes: Sequence[int], threads: int, timeout_s: float = 180.0
) -> Links:
    """Start ``nproc`` ranks on this machine, measure between them, end them.

    Raises `CommunicationError` if a rank fails, with its words, or if it takes ``timeout_s``.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else nproc
    if nproc > gpus:
        raise ConfigurationError(f"--nproc {nproc} ranks need a GPU each, but there are {gpus}")
    if nproc < 2:
        raise ConfigurationError(f"links need at least 2 ranks, got --nproc {nproc}")
    with tempfile.TemporaryDirectory(prefix="fullshard-") as folder:
        arguments = (nproc, tuple(sizes_bytes), threads, folder)
        sys.stdout.flush()
        start: Any = start_processes  # has no types
        ranks = start(_rank_main, arguments, nproc, join=False, daemon=True, start_method="spawn")
        deadline = time.monotonic() + timeout_s
        try:
            while not ranks.join(timeout=0.5):
                if time.monotonic() > deadline:
                    raise CommunicationError(
                        f"{nproc} local ranks have not finished within {timeout_s:g} s"
                    )
        except ProcessRaisedException as error:
            lines = str(error).strip().splitlines()
            text = f"rank {error.error_index} failed: {lines[-1]}"
            raise CommunicationError(text) from error
        except ProcessExitedException as error:
            text = f"rank {error.error_index} ended: {error}"
            raise CommunicationError(text) from error
        finally:
            for process in ranks.processes:
                process.kill()
        return Links.of_json(Path(folder, "links").read_text("utf-8"))


def _rank_main(
    rank: int, nproc: int, sizes_bytes: tuple[int, ...], threads: int, folder: str
) -> None:
    torch.set_num_threads(threads)
    device, backend = torch.device("cpu"), _backend()
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=Path(folder, "store").as_uri(),  # a file, so that no port is needed
        rank=rank,
        world_size=nproc,
        timeout=timedelta(seconds=TIMEOUT_S),
        device_id=device if backend == "nccl" else None,
    )
    links = measure_links(_world(), device, backend, sizes_bytes)
    if rank == 0:
        Path(folder, "links").write_text(json.dumps(dataclasses.asdict(links)), encoding="utf-8")
    dist.destroy_process_group()
