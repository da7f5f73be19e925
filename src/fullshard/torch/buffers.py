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

from collections.abc import Iterable

import torch
from torch import Tensor

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
    """Several flat tensors in one storage.

    ``flats`` are 1-D views of the given (numel, dtype), in their order; each begins on 16 bytes if
    those before it end there. Content is undefined at first. ``pin`` asks for page-locked memory.
    """

    def __init__(
        self,
        sizes: Iterable[tuple[int, torch.dtype]],
        device: torch.device,
        *,
        pin: bool = False,
    ):
        sizes = list(sizes)
        self.bytes = sum(numel * dtype.itemsize for numel, dtype in sizes)
        memory = torch.empty(self.bytes, dtype=torch.uint8, device=device, pin_memory=pin)
        self._storage = memory.untyped_storage()
        self.flats: list[Tensor] = []
        start = 0
        for numel, dtype in sizes:
            stop = start + numel * dtype.itemsize
            self.flats.append(memory[start:stop].view(dtype))
            start = stop

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
