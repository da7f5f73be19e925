# SPDX-License-Identifier: Apache-2.0
"""Bytes that ranks tell each other: from all to all, to the first, and from the first.

Most messages are short. They travel in one call, each in a place of fixed size with its length; a
further call carries those that are longer.
"""

import torch
from torch import Tensor

from fullshard.torch.comm.protocol import Comm, Parts

_PLACE_BYTES = 256
_SHORT_BYTES = _PLACE_BYTES - 8
_HOST = torch.device("cpu")
_LABEL = "exchange of texts"


def share_bytes(comm: Comm, data: bytes, device: torch.device = _HOST) -> list[bytes]:
    """Return every rank's ``data`` in rank order, on every rank; cheapest for short ones.

    Collective: one all-gather on ``device``, and another one if a message is
    longer than a place.
    """
    sizes, texts = _beginnings(comm, data, device)
    if max(sizes) <= _SHORT_BYTES:
        return texts
    full = Parts(torch.zeros(sum(sizes), dtype=torch.uint8, device=device), sizes)
    comm.all_gather([(full, _tensor(data, device))], label=_LABEL).wait()
    return _split(full)


def gather_bytes(comm: Comm, data: bytes, device: torch.device = _HOST) -> list[bytes]:
    """Return every rank's ``data``, in order, on the first; nothing on others. Collective."""
    sizes, texts = _beginnings(comm, data, device)
    if max(sizes) <= _SHORT_BYTES:
        return texts if comm.rank == 0 else []
    to_first, received = [0] * comm.size, [0] * comm.size
    to_first[0] = len(data)
    if comm.rank == 0:
        received = sizes
    full = Parts(torch.zeros(sum(received), dtype=torch.uint8, device=device), received)
    comm.all_to_all(full, Parts(_tensor(data, device), to_first), _LABEL).wait()
    return _split(full) if comm.rank == 0 else []


def broadcast_bytes(comm: Comm, data: bytes, device: torch.device = _HOST) -> bytes:
    """Return the ``data`` of the first rank. Collective: one broadcast, two of what is long."""
    place = _placed(data, device)
    comm.broadcast([place]).wait()
    size, text = _taken(place.cpu())
    if size <= _SHORT_BYTES:
        return text
    full = torch.zeros(size, dtype=torch.uint8, device=device)
    if comm.rank == 0:
        full = _tensor(data, device)
    comm.broadcast([full]).wait()
    return full.cpu().numpy().tobytes()


def _beginnings(comm: Comm, data: bytes, device: torch.device) -> tuple[list[int], list[bytes]]:
    """Return how long all ranks' data are, and how they begin."""
    places = torch.zeros(comm.size * _PLACE_BYTES, dtype=torch.uint8, device=device)
    comm.all_gather([(places, _placed(data, device))], label=_LABEL).wait()
    taken = [_taken(place) for place in places.cpu().view(comm.size, _PLACE_BYTES)]
    return [size for size, _ in taken], [text for _, text in taken]


def _split(full: Parts) -> list[bytes]:
    return [part.numpy().tobytes() for part in torch.split(full.flat.cpu(), full.numels)]


def _placed(data: bytes, device: torch.device) -> Tensor:
    place = len(data).to_bytes(8, "little") + data[:_SHORT_BYTES]
    return _tensor(place.ljust(_PLACE_BYTES, b"\0"), device)


def _taken(place: Tensor) -> tuple[int, bytes]:
    """Return the length of a message, and the message if it is short."""
    raw = place.numpy().tobytes()
    size = int.from_bytes(raw[:8], "little")
    return size, raw[8 : 8 + min(size, _SHORT_BYTES)]


def _tensor(data: bytes, device: torch.device) -> Tensor:
    if not data:
        return torch.zeros(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
