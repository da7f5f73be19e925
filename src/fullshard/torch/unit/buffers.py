# SPDX-License-Identifier: Apache-2.0
"""Flat storage: one allocation for a unit's parameters or gradients, and the views into it.

[Note: Storage identity]
Autograd saves views of the full parameters in forward (a linear layer saves ``weight.t()``) and
reads them in backward. Full parameters must therefore come back in the very storage in which they
were, though its memory was given away in between. A `FlatBuffer` is created once; `allocate` and
`release` resize its storage, and every view made of it stays valid. Nobody may touch a view while
the storage is empty: torch does not check that. The states of `fullshard.torch.unit.unit.Unit` see
to it.
"""

import ctypes
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, lru_cache
from typing import Any

import torch

from fullshard.core.layout import aligned_bytes

Size = tuple[int, torch.dtype]
"""The number of elements of a tensor in a `FlatBuffer`, and their dtype."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in `fullshard.core`: "float32" for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that `dtype_name` names."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class MemorySource:
    """The source of memory for flat buffers on one device, in place of torch's general pool.

    [Note: A pool of their own]
    Units are large, all of the same few sizes, and come and go in every step. Among activations of
    all sizes a free block of a unit is soon cut for something small, and the next unit needs new
    memory from the device. In a `torch.cuda.MemPool` of their own nobody else cuts them. Buffers
    that live from step to step stay out of it and cut nothing either, unless ``everything`` is
    asked for, because all that travels has to lie in the pool.

    A thread's allocations go to a pool while `torch.cuda.use_mem_pool` is entered: also those of
    ``resize_``, which asks the allocator that made the storage, on the current stream. Two threads
    cannot enter one pool at a time.
    """

    _of: "dict[torch.device, MemorySource]" = {}  # noqa: RUF012 - the devices' own, not a default

    is_set: bool = False  # for any device

    def __init__(self, pool: Any, *, everything: bool):
        self.pool = pool
        self.everything = everything

    @classmethod
    def of(cls, device: torch.device) -> "MemorySource | None":
        """Return the source that serves ``device``, if there is one."""
        return cls._of.get(_with_index(device)) if cls._of else None

    def serve(self, device: torch.device) -> None:
        """Serve flat buffers on ``device`` from now on; those that have memory keep it."""
        self._of[_with_index(device)] = self
        MemorySource.is_set = True

    @classmethod
    def taking(cls, device: torch.device, *, anew: bool) -> AbstractContextManager[None]:
        """Route this thread's allocations to the pool; ``anew``: for a new buffer, not a resize."""
        source = cls.of(device)
        if source is None or (anew and not source.everything):
            return nullcontext()
        return _entered(source.pool, device)


_entering = threading.Lock()


@contextmanager
def _entered(pool: Any, device: torch.device) -> Iterator[None]:
    with _entering, torch.cuda.use_mem_pool(pool, device):
        yield


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


# [Note: Huge pages]
# The C library gives blocks of 32 MiB and more back to the system when they are released, and each
# gather then touches new memory: a page fault for every 4 KiB. Writing 100 MB took 57 ms so, where
# it takes 11 in memory that was kept. Linux gives pages of 2 MiB to who asks for them: 17 ms.
_PAGE_BYTES, _LARGE_BYTES, _MADV_HUGEPAGE = 2**12, 2**25, 14
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _ask_for_huge_pages(address: int, size: int) -> None:
    """Advise the kernel to use huge pages; nothing depends on it."""
    if _libc is not None:
        begin = -(-address // _PAGE_BYTES) * _PAGE_BYTES
        whole = (address + size - begin) // _PAGE_BYTES * _PAGE_BYTES
        _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(whole), _MADV_HUGEPAGE)


