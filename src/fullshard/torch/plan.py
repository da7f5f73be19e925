# SPDX-License-Identifier: Apache-2.0
"""What is decided about a unit before its parameters are touched."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fullshard.core.strategy import Offload, Precision
from fullshard.torch.comm import Comm
from fullshard.torch.extensions import plain_data
from fullshard.torch.modules import ParamSites
from fullshard.torch.options import CommunicationCompression

__all__ = ["Plan", "Ranks", "Values", "own_value"]

Values = Callable[[ParamSites], Tensor]
"""Gives the values that a parameter is to have: a full tensor, or one that is sharded alike."""


def own_value(param: ParamSites) -> Tensor:
    """The values that the parameter itself has."""
    return plain_data(param.param)


@dataclass(frozen=True)
class Ranks:
    """Who holds the slices of a unit, and who holds the same slice.

    ``gather`` and ``reduce`` are communicators over the same ranks, so that gathers and reduces
    need not queue behind each other. ``replicas`` joins the ranks with equal slices. ``block``, if
    there is one, joins ranks among the first that together keep the whole unit between forward and
    backward. ``compressing``, if there is one, gathers in steps; ``gather`` is exact for all else.
    Gradients are averaged over slices and replicas.
    """

    gather: Comm
    reduce: Comm
    replicas: Comm
    device_mesh: Any = None
    block: Comm | None = None
    compressing: Comm | None = None
    compression: CommunicationCompression | None = None

    @property
    def gather_of_steps(self) -> Comm:
        """What gathers full parameters for forward and backward."""
        return self.compressing or self.gather

    @property
    def size(self) -> int:
        """How many ranks contribute to a gradient."""
        return self.gather.size * self.replicas.size

    @property
    def first(self) -> bool:
        """True on the one rank that speaks for all, and writes files."""
        return self.gather.rank == 0 and self.replicas.rank == 0

    def broadcast(self, tensor: Tensor) -> None:
        """Give all ranks the ``tensor`` of the first one, in place. Collective."""
        for comm in (self.replicas, self.gather):
            comm.broadcast([tensor]).wait()

    def any(self, flag: bool, device: torch.device) -> bool:
        """True on every rank if ``flag`` is true on one of them. Collective."""
        raised = torch.tensor(float(flag), device=device)
        for comm in (self.gather, self.replicas):
            comm.all_reduce([raised], "max").wait()
        return bool(raised.item())


@dataclass(frozen=True)
class Plan:
    """How one unit is to be treated.

    ``device`` is where it computes. ``reshard_after_forward`` is None if that depends on whether
    the unit turns out to be the root's.
    """

    ranks: Ranks
    device: torch.device
    reshard_after_forward: bool | None = None
    precision: Precision = field(default_factory=Precision)
    offload: Offload = field(default_factory=Offload)
    values: Values = own_value

    @property
    def resting_device(self) -> torch.device:
        """Where shards, their gradients and the optimizer's state are between steps."""
        return torch.device("cpu") if self.offload.to_host else self.device

    @property
    def pin(self) -> bool:
        """True if host memory that a device copies from or to shall be page-locked."""
        return self.offload.to_host and self.offload.pin and self.device.type == "cuda"
