# SPDX-License-Identifier: Apache-2.0
"""Strategies as data: what is sharded, for how long, and how far ahead of use it is gathered.

A strategy names what happens on one axis of the mesh. On a *sharded* axis every rank keeps one
slice of parameters, gradients and optimizer state; on a *replicated* axis every rank keeps all of
it and gradients are summed by an all-reduce. ``reshard_after_forward`` says if full parameters are
dropped between forward and backward, at the price of a second gather. On a two-dimensional mesh
ranks share slices along one axis and hold equal slices along the other (hybrid sharding).
"""

from dataclasses import dataclass
from enum import Enum

from fullshard.core.errors import ConfigurationError


@dataclass(frozen=True)
class Sharding:
    """The effect of a strategy along its axis; traffic and memory are in units of P bytes.

    ============== ================= ============================ ==========================
    strategy       at rest           moved per rank and step      full parameters held
    ============== ================= ============================ ==========================
    FULL_SHARD     4P/N with AdamW   3 (N-1)/N P                  one unit and the prefetched
    SHARD_GRAD_OP  4P/N              2 (N-1)/N P                  all, forward to backward
    NO_SHARD       4P                2 (N-1)/N P                  all, always
    ============== ================= ============================ ==========================

    HYBRID_SHARD and _HYBRID_SHARD_ZERO2 are the first two within a group of S ranks (read S for N),
    and add an all-reduce of each rank's P/S gradient bytes over the N/S groups.
    """

    sharded: bool
    reshard_after_forward: bool
    replicated: bool


class ShardingStrategy(Enum):
    """FSDP1's names and numbers for the ways to shard; ``sharding`` is what each stands for.

    Scripts and their configuration files have the numbers: ``ShardingStrategy(1)``.
    """

    FULL_SHARD = 1
    SHARD_GRAD_OP = 2
    NO_SHARD = 3
    HYBRID_SHARD = 4
    _HYBRID_SHARD_ZERO2 = 5
    FULL_SHARD_DP = HYBRID_SHARD  # a name that is in use, though PyTorch never had it

    @property
    def sharding(self) -> Sharding:
        """The sharding that the strategy stands for."""
        return Sharding(
            sharded=self is not ShardingStrategy.NO_SHARD,
            reshard_after_forward=self.name in ("FULL_SHARD", "HYBRID_SHARD"),
            replicated=self.name in ("NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"),
        )


@dataclass(frozen=True)
class Prefetch:
    """The number of units to gather ahead of use, and of reduces in flight at once.

    With ``least_bytes`` there may be more of each, as long as those but the last hold fewer bytes
    together: a link is kept busy by bytes, not by a count of units that may be small.
    """

    forward: int = 1
    backward: int = 1
    reduces_in_flight: int = 1
    least_bytes: int = 0

    def __post_init__(self) -> None:
        limits = {"forward": 0, "backward": 0, "reduces_in_flight": 1, "least_bytes": 0}
        for name, least in limits.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ConfigurationError(
                    f"prefetch {name} must be a whole number of at least {least}, got {value!r}"
                )


@dataclass(frozen=True)
class Precision:
    """In which dtypes a unit computes and reduces, by name; what rests keeps its own dtype.

    ``compute`` is the dtype of full parameters, ``reduce`` that in which gradients travel (None:
    as ``compute``), ``output`` that of what the unit's modules return. They apply to floating-point
    parameters and tensors of 2 to 8 bytes an element; other parameters travel as they rest.
    ``cast_inputs`` casts floating-point inputs of the unit's modules to ``compute``,
    ``cast_root_inputs`` only if the unit is that of the root. With ``keep_low_grads`` gradients
    stay in ``reduce`` at rest, else they are cast to their parameter's dtype.
    """

    compute: str | None = None
    reduce: str | None = None
    output: str | None = None
    cast_inputs: bool = False
    cast_root_inputs: bool = False
    keep_low_grads: bool = False

    def full_dtype(self, dtype: str) -> str:
        """The dtype of full parameters that rest in ``dtype``."""
        return self.compute if self.compute and dtype in _CASTABLE else dtype

    def grad_dtype(self, dtype: str) -> str:
        """The dtype in which gradients of parameters that rest in ``dtype`` travel."""
        return self.reduce if self.reduce and dtype in _CASTABLE else self.full_dtype(dtype)


AS_IT_RESTS = Precision()
"""No change of dtype."""

_CASTABLE = frozenset({"float16", "bfloat16", "float32", "float64"})


@dataclass(frozen=True)
class Offload:
    """The choice of what rests in host memory instead of the device's.

    With ``params``, shards rest there and every gather begins with a copy to the device. With
    ``optimizer`` alone, the device keeps a working shard in the dtype of computation, which is
    brought up to date once after each optimizer step. In both cases gradients end, optimizer state
    lies and the optimizer steps on the host. ``pin`` locks that memory, so that copies overlap.
    """

    params: bool = False
    optimizer: bool = False
    pin: bool = True

    @property
    def to_host(self) -> bool:
        """True if shards rest on the host."""
        return self.params or self.optimizer