@lru_cache(maxsize=1024)
def _composition(
    sizes: tuple[Size, ...],
) -> tuple[int, torch.dtype, list[int]]:
    """A buffer's bytes, the dtype of its memory, and how many elements of that each part takes."""
    taken = [aligned_bytes(numel * dtype.itemsize) for numel, dtype in sizes]
    dtypes = {dtype for _, dtype in sizes}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    return sum(taken), dtype, [each // dtype.itemsize for each in taken]


class FlatBuffer:
    """Several flat tensors in one storage.

    ``flats`` are 1-D views of the given (numel, dtype), in their order; each begins on 32 bytes.
    ``by_dtype`` is all of it as one tensor, with what lies between, if all have one dtype, else
    ``flats``. Content is undefined at first. ``pin`` asks for page-locked memory.
    """

    def __init__(
        self,
        sizes: Iterable[Size],
        device: torch.device,
        *,
        pin: bool = False,
    ):
        sizes = tuple(sizes)
        self.bytes: int
        self.bytes, dtype, taken = _composition(sizes)
        numel = self.bytes // dtype.itemsize
        if MemorySource.is_set:
            with MemorySource.taking(device, anew=True):
                self._memory = torch.empty(numel, dtype=dtype, device=device, pin_memory=pin)
        else:
            self._memory = torch.empty(numel, dtype=dtype, device=device, pin_memory=pin)
        self._storage = self._memory.untyped_storage()
        self.allocated: bool = True  # the storage has its memory, if it takes any
        self._wants_huge_pages = self.bytes >= _LARGE_BYTES and device.type == "cpu"
        if self._wants_huge_pages:
            _ask_for_huge_pages(self._storage.data_ptr(), self.bytes)
        self.by_dtype: list[torch.Tensor] = [self._memory] if sizes else []
        if len(sizes) == 1:
            whole = sizes[0][0] == numel
            self.flats: list[torch.Tensor] = [
                self._memory if whole else self._memory[: sizes[0][0]]
            ]
            return
        places = self._memory.split_with_sizes(taken)
        self.flats = [
            place.view(each)[:numel] for place, (numel, each) in zip(places, sizes, strict=True)
        ]
        if any(each != dtype for _, each in sizes):
            self.by_dtype = self.flats

    @property
    def memory(self) -> torch.Tensor:
        """All of it as a new 1-D view: of the tensors' dtype, or bytes if they have several."""
        return self._memory.detach()

    @property
    def version(self) -> int:
        """Grows when the content is written to, by whichever view."""
        return self._memory._version

    def zero_(self) -> None:
        """Fill the memory with zeros, what lies between the tensors too."""
        self._memory.zero_()

    def allocate(self) -> None:
        """Get the memory; its content is undefined."""
        if self.allocated:
            return
        storage = self._storage
        if MemorySource.is_set:
            with MemorySource.taking(storage.device, anew=False):
                storage.resize_(self.bytes)
        else:
            storage.resize_(self.bytes)
        self.allocated = True
        if self._wants_huge_pages:
            _ask_for_huge_pages(storage.data_ptr(), self.bytes)

    def release(self) -> None:
        """Give the memory back; views stay, and must not be touched until it is allocated again."""
        if self.allocated and self.bytes:
            self.allocated = False
            self._storage.resize_(0)

    @torch.no_grad()
    def take_memory_anew(self) -> None:
        """Move the content to memory from where buffers get it now; views move with it."""
        if not self.allocated:
            return
        kept = [flat.clone() for flat in self.flats]
        self.release()
        self.allocate()
        for flat, value in zip(self.flats, kept, strict=True):
            flat.copy_(value)


def lie_alike(sizes: Sequence[Size], others: Sequence[Size]) -> bool:
    """True if elements of buffers of these sizes lie at the same places, of one dtype in each.

    So what is done to all of them can be done to `FlatBuffer.by_dtype`.
    """
    if any(len({dtype for _, dtype in each}) != 1 for each in (sizes, others)):
        return False
    return _composition(tuple(sizes))[2] == _composition(tuple(others))[2]


class Division:
    """Casts a tensor to another's dtype, and divides it there.

    In ``one_pass`` over memory where the dtype is wider; on a CPU torch would make a copy for that.
    """

    def __init__(self, *, one_pass: bool):
        self._one_pass = one_pass
        # To make a tensor of a number takes longer than to divide by it.
        self._scalar, self._vector = cache(_scalar), cache(_vector)

    def __call__(self, to: torch.Tensor, flat: torch.Tensor, divisor: float) -> None:
        """Write ``flat / divisor`` to ``to``, which may be ``flat``."""
        if to is not flat:
            widens = torch.promote_types(to.dtype, flat.dtype) == to.dtype != flat.dtype
            if divisor != 1 and widens and self._one_pass:
                torch.div(flat, self._vector(divisor, to.dtype, to.device), out=to)
                return
            to.copy_(flat)
        if divisor != 1:
            to.div_(self._scalar(divisor, to.dtype))


def _scalar(divisor: float, dtype: torch.dtype) -> torch.Tensor:
    """Return what a tensor of ``dtype`` is divided by, in the dtype in which that is computed."""
    wide = torch.promote_types(dtype.to_real(), torch.float32)
    return torch.full((), divisor, dtype=wide, device="cpu")


def _vector(divisor: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a divisor with a dimension: only then torch divides in its dtype."""
    return torch.full((1,), divisor, dtype=dtype, device=device)
