# SPDX-License-Identifier: Apache-2.0
"""What processes of a Gloo world tell of their units, to compare with planned ones."""

from dataclasses import astuple

from support.models import GPT, seeded

from fullshard.torch import MixedPrecisionPolicy, fully_shard
from fullshard.torch.inspection.forecast import cost_of, named_units


def prices_of_units(group, compute, reduce):
    """The name and the `UnitCost` of each unit of a GPT, as a tuple."""
    policy = MixedPrecisionPolicy(compute, reduce)
    model = seeded(GPT)
    for block in model.blocks:
        fully_shard(block, mesh=group, mp_policy=policy)
    fully_shard(model, mesh=group, mp_policy=policy)
    units = named_units(model)
    return [(each.name, astuple(cost_of(each.unit))) for each in units]
