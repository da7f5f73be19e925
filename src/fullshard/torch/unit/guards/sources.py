# SPDX-License-Identifier: Apache-2.0
"""The check that what experts learn from is what the units around them learn from.

Tokens of all ranks of their mesh reach experts, and gradients are divided by the number of those
ranks. Were other units' gradients means over other ranks, experts would learn too fast or too
slowly beside them, and nothing else would tell.
"""

from collections.abc import Sequence

from fullshard.core.errors import ConfigurationError
from fullshard.torch.unit.unit import Unit


def check_sources(units: Sequence[Unit]) -> None:
    """Raise `ConfigurationError` if units of one model are means over the samples of other ranks.

    No rank asks another one.
    """
    of_experts = {unit.settings.sources: unit for unit in units if unit.settings.sources}
    for sources, experts in of_experts.items():
        for other in units:
            theirs = other.settings.sources or _ranks_of(other)
            if theirs and (not theirs <= sources or _size(other) != len(sources)):
                raise ConfigurationError(
                    f"experts {experts.name!r} get the tokens of ranks {sorted(sources)}, all of "
                    f"the mesh that shard_experts was given, and unit {other.name!r} is sharded "
                    f"over {_size(other)} ranks, here {sorted(theirs)}: give shard_experts a mesh "
                    "of the very ranks over which the modules around the experts are sharded"
                )


def _size(unit: Unit) -> int:
    return len(unit.settings.sources) or unit.ranks.size


def _ranks_of(unit: Unit) -> frozenset[int]:
    """The global ranks that share the unit, of a pair of groups those of the first one."""
    mesh = unit.ranks.device_mesh
    return frozenset() if mesh is None else frozenset(mesh.mesh.flatten().tolist())
