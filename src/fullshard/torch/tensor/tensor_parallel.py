# SPDX-License-Identifier: Apache-2.0
"""Parameters that are DTensors on a tensor axis, as `parallelize_module` makes them.

A unit lays out the part that this rank holds of such a parameter. Inside forward the module sees a
DTensor again, made of the gathered elements, and its gradient is a DTensor, too. Outside, the
parameter has the shape of the whole, and global results are global over both axes.
"""

import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fullshard.core.errors import NotSupportedError
from fullshard.torch.comm.checked import checked_in_debug_mode
from fullshard.torch.comm.process_group import ProcessGroupComm, forget_destroyed
from fullshard.torch.comm.protocol import Comm

_communicators: "weakref.WeakKeyDictionary[dist.ProcessGroup, Comm]"
_communicators = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class TensorParallel:
    """The cut of a parameter of global ``shape`` and ``stride`` before units cut it further.

    This rank's part is of ``local_shape``; ``comms`` join the ranks that have different parts, dim
    by dim of ``mesh``.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]  # Shard or Replicate
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    local_shape: tuple[int, ...]
    comms: tuple[Comm, ...]

    @property
    def is_of_stacks(self) -> bool:
        """True if parts are whole matrices of a stack, as experts on an axis of their own."""
        return len(self.shape) > 2 and all(
            not isinstance(each, Shard) or each.dim % len(self.shape) < len(self.shape) - 2
            for each in self.placements
        )

    @property
    def first(self) -> bool:
        """True on the one rank of the mesh that speaks for all."""
        return not any(self.mesh.get_coordinate() or ())

    def part_of(self, full: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the global shape."""
        part = full
        for dim, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                chunks = part.chunk(self.mesh.size(dim), placement.dim)
                number = self.mesh.get_local_rank(dim)
                # Dims that are shorter than the mesh leave ranks without anything.
                empty = part.narrow(placement.dim, 0, 0)
                part = chunks[number] if number < len(chunks) else empty
        return part

    def dtensor(self, part: Tensor) -> DTensor:
        """Return the DTensor of which this rank holds ``part``; it shares its memory."""
        return DTensor.from_local(
            part,
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(self.shape),
            stride=self.stride,
        )

    def whole(self, part: Tensor) -> Tensor:
        """Return all parts together as a plain tensor. Collective over the mesh."""
        return self.dtensor(part).full_tensor()

    def part_of_dtensor(self, value: Tensor) -> Tensor:
        """Return this rank's part of a DTensor. Collective if it is placed otherwise."""
        assert isinstance(value, DTensor)
        if value.device_mesh != self.mesh or tuple(value.placements) != self.placements:
            # A gradient may be a sum over ranks that nobody has taken yet.
            value = value.redistribute(self.mesh, self.placements)
        return value.to_local()


def tensor_parallel_of(name: str, param: Tensor) -> TensorParallel | None:
    """Return how a DTensor is cut. Raises `NotSupportedError` but for ``Shard``, ``Replicate``."""
    if not isinstance(param, DTensor):
        return None
    mesh, placements = param.device_mesh, tuple(param.placements)
    if any(type(placement) not in (Shard, Replicate) for placement in placements):
        raise NotSupportedError(
            f"parameter {name!r} is a DTensor placed as {placements}; only Shard and Replicate "
            "can be sharded over further ranks"
        )
    comms = tuple(
        _communicator(mesh.get_group(dim))
        for dim, placement in enumerate(placements)
        if isinstance(placement, Shard)
    )
    return TensorParallel(
        mesh, placements, tuple(param.shape), param.stride(), tuple(held_here(param).shape), comms
    )


def held_here(param: Tensor) -> Tensor:
    """Return the part of a parameter on this rank: a DTensor's local tensor, else all of it."""
    return param.to_local().detach() if isinstance(param, DTensor) else param


def _communicator(group: dist.ProcessGroup) -> Comm:
    if group not in _communicators:
        forget_destroyed(_communicators)
        _communicators[group] = checked_in_debug_mode(ProcessGroupComm(group))
    return _communicators[group]
