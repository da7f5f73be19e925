# SPDX-License-Identifier: Apache-2.0
"""A CUDA memory pool for the buffers of units, registered with NCCL if asked for."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.torch.comm.process_group import group_of
from fullshard.torch.comm.protocol import Comm, SoloComm
from fullshard.torch.step.managed import managed_units
from fullshard.torch.unit.buffers import MemorySource
from fullshard.torch.unit.unit import Unit

_making = threading.Lock()  # ranks may be threads on one device


def use_memory_pool(module: nn.Module, *, register_with_nccl: bool = False) -> None:
    """Let units on the GPU of ``module`` keep their buffers in a memory pool of their own.

    Full parameters and full gradients then come from a `torch.cuda.MemPool`, where nothing else is
    allocated. The pool is the device's: units of other models on it use it too. What it has
    reserved goes back to others only when the process ends, so it costs the most that units have
    held at one time.

    With ``register_with_nccl`` the pool's memory is allocated by NCCL and registered with the
    communicators of the module's units, those of later segments too, and shards and reduced
    gradients move into it: collectives may then read and write buffers in place (NVLink SHARP,
    InfiniBand SHARP) and need fewer multiprocessors. Collective in that case; models sharded later
    need a call of their own.

    Call it between steps, best after sharding and before the first one. Raises `UsageError` in the
    middle of a step, without units, or if the device's pool was made without NCCL's memory before;
    `NotSupportedError` on a device other than a GPU, and if what ranks communicate through cannot
    register memory. Nothing has changed then.
    """
    found = list(managed_units(module))
    if not found:
        raise UsageError(f"{type(module).__name__} holds no sharded unit; shard it first")
    if any(managed.in_step for managed in found):
        raise UsageError("use_memory_pool moves buffers: call it between steps, not within one")
    units = [managed.unit for managed in found]
    device = units[0].device
    if device.type != "cuda":
        raise NotSupportedError(
            f"use_memory_pool is for GPUs: unit {units[0].name!r} computes on {device}, whose "
            "allocator knows no pools"
        )
    if register_with_nccl:
        _register(units, device)
    else:
        _source(device, None)


def _register(units: Sequence[Unit], device: torch.device) -> None:
    comms = _communicators(units)
    backends = [_registering_backend(comm, device) for comm in comms]
    source = MemorySource.of(device)
    if source is not None and not source.everything:
        raise UsageError(
            f"the memory pool of {device} was made without register_with_nccl; ask for it in the "
            "first call of use_memory_pool"
        )
    if not backends:
        raise NotSupportedError(
            "register_with_nccl=True, but one rank alone communicates with nobody; leave it out"
        )
    try:
        allocator = backends[0].mem_allocator
    except RuntimeError as error:  # of a driver or machine that cannot share memory so
        raise NotSupportedError(
            f"register_with_nccl=True, but NCCL has no memory to give here: {error}; leave it out"
        ) from error
    for comm in comms:
        # NCCL makes its communicators at their first collective, and registers with one it has.
        comm.all_reduce([torch.zeros(1, device=device)]).wait()
    source = _source(device, allocator)
    for backend in backends:
        backend.register_mem_pool(source.pool)
    for unit in units:
        if unit.shards.device.type == device.type:  # others rest on the host, or nowhere yet
            unit.shards.buffer.take_memory_anew()


def _source(device: torch.device, allocator: Any) -> MemorySource:
    """Return the pool of ``device``; make it, with NCCL's ``allocator``, if there is none."""
    with _making:
        source = MemorySource.of(device)
        if source is None:
            with torch.cuda.device(device):
                pool = torch.cuda.MemPool(allocator)
            source = MemorySource(pool, everything=allocator is not None)
            source.serve(device)
        return source


def _communicators(units: Sequence[Unit]) -> list[Comm]:
    """List the communicators of units, each once, in one order on all ranks."""
    found: dict[Any, Comm] = {}
    for unit in units:
        ranks = unit.ranks
        for comm in (ranks.gather_of_steps, ranks.reduce, ranks.block, ranks.replicas):
            if comm is not None and not isinstance(comm, SoloComm):
                found[group_of(comm) or comm] = comm
    return list(found.values())


def _registering_backend(comm: Comm, device: torch.device) -> Any:
    """Return the backend of ``comm`` that registers memory of ``device``."""
    what, group = f"a {type(comm).__name__}", group_of(comm)
    if group is not None:
        try:
            backend = group._get_backend(device)
        except RuntimeError:
            backend = None
        if hasattr(backend, "register_mem_pool"):
            return backend
        what = f"a process group with the backend {dist.get_backend(group)!r}"
    raise NotSupportedError(
        f"register_with_nccl=True, but ranks communicate through {what}, which registers no "
        "memory; that takes NCCL, in a torch whose ProcessGroupNCCL has register_mem_pool"
    )
