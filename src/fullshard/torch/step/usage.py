# SPDX-License-Identifier: Apache-2.0
"""The parameters that ranks have used in a backward, and if all have stepped since the last.

[Note: Used by nobody]
One process leaves ``.grad`` None where a parameter was not used, and an optimizer passes it over;
zeros instead would let weight decay and momentum change it. A rank cannot know by itself, as others
may have used the parameter, and all have reduced it. So at the end of each backward ranks join
their masks of used parameters, in one small all-reduce in host memory; where nobody has used one,
the zeros that were reduced are taken away again. Optimizers' steps travel along: a rank that has
left one out would keep old values of its slices. Ranks whose group cannot carry host memory (NCCL
alone) would have to wait for the device; there zeros stay.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from fullshard.core.errors import UsageError
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.step.managed import ManagedUnit
from fullshard.torch.unit.guards.optimizer_steps import take_steps
from fullshard.torch.unit.unit import Unit


def settle_usage(units: Sequence[ManagedUnit]) -> None:
    """Join what ranks know of the backward that has ended, and act on it. Collective.

    Raises `UsageError` on all ranks if an optimizer has stepped on some of them only.
    """
    by_ranks: dict[tuple[Comm, ...], list[Unit]] = {}
    for managed in units:
        unit = managed.unit
        if unit.gradients.absent is not None:
            by_ranks.setdefault(unit.ranks.joining, []).append(unit)
    for together in by_ranks.values():
        _settle(together)


def _settle(units: list[Unit]) -> None:
    comms = units[0].ranks.joining
    if not all(map(carries_host_memory, comms)):
        for unit in units:
            unit.gradients.settle(None)
        return
    counts = [len(unit.gradients.trained) for unit in units]
    joined = torch.ones(sum(counts) + 2, dtype=torch.float32, device="cpu")
    for unit, start in zip(units, accumulate(counts, initial=2), strict=False):
        if unit.gradients.absent:
            for index in unit.gradients.absent:
                joined[start + unit.gradients.trained.index(index)] = 0
    steps = max(take_steps(comm) for comm in {unit.ranks.gather for unit in units})
    joined[0], joined[1] = steps, -steps
    for comm in comms:
        comm.all_reduce([joined], "max", label="what the backward used").wait()
    most, least = int(joined[0]), -int(joined[1])
    used = None if bool(joined[2:].all()) else torch.split(joined[2:], counts)
    for number, unit in enumerate(units):
        unit.gradients.settle(None if used is None else used[number].tolist())
    if most != least:
        raise UsageError(
            f"since the backward before this one, optimizers of sharded parameters have made "
            f"{steps} steps on this rank, between {least} and {most} on the ranks. All ranks must "
            "step alike, since each has a part of every parameter: decide on what all ranks know "
            "(fullshard.torch.any_rank, or a gradient norm, which is the same on all)"
        )


def carries_host_memory(comm: Comm) -> bool:
    """Return True if the ranks of ``comm`` can exchange what is in host memory."""
    group = getattr(comm, "group", None)
    if not isinstance(group, dist.ProcessGroup):
        return True
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True
