# SPDX-License-Identifier: Apache-2.0
"""The ranks that share a unit, made from a process group, a mesh, or nothing."""

import os
import sys
import warnings
import weakref
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.core.errors import ConfigurationError, UsageError
from fullshard.core.strategy import Sharding
from fullshard.torch.comm.checked import checked_in_debug_mode
from fullshard.torch.comm.compressed import CommunicationCompression, CompressedComm
from fullshard.torch.comm.hierarchical import hierarchical_between_hosts
from fullshard.torch.comm.process_group import ProcessGroupComm, forget_destroyed
from fullshard.torch.comm.protocol import Comm, SoloComm
from fullshard.torch.comm.sibling_groups import backend_of

_OneGroup = dist.ProcessGroup | DeviceMesh | Comm | None
Where = _OneGroup | tuple[_OneGroup, _OneGroup]
"""What a caller may name as the ranks to shard over; a pair is (ranks that share slices, ranks that
hold equal slices), a 2-D mesh the same with its axes in the order (replicate, shard)."""

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Communicators are made once for each group: every further one costs connections and memory.
_communicators: "weakref.WeakKeyDictionary[Any, tuple[Comm, DeviceMesh | None]]"
_communicators = weakref.WeakKeyDictionary()
_duplicates: "weakref.WeakKeyDictionary[Comm, Comm]" = weakref.WeakKeyDictionary()
_blocks: "weakref.WeakKeyDictionary[Comm, dict[int, Comm]]" = weakref.WeakKeyDictionary()
_models: "weakref.WeakKeyDictionary[Comm, int]" = weakref.WeakKeyDictionary()
_host_meshes: "weakref.WeakKeyDictionary[Any, dict[int, DeviceMesh]]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Ranks:
    """The ranks that hold the slices of a unit, and those that hold the same slice.

    ``gather`` is the communicator over the group that was named, for everything outside of steps,
    and what ``reduce`` sends through. ``apart``, if there is one, joins the same ranks: it gathers
    in steps, so that gathers and reduces need not queue behind each other. ``replicas`` joins the
    ranks with equal slices. ``block``, if there is one, joins ranks of ``gather`` that together
    keep the whole unit between forward and backward. With ``one_communicator`` gathers of steps go
    through ``gather``, too. Only gathers of steps are compressed, all others are exact.
    Gradients are averaged over slices and replicas.
    """

    gather: Comm
    reduce: Comm
    replicas: Comm
    device_mesh: Any = None
    block: Comm | None = None
    apart: Comm | None = None
    one_communicator: bool = False
    compression: CommunicationCompression | None = None

    @property
    def gather_of_steps(self) -> Comm:
        """The communicator that gathers full parameters for forward and backward."""
        comm = self.gather if self.one_communicator or self.apart is None else self.apart
        return comm if self.compression is None else CompressedComm(comm, self.compression)

    @property
    def mesh_of_slices(self) -> DeviceMesh | None:
        """The mesh of ``gather`` alone: of a hybrid mesh its last dim."""
        mesh: DeviceMesh | None = self.device_mesh
        if mesh is None or mesh.ndim == 1:
            return mesh
        names = mesh.mesh_dim_names
        if names is not None:
            return mesh[names[-1]]
        return DeviceMesh.from_group(mesh.get_group(mesh.ndim - 1), mesh.device_type)

    @cached_property
    def joining(self) -> tuple[Comm, ...]:
        """The communicators of several ranks that together join all."""
        return tuple(comm for comm in (self.gather, self.replicas) if comm.size > 1)

    @property
    def size(self) -> int:
        """The number of ranks that contribute to a gradient."""
        return self.gather.size * self.replicas.size

    @property
    def first(self) -> bool:
        """True on the one rank that speaks for all, and writes files."""
        return self.gather.rank == 0 and self.replicas.rank == 0

    def add_model(self) -> str:
        """Count one more model that these ranks train; say which it is, but of the first one."""
        _models[self.gather] = number = _models.get(self.gather, 0) + 1
        return f" of model {number}" * (number > 1)

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


def ranks_of(where: Where, sharding: Sharding) -> Ranks:
    """Return the ranks that ``where`` stands for, sharing slices, holding replicas, or both.

    Collective over those ranks the first time. Without ``where`` they are the default process
    group, initialised from a launcher's environment if need be; hybrid sharding then shares slices
    within each host. Raises `ConfigurationError` if ``where`` is not a group or does not fit
    ``sharding``, and `UsageError` if there is no group.
    """
    hybrid = sharding.sharded and sharding.replicated
    if hybrid and where is None:
        where = _mesh_of_hosts()
    if isinstance(where, DeviceMesh) and where.ndim == 2 and not hybrid:
        where = _first_dim(where)
    if _is_pair(where) != hybrid:
        raise ConfigurationError(
            "hybrid sharding needs a 2-D DeviceMesh (replicate, shard) or a pair of process groups "
            f"(within, across), other strategies one group; got {where!r} with {sharding}"
        )
    if not sharding.sharded:
        replicas, mesh = _communicator_of(where)
        return Ranks(SoloComm(), SoloComm(), replicas, mesh)
    within, across = _pair_of(where) if hybrid else (where, None)
    comm, mesh = _communicator_of(within)
    apart = _duplicate_of(comm)
    replicas = _communicator_of(across)[0] if hybrid else SoloComm()
    mesh = where if hybrid and isinstance(where, DeviceMesh) else mesh
    return Ranks(comm, comm, replicas, mesh, apart=apart)


