# SPDX-License-Identifier: Apache-2.0
"""The ranks that save and load a model together, as `fullshard.checkpoint` wants them."""

import weakref
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint.ranks import Ranks, SoloRanks
from fullshard.torch.comm.process_group import ProcessGroupComm
from fullshard.torch.comm.protocol import Comm, Parts
from fullshard.torch.comm.watch.roll_call import call_roll
from fullshard.torch.step.managed import managed_units

__all__ = ["CommRanks", "call_all", "comms_of", "ranks_over"]

_world: "weakref.WeakKeyDictionary[dist.ProcessGroup, Comm]" = weakref.WeakKeyDictionary()


class CommRanks:
    """Ranks that ``comms`` join: of a grid, its rows and then its columns.

    A rank's number is its place among the rows times their length and its place in its row.
    """

    def __init__(self, comms: Sequence[Comm]):
        self._comms = [_on_host(comm) for comm in comms]
        self.rank, self.size = 0, 1
        for comm in self._comms:
            self.rank += self.size * comm.rank
            self.size *= comm.size

    def gather(self, data: bytes) -> list[bytes]:
        """See `fullshard.checkpoint.Ranks.gather`."""
        parts = [data]
        for comm in self._comms:
            joined = _packed(parts)
            parts = [part for each in _gathered(comm, joined) for part in _unpacked(each)]
        return parts if self.rank == 0 else []

    def broadcast(self, data: bytes) -> bytes:
        """See `fullshard.checkpoint.Ranks.broadcast`."""
        for comm in reversed(self._comms):
            data = _broadcast(comm, data)
        return data

    def share(self, data: bytes) -> list[bytes]:
        """See `fullshard.checkpoint.Ranks.share`."""
        if len(self._comms) == 1:
            sizes, texts = _exchanged(self._comms[0], data)
            if max(sizes) <= _SHORT_BYTES:
                return texts
        return _unpacked(self.broadcast(_packed(self.gather(data))))

    def duplicate(self) -> "CommRanks":
        """See `fullshard.checkpoint.Ranks.duplicate`."""
        return CommRanks(self._comms)


def _on_host(comm: Comm) -> Comm:
    return comm.on_host() if isinstance(comm, ProcessGroupComm) else comm.duplicate()


def _packed(parts: Sequence[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _unpacked(data: bytes) -> list[bytes]:
    parts, start = [], 0
    while start < len(data):
        stop = start + 8 + int.from_bytes(data[start : start + 8], "little")
        parts.append(data[start + 8 : stop])
        start = stop
    return parts


# Most messages are short: they travel in one call, in a place of fixed size with their length.
_PLACE_BYTES = 256
_SHORT_BYTES = _PLACE_BYTES - 8
_LABEL = "exchange about a checkpoint"


def _placed(data: bytes) -> torch.Tensor:
    return _tensor(
        (len(data).to_bytes(8, "little") + data[:_SHORT_BYTES]).ljust(_PLACE_BYTES, b"\0")
    )


def _taken(place: torch.Tensor) -> tuple[int, bytes]:
    """The length of a message, and the message if it is short."""
    raw = place.numpy().tobytes()
    size = int.from_bytes(raw[:8], "little")
    return size, raw[8 : 8 + min(size, _SHORT_BYTES)]


def _exchanged(comm: Comm, data: bytes) -> tuple[list[int], list[bytes]]:
    """How long all ranks' data are, and their beginnings."""
    places = torch.zeros(comm.size * _PLACE_BYTES, dtype=torch.uint8)
    comm.all_gather([(places, _placed(data))], label=_LABEL).wait()
    found = [_taken(place) for place in places.view(comm.size, _PLACE_BYTES)]
    return [size for size, _ in found], [text for _, text in found]


def _gathered(comm: Comm, data: bytes) -> list[bytes]:
    """All ranks' data on the first one; nothing on the others."""
    sizes, texts = _exchanged(comm, data)
    if max(sizes) <= _SHORT_BYTES:
        return texts if comm.rank == 0 else []
    to_first, received = [0] * comm.size, [0] * comm.size
    to_first[0] = len(data)
    if comm.rank == 0:
        received = sizes
    full = torch.zeros(sum(received), dtype=torch.uint8)
    comm.all_to_all(Parts(full, received), Parts(_tensor(data), to_first), _LABEL).wait()
    if comm.rank:
        return []
    ends = accumulate(received)
    return [full[b - n : b].numpy().tobytes() for n, b in zip(received, ends, strict=True)]


def _broadcast(comm: Comm, data: bytes) -> bytes:
    place = _placed(data)
    comm.broadcast([place]).wait()
    size, text = _taken(place)
    if size <= _SHORT_BYTES:
        return text
    full = _tensor(data) if comm.rank == 0 else torch.zeros(size, dtype=torch.uint8)
    comm.broadcast([full]).wait()
    return full.numpy().tobytes()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0).byte()


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


def ranks_over(comms: Sequence[Comm]) -> Ranks:
    """New channels over ``comms``. Collective."""
    return CommRanks(comms) if comms else SoloRanks()


def call_all(comms: Sequence[Comm], what: str) -> None:
    """Wait until all ranks have called ``what``; see `call_roll`."""
    call_roll(list(comms), what, "call it on every rank: each writes and reads its part")
