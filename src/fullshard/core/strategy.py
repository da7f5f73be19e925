# SPDX-License-Identifier: Apache-2.0
"""What is sharded, for how long, and how far ahead of use it is gathered: as data.

A strategy names what happens on one axis of the mesh. On a *sharded* axis every rank keeps one
slice of parameters, gradients and optimizer state; on a *replicated* axis every rank keeps all of
it and gradients are summed by an all-reduce. ``reshard_after_forward`` says if full parameters are
dropped between forward and backward, at the price of a second gather.
"""

from dataclasses import dataclass
from enum import Enum

from fullshard.core.errors import ConfigurationError

__all__ = ["BackwardPrefetch", "Prefetch", "Sharding", "ShardingStrategy"]


@dataclass(frozen=True)
class Sharding:
    """What one strategy does along its axis; traffic and memory are in units of P parameter bytes.

    ============== ================= ============================ ==========================
    strategy       at rest           moved per rank and step      full parameters held
    ============== ================= ============================ ==========================
    FULL_SHARD     4P/N with AdamW   3 (N-1)/N P                  one unit and the prefetched
    SHARD_GRAD_OP  4P/N              2 (N-1)/N P                  all, forward to backward
    NO_SHARD       4P                2 (N-1)/N P                  all, always
    ============== ================= ============================ ==========================
    """

    sharded: bool
    reshard_after_forward: bool


class ShardingStrategy(Enum):
    """FSDP1's names for the ways to shard; ``.value`` is the `Sharding` each stands for."""

    FULL_SHARD = Sharding(sharded=True, reshard_after_forward=True)
    SHARD_GRAD_OP = Sharding(sharded=True, reshard_after_forward=False)
    NO_SHARD = Sharding(sharded=False, reshard_after_forward=False)


class BackwardPrefetch(Enum):
    """FSDP1's names for when backward gathers the next unit.

    BACKWARD_PRE: before the current unit's backward (overlaps with all of it, one unit more in
    memory). BACKWARD_POST: here the same as none, since a unit's parameters are freed only when its
    backward is over and the next one's begins at once.
    """

    BACKWARD_PRE = "before the backward of the current unit"
    BACKWARD_POST = "after the backward of the current unit"


@dataclass(frozen=True)
class Prefetch:
    """How many units are gathered ahead of use, and how many reduces may be under way at once."""

    forward: int = 1
    backward: int = 1
    reduces_in_flight: int = 1

    def __post_init__(self) -> None:
        for name, least in (("forward", 0), ("backward", 0), ("reduces_in_flight", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ConfigurationError(
                    f"prefetch {name} must be a whole number of at least {least}, got {value!r}"
                )
