# SPDX-License-Identifier: Apache-2.0
"""Writing and reading the weights of a sharded model as one safetensors file, unit by unit."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.core.errors import ConfigurationError, UsageError
from fullshard.core.layout import Span
from fullshard.core.safetensors_format import DTYPE_NAMES as NAMES
from fullshard.core.safetensors_format import (
    Entry,
    FileWriter,
    SliceReader,
    header_of,
    places_in,
)
from fullshard.torch.comm.agreement import verify_agreement
from fullshard.torch.comm.protocol import Comm, Parts, Work
from fullshard.torch.comm.ranks import Ranks
from fullshard.torch.comm.watch.roll_call import call_roll
from fullshard.torch.step.managed import managed_units
from fullshard.torch.tensor.elementwise import count_change
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.tensor.reslice import overlaps
from fullshard.torch.tensor.tensor_parallel import tensor_parallel_of
from fullshard.torch.unit.buffers import dtype_of
from fullshard.torch.unit.sites import clean_name

DTYPE_NAMES = {dtype_of(name): told for name, told in NAMES.items()}
"""The names that files have for dtypes."""

_INSTEAD = "call it on every rank: rank 0 alone touches the file when saving"
PIECE_BYTES = 8 * 2**20  # that pass through host memory at a time


@torch.no_grad()
def save_full_weights(model: nn.Module, path: str | Path) -> None:
    """Write all parameters and buffers of ``model`` to one safetensors file. Collective.

    Names, shapes and values are those of the plain model's ``state_dict()``, so
    ``plain.load_state_dict(safetensors.torch.load_file(path))`` restores it (a tied parameter is
    there under each of its names). A unit's elements go to rank 0 by one call, and it holds two
    units at a time while it writes; other ranks hold their shard of these once more. (Parameters
    that are cut along a tensor axis too are gathered one by one instead.) The file appears at
    ``path`` when it is complete; until then, and never after a failure, ``path.partial`` is there.
    It takes the place of a regular file only.

    Raises:
        ConfigurationError: on all ranks, if rank 0 cannot write the file, or the format cannot hold
            a dtype, or a parameter is on the meta device.
        UsageError: called on some ranks only, see `fullshard.torch.comm.watch.roll_call`.
    """
    entries = Entries(model)
    entries.call_roll("save_full_weights()")
    target = Path(path)
    described = entries_of(entries.values)
    header = header_of(described)
    ends = accumulate((each.size_bytes for each in described.values()), initial=len(header))
    starts = dict(zip(described, ends, strict=False))
    with FileWriter(target, header) if entries.first else nullcontext() as writer:
        # One unit travels while the one before it is written.
        before: _Transfer | None = None
        for transfer in _transfers(entries, starts):
            if before is not None:
                before.finish(writer)
            before = transfer
        if before is not None:
            before.finish(writer)
    failure = writer.failure if writer is not None else None
    entries.raise_together(f"could not write the weights to {target}", failure)


@torch.no_grad()
def load_full_weights(model: nn.Module, path: str | Path) -> None:
    """Read all parameters and buffers of ``model`` from one safetensors file. Collective.

    The file has the names, shapes and dtypes of the plain model's ``state_dict()``, as from
    `save_full_weights` or ``safetensors.torch.save_file``, and every rank can read it. A rank reads
    only its spans, in pieces of at most 8 MiB. (A parameter that is cut along a tensor axis is read
    whole, one at a time.)

    Raises:
        ConfigurationError: on all ranks, if one of them cannot read the file (parts may have been
            loaded) or it does not fit; then nothing has been changed.
        UsageError: called on some ranks only, see `fullshard.torch.comm.watch.roll_call`.
    """
    entries = Entries(model)
    entries.call_roll("load_full_weights()")
    source = Path(path)
    with entries.together(f"cannot load the weights in {source}"):
        places = places_in(source, entries_of(entries.values))
    with entries.together(f"could not read all weights in {source}"), SliceReader(source) as file:
        buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu")
        for name, tensor in entries.values.items():
            _read_into(name, tensor, file, places[name].start, buffer)


class Entries:
    """The parameters and buffers of a model by name, and the ranks that hold parts of them."""

    def __init__(self, model: nn.Module):
        held = model.state_dict(keep_vars=True)
        self.values: dict[str, Tensor] = {clean_name(name): held[name] for name in held}
        for name, tensor in self.values.items():
            if not isinstance(tensor, Tensor):
                raise ConfigurationError(
                    f"{name!r} is a {type(tensor).__name__}, and the file holds tensors only"
                )
            if tensor.dtype not in DTYPE_NAMES:
                raise ConfigurationError(
                    f"{name!r} is {tensor.dtype}, which safetensors cannot hold"
                )
            if tensor.is_meta:
                raise ConfigurationError(
                    f"{name!r} is on the meta device; call to_empty on the model first"
                )
        self.device: torch.device = next(
            (t.device for t in self.values.values()), torch.device("cpu")
        )
        self._ranks = _ranks_of(model)
        owners = [t.ownership for t in self.values.values() if isinstance(t, ShardedParameter)]
        self.shard_comms: list[Comm] = list(dict.fromkeys(owner.comm for owner in owners))
        self._comms = list(dict.fromkeys(comm for owner in owners for comm in owner.comms))
        cuts = dict.fromkeys(o.tensor_parallel for o in owners if o.tensor_parallel is not None)
        self.first: bool = self._ranks.first and all(cut.first for cut in cuts)

    def call_roll(self, what: str, instead: str = _INSTEAD) -> None:
        """Wait until all ranks have called ``what``."""
        comms = [*self._comms, self._ranks.gather, self._ranks.replicas]
        call_roll(comms, what, instead)
        lines = {
            f"entry {number}": f"{name}, {tuple(tensor.shape)} {tensor.dtype}"
            for number, (name, tensor) in enumerate(self.values.items())
        }
        for comm in (self._ranks.gather, self._ranks.replicas):
            verify_agreement(comm, lines, self.device, f"the model's entries in {what}")

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Raise `ConfigurationError` on all ranks if one of them fails within. Collective."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        self.raise_together(what, failure)

    def raise_together(self, what: str, failure: Exception | None) -> None:
        """Raise `ConfigurationError` on all ranks if one of them has a ``failure``. Collective."""
        failed = torch.tensor(float(failure is not None), device=self.device)
        for comm in self._comms:
            comm.all_reduce([failed], "max").wait()
        if self._ranks.any(bool(failed), failed.device):
            detail = failure or "the error is on another rank"
            raise ConfigurationError(f"{what}: {detail}") from failure


def _ranks_of(model: nn.Module) -> Ranks:
    """Return the ranks of the first unit of ``model``; which rank writes follows from them."""
    for managed in managed_units(model):
        return managed.unit.ranks
    raise UsageError(f"{type(model).__name__} holds no sharded unit; shard it first")


# -- writing -------------------------------------------------------------------------------------


@dataclass
class _Transfer:
    """Bytes on their way to the rank that writes them, and their ``places``: (offset, size)."""

    data: Tensor
    places: list[tuple[int, int]]
    work: Work | None = None

    def finish(self, writer: FileWriter | None) -> None:
        if self.work is not None:
            self.work.wait()
        if writer is None:
            return
        for (start, _), part in zip(
            self.places, torch.split(self.data, [size for _, size in self.places]), strict=True
        ):
            for number, piece in enumerate(torch.split(part, PIECE_BYTES)):
                writer.write_at(start + number * PIECE_BYTES, piece.cpu().numpy().data)


def _transfers(entries: Entries, starts: Mapping[str, int]) -> Iterator[_Transfer]:
    """Yield all bytes of the file, in flight: those of a unit together. Collective.

    ``starts`` are the entries' places in the file. A transfer that is not for this rank is empty.
    """
    destinations = _destinations(entries)
    units: dict[tuple[Comm, int], dict[str, ShardedParameter]] = {}
    for name, tensor in entries.values.items():
        if isinstance(tensor, ShardedParameter) and tensor.ownership.is_interval:
            owner = tensor.ownership
            units.setdefault((owner.comm, owner.unit), {})[name] = tensor
            continue
        if isinstance(tensor, ShardedParameter):
            tensor = tensor.gathered()
        elif isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if entries.first:
            yield _Transfer(_bytes_of(tensor), [(starts[name], tensor.nbytes)])
    for (comm, _), unit in units.items():
        destination = destinations[comm]
        if destination is not None:  # else the ranks that have these elements write nothing
            yield _sent(comm, unit, starts, destination)


def _destinations(entries: Entries) -> dict[Comm, int | None]:
    """Find the rank of each communicator that writes the file, or None. Collective."""
    found: dict[Comm, int | None] = {}
    for comm in entries.shard_comms:
        rank = torch.tensor(comm.rank if entries.first else -1, device=entries.device)
        comm.all_reduce([rank], "max", label="search for the rank that writes").wait()
        found[comm] = int(rank) if rank >= 0 else None
    return found


def _sent(
    comm: Comm, unit: Mapping[str, ShardedParameter], starts: Mapping[str, int], destination: int
) -> _Transfer:
    """Send this rank's spans of a unit to the one that writes: its bytes, rank by rank."""
    outgoing = torch.cat([_bytes_of(tensor.local) for tensor in unit.values()])
    sent, received = [0] * comm.size, [0] * comm.size
    sent[destination] = outgoing.numel()
    arriving: list[tuple[int, int, int]] = []  # rank, offset and size
    if comm.rank == destination:
        for name, tensor in unit.items():
            owner, item = tensor.ownership, tensor.element_size()
            for rank, start, stop in overlaps(owner.spans, Span(0, owner.numel)):
                arriving.append((rank, starts[name] + start * item, (stop - start) * item))
                received[rank] += arriving[-1][2]
    arriving.sort(key=itemgetter(0))  # of one rank in the order in which it sends them
    data = outgoing.new_empty(sum(received))
    label = f"the unit of {next(iter(unit))!r} for the file"
    work = comm.all_to_all(Parts(data, received), Parts(outgoing, sent), label)
    return _Transfer(data, [(offset, size) for _, offset, size in arriving], work)


