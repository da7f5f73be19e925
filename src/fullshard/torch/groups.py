# SPDX-License-Identifier: Apache-2.0
"""From what a caller names (a process group, a mesh, nothing) to the ranks that share a unit."""

import os
import sys
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.core.errors import ConfigurationError, NotSupportedError, UsageError
from fullshard.torch.comm import Comm, ProcessGroupComm, SoloComm
from fullshard.torch.unit import Ranks

__all__ = ["Where", "compute_device", "ranks_of"]

Where = dist.ProcessGroup | DeviceMesh | Comm | None
"""What a caller may name as the ranks to shard over."""

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Communicators are made once for each group: every further one costs connections and memory.
_communicators: "weakref.WeakKeyDictionary[Any, tuple[Comm, Comm, DeviceMesh | None]]"
_communicators = weakref.WeakKeyDictionary()


def ranks_of(where: Where, *, sharded: bool) -> Ranks:
    """The ranks that ``where`` stands for, sharing slices or (``sharded=False``) holding replicas.

    Collective over those ranks the first time. Without ``where`` it is the default process group,
    which is initialised from a launcher's environment if need be. Raises `ConfigurationError` for
    something that is no group, `UsageError` where there is none to be had.
    """
    gather, reduce, mesh = _communicators_of(where)
    if sharded:
        return Ranks(gather, reduce, SoloComm(), mesh)
    return Ranks(SoloComm(), SoloComm(), reduce, mesh)


def compute_device(
    where: Where, resting: torch.device, wanted: int | torch.device | None = None
) -> torch.device:
    """Where parameters that lie on ``resting`` now are to live.

    On the device ``wanted`` (a number is that of a GPU), else, since NCCL needs them there, on the
    current GPU, else where they are. Raises `ConfigurationError` if they are on another GPU than
    the one wanted.
    """
    if wanted is not None:
        device = torch.device("cuda", wanted) if isinstance(wanted, int) else torch.device(wanted)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if resting.type == "cuda" and resting != device:
            raise ConfigurationError(
                f"device_id names {device}, but the module is on {resting}; call "
                "torch.cuda.set_device first and build the module there or on the CPU"
            )
        return device
    group = _group_of(where)
    if group is not None and dist.get_backend(group) == dist.Backend.NCCL:
        return torch.device("cuda", torch.cuda.current_device())
    return resting


def _communicators_of(where: Where) -> tuple[Comm, Comm, DeviceMesh | None]:
    if not isinstance(where, (dist.ProcessGroup, DeviceMesh, type(None))):
        if not isinstance(where, Comm):
            raise ConfigurationError(
                "expected a process group, a 1-D DeviceMesh or None to shard over, "
                f"got {type(where).__name__}: {where!r}"
            )
        key: Any = where
    else:
        key = _group_of(where)
    if key not in _communicators:
        gather, mesh = key, where
        if isinstance(key, dist.ProcessGroup):
            gather = ProcessGroupComm(key)
            if not isinstance(mesh, DeviceMesh):
                mesh = DeviceMesh.from_group(key, compute_device(where, torch.device("cpu")).type)
        reduce = gather.duplicate() if gather.size > 1 else gather
        _communicators[key] = (gather, reduce, mesh if isinstance(mesh, DeviceMesh) else None)
    return _communicators[key]


def _group_of(where: Where) -> dist.ProcessGroup | None:
    """The process group meant, None for a `Comm`."""
    if isinstance(where, DeviceMesh):
        if where.ndim != 1:
            raise NotSupportedError(
                f"a mesh of {where.ndim} dims is not supported yet; pass a 1-D mesh"
            )
        return where.get_group()
    if where is None:
        _init_default_group()
        return dist.group.WORLD
    return where if isinstance(where, dist.ProcessGroup) else None


def _init_default_group() -> None:
    if dist.is_initialized():
        return
    missing = [name for name in _LAUNCHED if name not in os.environ]
    if missing:
        raise UsageError(
            "no process group to shard over: call torch.distributed.init_process_group first, or "
            f"start the script with torchrun, which sets {', '.join(missing)}, missing here"
        )
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend)
    if dist.get_rank() == 0:
        world = dist.get_world_size()
        print(f"fullshard: initialised {backend} over {world} ranks", file=sys.stderr)
