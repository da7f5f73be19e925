# SPDX-License-Identifier: Apache-2.0
"""Which elements of a parameter each rank holds, and how to speak about it in errors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fullshard.core.layout import Span
from fullshard.torch.comm import Comm

__all__ = ["Ownership"]


@dataclass(frozen=True)
class Ownership:
    """Where the elements of one parameter are: rank r of ``comm`` holds ``spans[r]``.

    ``name`` is the parameter's fully-qualified name, ``shape`` its global shape. The spans tile the
    flattened parameter in rank order; some may be empty.
    """

    name: str
    shape: tuple[int, ...]
    spans: tuple[Span, ...]
    comm: Comm
    device_mesh: DeviceMesh | None = None

    @property
    def span(self) -> Span:
        """The elements that this rank holds."""
        return self.spans[self.comm.rank]

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    def agrees_with(self, other: "Ownership") -> bool:
        """True if element by element both are on the same rank: names do not matter."""
        return self is other or (
            self.spans == other.spans and self.comm is other.comm and self.shape == other.shape
        )

    def cut(self, full: Tensor) -> Tensor:
        """This rank's span of a tensor of the global shape, flattened."""
        return full.reshape(-1)[self.span.start : self.span.stop]

    def reshaped(self, shape: Sequence[int]) -> "Ownership":
        """The same elements in the same order, as a tensor of another shape."""
        return replace(self, shape=tuple(shape))

    def __str__(self) -> str:
        span = self.span
        return (
            f"parameter {self.name!r} of shape {tuple(self.shape)}, of which rank {self.comm.rank} "
            f"of {self.comm.size} holds the flat elements [{span.start}, {span.stop})"
        )
