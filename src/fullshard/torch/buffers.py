# SPDX-License-Identifier: Apache-2.0
"""Flat storage: one allocation for a unit's parameters or gradients, and the views into it.

[Note: Storage identity]
Autograd saves views of the full parameters in forward (a linear layer saves ``weight.t()``) and
reads them in backward. Full parameters must therefore come back in the very storage in which they
were, though its memory was given away in between. A `FlatBuffer` is created once; `allocate` and
`release` resize its storage, and every view made of it stays valid. Nobody may touch a view while
the storage is empty: torch does not check that. The states of `fullshard.torch.unit.Unit` see to
it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fullshard.core.layout import Segment

__all__ = ["FlatBuffer", "dtype_name", "dtype_of"]


def dtype_name(dtype: torch.dtype) -> str:
    """The name that `fullshard.core` knows a dtype by: "float32" for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype that `dtype_name` names."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class FlatBuffer:
    """The segments of a unit in one storage: all of each segment, or one slice of it.

    ``flats`` are 1-D typed views, one for each segment of the layout, in its order. With
    ``full=False`` each is one rank's slice. Content is undefined at first.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device, *, full: bool):
        sizes = [s.full_bytes if full else s.slice_bytes for s in segments]
        self.bytes = sum(sizes)
        memory = torch.empty(self.bytes, dtype=torch.uint8, device=device)
        self._storage = memory.untyped_storage()
        self.flats: list[Tensor] = []
        start = 0
        for segment, size in zip(segments, sizes, strict=True):
            self.flats.append(memory[start : start + size].view(dtype_of(segment.dtype)))
            start += size

    @property
    def allocated(self) -> bool:
        """Whether the storage has its memory now."""
        return self._storage.nbytes() > 0

    def allocate(self) -> None:
        """Get the memory; its content is undefined."""
        if self._storage.nbytes() != self.bytes:
            self._storage.resize_(self.bytes)

    def release(self) -> None:
        """Give the memory back; views stay, and must not be touched until it is allocated again."""
        if self._storage.nbytes() != 0:
            self._storage.resize_(0)
