# SPDX-License-Identifier: Apache-2.0
"""Exchange between ranks that cut flat tensors one way and want them cut another way."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from fullshard.core.layout import Span, SpansOfRanks
from fullshard.torch.comm.protocol import Comm, Parts

_order = itemgetter(0, 1)  # of pieces: rank, number of the cut


@dataclass(frozen=True)
class Cut:
    """A flat tensor of which each rank holds one interval and wants another.

    Rank r holds the elements ``held[r]`` and wants ``wanted[r]``. The intervals held tile the
    tensor; those wanted may overlap. ``local`` holds this rank's elements.
    """

    local: Tensor
    held: Sequence[Span]
    wanted: Sequence[Span]


def rows_of_ranks(shape: Sequence[int], size: int) -> Sequence[Span]:
    """Return the flat elements that ``Shard(0)`` gives to each of ``size`` ranks.

    These are whole rows, as `torch.chunk` cuts them. A tensor without dims is on every rank, as
    replicated.
    """
    if not shape:
        return [Span(0, 1)] * size
    rows, row_numel = shape[0], math.prod(shape[1:])
    return SpansOfRanks(0, rows * row_numel, -(-rows // size) * row_numel, size)


def overlaps(spans: Sequence[Span], span: Span) -> list[tuple[int, int, int]]:
    """List (rank, start, stop) for each rank of ``spans`` that has elements of ``span``."""
    if isinstance(spans, SpansOfRanks) and spans.slice_numel:
        # Slices are equal: only the ranks in question are looked at, of thousands.
        size, begin = spans.slice_numel, spans.start
        first, last = (begin + span.start) // size, (begin + span.stop - 1) // size
        ranks = range(max(first, 0), min(last, spans.shards - 1) + 1)
        ends = [
            (rank, max(rank * size - begin, span.start), min((rank + 1) * size - begin, span.stop))
            for rank in ranks
        ]
    else:
        ends = [
            (rank, max(each.start, span.start), min(each.stop, span.stop))
            for rank, each in enumerate(spans)
        ]
    return [(rank, start, stop) for rank, start, stop in ends if start < stop]


def longest(spans: Sequence[Span]) -> int:
    """Return how many elements the rank of ``spans`` that has the most may have."""
    if isinstance(spans, SpansOfRanks):
        return min(spans.numel, spans.slice_numel)
    return max(span.stop - span.start for span in spans)


def reslice(comm: Comm, cuts: Sequence[Cut], label: str = "") -> list[Tensor]:
    """Return what this rank wants of each of ``cuts``, as new flat tensors. Collective.

    All tensors have one dtype and one device. Each element is sent at most once to each rank that
    wants it; beside the results this takes the memory of what is sent and received.
    """
    return start_reslice(comm, cuts, label)()


def start_reslice(comm: Comm, cuts: Sequence[Cut], label: str = "") -> Callable[[], list[Tensor]]:
    """Start `reslice`; return what waits for it and gives its results. To be called once."""
    outgoing: list[tuple[int, int, Tensor]] = []
    incoming: list[tuple[int, int, Tensor]] = []
    results = []
    for number, cut in enumerate(cuts):
        held, wanted = cut.held[comm.rank], cut.wanted[comm.rank]
        result = cut.local.new_empty(wanted.stop - wanted.start)
        results.append(result)
        for rank, start, stop in overlaps(cut.wanted, held):
            outgoing.append((rank, number, cut.local[start - held.start : stop - held.start]))
        for rank, start, stop in overlaps(cut.held, wanted):
            incoming.append((rank, number, result[start - wanted.start : stop - wanted.start]))
    sent = _joined(comm, outgoing, cuts[0].local)
    numels = _numels(comm, incoming)
    received = Parts(cuts[0].local.new_empty(sum(numels)), numels)
    work = comm.all_to_all(received, sent, label)
    incoming.sort(key=_order)

    def finish() -> list[Tensor]:
        work.wait()
        parts = torch.split(received.flat, [place.numel() for _, _, place in incoming])
        for (_, _, place), part in zip(incoming, parts, strict=True):
            place.copy_(part)
        return results

    return finish


def _joined(comm: Comm, pieces: list[tuple[int, int, Tensor]], like: Tensor) -> Parts:
    numels = _numels(comm, pieces)
    pieces.sort(key=_order)
    return Parts(torch.cat([like.new_empty(0), *(piece for _, _, piece in pieces)]), numels)


def _numels(comm: Comm, pieces: Sequence[tuple[int, int, Tensor]]) -> list[int]:
    numels = [0] * comm.size
    for rank, _, piece in pieces:
        numels[rank] += piece.numel()
    return numels
