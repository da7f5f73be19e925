# SPDX-License-Identifier: Apache-2.0
"""The ranks that save and load a model together, as `fullshard.checkpoint` wants them."""

import weakref
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch import nn

from fullshard.checkpoint.files import Files
from fullshard.checkpoint.ranks import CheckpointRanks, SoloRanks, packed, unpacked
from fullshard.torch.comm.process_group import ProcessGroupComm
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.comm.texts import broadcast_bytes, gather_bytes, share_bytes
from fullshard.torch.comm.watch.roll_call import call_roll
from fullshard.torch.step.managed import managed_units

_world: "weakref.WeakKeyDictionary[dist.ProcessGroup, Comm]" = weakref.WeakKeyDictionary()


class CommRanks:
    """Ranks that ``comms`` join: of a grid, its rows and then its columns.

    A rank's number is its place among the rows times their length and its place in its row.
    """

    def __init__(self, comms: Sequence[Comm]):
        self._comms = [_on_host(comm) for comm in comms]
        self._aside: CommRanks | None = None
        self.rank: int = 0
        self.size: int = 1
        for comm in self._comms:
            self.rank += self.size * comm.rank
            self.size *= comm.size

    def gather(self, data: bytes) -> list[bytes]:
        parts = [data]
        for comm in self._comms:
            joined = packed(parts)
            parts = [part for each in gather_bytes(comm, joined) for part in unpacked(each)]
        return parts if self.rank == 0 else []

    def broadcast(self, data: bytes) -> bytes:
        for comm in reversed(self._comms):
            data = broadcast_bytes(comm, data)
        return data

    def share(self, data: bytes) -> list[bytes]:
        if len(self._comms) == 1:
            return share_bytes(self._comms[0], data)
        return unpacked(self.broadcast(packed(self.gather(data))))

    def duplicate(self, run: Path, files: Files) -> "CommRanks":
        """See `fullshard.checkpoint.CheckpointRanks.duplicate`; one for all of this one's saves."""
        self._aside = self._aside or CommRanks(self._comms)
        return self._aside


def _on_host(comm: Comm) -> Comm:
    return comm.on_host() if isinstance(comm, ProcessGroupComm) else comm.duplicate()


def comms_of(models: Sequence[nn.Module]) -> list[Comm]:
    """The communicators that join all ranks of the models: none for one process."""
    units = [managed.unit for model in models for managed in managed_units(model)]
    found = {
        tuple(comm for comm in (unit.ranks.gather, unit.ranks.replicas) if comm.size > 1)
        for unit in units
    }
    cut_further = any(
        param.ownership.tensor_parallel is not None for unit in units for param in unit.sharded
    )
    if len(found) == 1 and not cut_further:
        return list(next(iter(found)))
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    # Plain modules, or units that lie on several meshes: everybody.
    group = dist.group.WORLD
    assert group is not None
    if group not in _world:
        _world[group] = ProcessGroupComm(group)
    return [_world[group]]


def ranks_over(comms: Sequence[Comm]) -> CheckpointRanks:
    """New channels over ``comms``. Collective."""
    return CommRanks(comms) if comms else SoloRanks()


def call_all(comms: Sequence[Comm], what: str) -> None:
    """Wait until all ranks have called ``what``; see `call_roll`."""
    call_roll(list(comms), what, "call it on every rank: each writes and reads its part")