def _first_dim(mesh: DeviceMesh) -> Where:
    """Dimension 0 of a 2-D mesh, over which PyTorch's FSDP1 shards if that is not hybrid."""
    names = mesh.mesh_dim_names
    first, other = names if names is not None else ("0", "1")
    warnings.warn(
        f"the strategy is not a hybrid one, so its ranks are those of dim {first!r} of the 2-D "
        f"mesh alone, as in PyTorch: ranks that differ in dim {other!r} exchange nothing (right "
        f"for tensor parallelism). Pass mesh[{first!r}] to say so, or choose HYBRID_SHARD",
        stacklevel=2,
    )
    return mesh.get_group(0) if names is None else mesh[first]


def _is_pair(where: Where) -> bool:
    if isinstance(where, DeviceMesh):
        if where.ndim > 2:
            raise ConfigurationError(
                f"expected a mesh of 1 or 2 dims to shard over, got {where.ndim}: {where}"
            )
        return where.ndim == 2
    return isinstance(where, tuple)


def _pair_of(where: Any) -> tuple[Any, Any]:
    """Return the ranks that share slices, and those with equal ones."""
    return (where.get_group(1), where.get_group(0)) if isinstance(where, DeviceMesh) else where


def _mesh_of_hosts() -> DeviceMesh:
    """Make a mesh whose hosts share slices; ranks of equal number on their hosts are replicas."""
    _init_default_group()
    world = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count())) if world > 1 else 1
    if local < 1 or world % local:
        raise ConfigurationError(
            f"cannot tell which of the {world} ranks share a host (LOCAL_WORLD_SIZE is {local}); "
            "pass a 2-D device_mesh or a pair of process groups"
        )
    device = compute_device(None, torch.device("cpu")).type
    made = _host_meshes.setdefault(dist.group.WORLD, {})
    if local not in made:
        shape = (world // local, local)
        made[local] = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
    return made[local]


def in_blocks(ranks: Ranks, size: int) -> Ranks:
    """Add blocks of ``size`` ranks; raises `ConfigurationError` unless it divides. Collective."""
    gather = ranks.apart or ranks.gather
    if size < 1 or gather.size % size:
        raise ConfigurationError(
            f"reshard_after_forward={size} must divide the {gather.size} ranks that share slices"
        )
    made = _blocks.setdefault(gather, {})
    if size not in made:
        made[size] = gather.block(size)
    return replace(ranks, block=made[size])


def compute_device(
    where: Where, resting: torch.device, wanted: int | torch.device | None = None
) -> torch.device:
    """Choose the device for parameters that lie on ``resting`` now.

    That is ``wanted`` (a number means a GPU) if given; with NCCL, which needs them there, the
    current GPU; otherwise the device where they are. Raises `ConfigurationError` if they are on
    another GPU than the one wanted.
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
    group = _group_of(_pair_of(where)[0] if _is_pair(where) else where)
    if resting.type == "meta":
        resting = torch.device("cpu")
    if (
        group is not None
        and torch.cuda.is_available()
        and backend_of(group, "cuda") == dist.Backend.NCCL
    ):
        return torch.device("cuda", torch.cuda.current_device())
    return resting


def _communicator_of(where: Any) -> tuple[Comm, DeviceMesh | None]:
    """Return the communicator and mesh of the group ``where`` names. Collective at first."""
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
        forget_destroyed(_communicators)
        forget_destroyed(_host_meshes)
        comm, mesh = key, where
        if isinstance(key, dist.ProcessGroup):
            comm = checked_in_debug_mode(hierarchical_between_hosts(ProcessGroupComm(key)))
            if not isinstance(mesh, DeviceMesh):
                mesh = DeviceMesh.from_group(key, compute_device(where, torch.device("cpu")).type)
        _communicators[key] = (comm, mesh if isinstance(mesh, DeviceMesh) else None)
    comm, mesh = _communicators[key]
    return comm, where if isinstance(where, DeviceMesh) else mesh


def _duplicate_of(comm: Comm) -> Comm | None:
    """Return a communicator for gathers of steps beside ``comm``. Collective the first time."""
    if comm.size == 1:
        return None
    if comm not in _duplicates:
        _duplicates[comm] = comm.duplicate()
    return _duplicates[comm]


def _group_of(where: Any) -> dist.ProcessGroup | None:
    """Return the process group that ``where`` means, or None for a `Comm`."""
    if isinstance(where, DeviceMesh):
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
        backend = "cpu:gloo,cuda:nccl"  # offloaded gradients have norms, too
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend)
    if dist.get_rank() == 0:
        world = dist.get_world_size()
        print(f"fullshard: initialised {backend} over {world} ranks", file=sys.stderr)


def compressed(ranks: Ranks, compression: CommunicationCompression | None) -> Ranks:
    """Let the steps of one unit over ``ranks`` gather and reduce as ``compression`` says.

    The sum over replicas, gathers within a block (see `Ranks`), and everything outside of steps
    (state dicts, norms, votes) stay exact. Raises `ConfigurationError` where ranks only sum
    over replicas. A single rank sends nothing, so there is nothing to compress.
    """
    if compression is None:
        return ranks
    if ranks.gather.size == 1:
        if ranks.replicas.size == 1:
            return ranks
        raise ConfigurationError(
            f"compression is of gathers and reduces, and here {ranks.replicas.size} ranks hold all "
            "parameters each and only sum gradients by an all-reduce, which is not compressed; "
            "choose a strategy that shards over several ranks, or leave compression out"
        )
    return replace(ranks, compression=compression, reduce=CompressedComm(ranks.reduce, compression))
