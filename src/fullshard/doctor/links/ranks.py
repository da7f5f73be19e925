# SPDX-License-Identifier: Apache-2.0
"""The ranks that measure the links: those of a launcher, or some started here for that."""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fullshard.core.errors import CommunicationError
from fullshard.distributed import cleanup, get_device, join, local_nproc
from fullshard.doctor.links.measure import Links, measure_links
from fullshard.local_ranks import run_local_ranks
from fullshard.torch.comm.process_group import ProcessGroupComm

TIMEOUT_S = 60.0  # for a rank to appear, and for each collective


@contextmanager
def joined() -> Iterator[tuple[ProcessGroupComm, torch.device, str]]:
    """Join the ranks of the launcher, then leave: a communicator, a device, the backend's name.

    Collective. Raises `CommunicationError` if the ranks do not come together within TIMEOUT_S.
    """
    device = get_device()
    backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    try:
        join(backend, TIMEOUT_S)
    except RuntimeError as error:
        rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        first_line = str(error).partition("\n")[0]
        raise CommunicationError(
            f"rank {rank} of {size} could not join the others within {TIMEOUT_S:g} s: {first_line}"
        ) from error
    try:
        assert dist.group.WORLD is not None
        yield ProcessGroupComm(dist.group.WORLD), device, backend
    finally:
        cleanup()


def measure_locally(
    nproc: int, sizes_bytes: Sequence[int], threads: int, timeout_s: float = 180.0
) -> Links:
    """Measure between ``nproc`` ranks started here. Raises `CommunicationError` if one fails."""
    text = run_local_ranks(
        _measure_here, (tuple(sizes_bytes), threads), local_nproc(nproc), timeout_s
    )
    assert text is not None  # rank 0 returns it, or fails
    return Links.of_json(text)


def _measure_here(sizes_bytes: tuple[int, ...], threads: int) -> str:
    torch.set_num_threads(threads)
    with joined() as (comm, device, backend):
        links = measure_links(comm, device, backend, sizes_bytes)
    return json.dumps(dataclasses.asdict(links))
