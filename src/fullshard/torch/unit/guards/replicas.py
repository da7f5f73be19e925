# SPDX-License-Identifier: Apache-2.0
"""The check that ranks with equal slices start their first step with equal values.

Modules may be initialised after sharding, by generators that each rank has seeded for itself. Ranks
that share slices then have one random value each; but replicas of a slice would differ for ever.
"""

import os
from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fullshard.core.errors import UsageError
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.tensor.checksum import checksum
from fullshard.torch.unit.unit import Unit

SWITCH = "FULLSHARD_CHECK_VALUES"
"""The environment variable that turns comparisons of values off, by 0."""


def check_replicas(units: Sequence[Unit]) -> None:
    """Raise `UsageError` on all ranks if replicas of a slice differ; once a unit. Collective."""
    by_comms: dict[tuple[Comm, Comm], list[Unit]] = {}
    for unit in units:
        if unit.replicas_unchecked:
            unit.replicas_unchecked = False
            if os.environ.get(SWITCH, "1") != "0" and _has_values(unit):
                comms = unit.ranks.replicas, unit.ranks.gather
                by_comms.setdefault(comms, []).append(unit)
    for (replicas, slices), together in by_comms.items():
        params = [param for unit in together for param in unit.sharded]
        device = together[0].device
        mine = torch.stack([checksum(param.local).to(device) for param in params])
        bounds = torch.stack([mine, ~mine])
        replicas.all_reduce([bounds], "max", label="comparison of replicas").wait()
        differing = (bounds[0] != ~bounds[1]).to(torch.int64)
        slices.all_reduce([differing], "max", label="comparison of replicas").wait()
        names = [p.ownership.name for p, differs in zip(params, differing.tolist(), strict=True)
                 if differs]  # fmt: skip
        if names:
            for unit in together:
                unit.replicas_unchecked = True
            more = f" and {len(names) - 5} more" * (len(names) > 5)
            raise UsageError(
                f"replicas of {', '.join(map(repr, names[:5]))}{more} have different values, and "
                "would keep them: after sharding they were initialised by generators that ranks "
                "have seeded differently, or were loaded from different files. Seed alike "
                "(torch.manual_seed(0) on all ranks), or give all ranks the values of one"
            )


def _has_values(unit: Unit) -> bool:
    return bool(unit.sharded) and not isinstance(unit.sharded[0].local, FakeTensor)
