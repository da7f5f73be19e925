# SPDX-License-Identifier: Apache-2.0
"""The decisions about a unit that are made before its parameters are touched."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fullshard.core.errors import NotSupportedError
from fullshard.core.layout import Align
from fullshard.core.strategy import Offload, Precision
from fullshard.torch.comm.ranks import Ranks
from fullshard.torch.unit.extensions import plain_data
from fullshard.torch.unit.sites import ParamSites
from fullshard.torch.unit.streams import has_streams

Values = Callable[[ParamSites], Tensor]
"""Gives the values that a parameter is to have: a full tensor, or one that is sharded alike."""


def own_value(param: ParamSites) -> Tensor:
    """Return the values that the parameter itself has."""
    return plain_data(param.param)


@dataclass(frozen=True)
class Plan:
    """The settings of one unit.

    ``device`` is where it computes. ``reshard_after_forward`` is None if that depends on whether
    the unit turns out to be the root's. ``align``: see `fullshard.core.layout`. A rank may have
    come from the meta device if ``bare_somewhere``, which is the same on all ranks. ``mp_policy``
    is what hooks of tensor classes are told, as the user wrote it.
    """

    ranks: Ranks
    device: torch.device
    reshard_after_forward: bool | None = None
    precision: Precision = field(default_factory=Precision)
    offload: Offload = field(default_factory=Offload)
    values: Values = own_value
    align: Align = "element"
    bare_somewhere: bool = False
    mp_policy: Any = None

    def __post_init__(self) -> None:
        elsewhere = self.offload.to_host and self.device.type not in ("cpu", "meta")
        if elsewhere and not has_streams(self.device):
            raise NotSupportedError(
                f"CPU offload needs streams for its copies, and torch.{self.device.type} has none; "
                "leave offload out, or use a device with streams (CUDA, XPU, ...)"
            )

    @property
    def resting_device(self) -> torch.device:
        """The device of shards, their gradients and the optimizer's state between steps."""
        return torch.device("cpu") if self.offload.to_host else self.device

    @property
    def pin(self) -> bool:
        """True if host memory that a device copies from or to shall be page-locked."""
        return self.offload.to_host and self.offload.pin and has_streams(self.device)