def _bytes_of(tensor: Tensor) -> Tensor:
    """View the elements as flat bytes; copies if ``tensor`` is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


# -- reading -------------------------------------------------------------------------------------


def _read_into(name: str, tensor: Tensor, file: SliceReader, start: int, buffer: Tensor) -> None:
    """Fill ``tensor``, or this rank's part of it, from the bytes that begin at ``start``."""
    if isinstance(tensor, ShardedParameter) and tensor.ownership.is_interval:
        begin = start + tensor.span.start * tensor.element_size()
        _read_pieces(tensor.local, file, begin, buffer)
        count_change(tensor.local)
    elif isinstance(tensor, ShardedParameter | DTensor):
        full = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="cpu")
        _read_pieces(full, file, start, buffer)
        if isinstance(tensor, ShardedParameter):
            tensor.local.copy_(tensor.ownership.cut(full))
            count_change(tensor.local)
        else:
            of_dtensor = tensor_parallel_of(name, tensor)
            assert of_dtensor is not None
            tensor.to_local().copy_(of_dtensor.part_of(full))
    else:
        _read_pieces(tensor, file, start, buffer)


def _read_pieces(into: Tensor, file: SliceReader, start: int, buffer: Tensor) -> None:
    """Fill ``into`` with consecutive bytes, by way of ``buffer``."""
    in_place = into.is_contiguous()
    flat = into.detach().view(-1) if in_place else into.new_empty(into.numel())
    for part in torch.split(flat, len(buffer) // flat.element_size()):
        piece = buffer[: part.numel() * part.element_size()]
        file.read_into(piece.numpy().data, start)
        start += len(piece)
        part.copy_(piece.view(part.dtype))
    if not in_place:
        into.detach().copy_(flat.view(into.shape))


def entries_of(tensors: dict[str, Tensor]) -> dict[str, Entry]:
    """Describe ``tensors`` for a header; their dtypes must be in `DTYPE_NAMES`."""
    return {
        name: Entry(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
