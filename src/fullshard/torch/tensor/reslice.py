# SPDX-License-Identifier: Apache-2.0
"""From one way to cut flat tensors into intervals to another, by exchanging what differs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fullshard.core.layout import Span
from fullshard.torch.comm.protocol import Comm, Parts

__all__ = ["Cut", "recut", "rows_of_ranks"]


@dataclass(frozen=True)
class Cut:
    """A flat tensor of which each rank holds one interval and wants another.

    Rank r holds the elements ``held[r]`` and wants ``wanted[r]``. Those held tile the tensor; those
    wanted may overlap. ``local`` is what this rank holds.
    """

    local: Tensor
    held: Sequence[Span]
    wanted: Sequence[Span]


def rows_of_ranks(shape: Sequence[int], size: int) -> list[Span]:
    """The flat elements that ``Shard(0)`` gives to each of ``size`` ranks: whole rows, as `chunk`.

    A tensor without dims is on every rank, as replicated.
    """
    if not shape:
        return [Span(0, 1)] * size
    rows, row_numel = shape[0], math.prod(shape[1:])
    chunk = -(-rows // size)
    ends = [min(rank * chunk, rows) * row_numel for rank in range(size + 1)]
    return [Span(start, stop) for start, stop in pairwise(ends)]


def recut(comm: Comm, cuts: Sequence[Cut], label: str = "") -> list[Tensor]:
    """What this rank wants of each of ``cuts``, as new flat tensors. Collective over ``comm``.

    All are of one dtype on one device. Each element is sent at most once to each rank that wants
    it; besides the result this takes the memory of what is sent and received.
    """
    me = comm.rank
    outgoing = [[_common(each, me, rank) for each in cuts] for rank in range(comm.size)]
    incoming = [[_common(each, rank, me) for each in cuts] for rank in range(comm.size)]
    like = cuts[0].local
    pieces = [like.new_empty(0)]
    for row in outgoing:
        for each, span in zip(cuts, row, strict=True):
            pieces.append(_part(each.local, each.held[me], span))
    sent = Parts(torch.cat(pieces), [sum(span.numel for span in row) for row in outgoing])
    numels = [sum(span.numel for span in row) for row in incoming]
    received = Parts(like.new_empty(sum(numels)), numels)
    comm.all_to_all(received, sent, label).wait()
    results = [like.new_empty(each.wanted[me].numel) for each in cuts]
    spans = [
        (each, result, span)
        for row in incoming
        for each, result, span in zip(cuts, results, row, strict=True)
    ]
    parts = torch.split(received.flat, [span.numel for _, _, span in spans])
    for (each, result, span), part in zip(spans, parts, strict=True):
        _part(result, each.wanted[me], span).copy_(part)
    return results


def _common(cut: Cut, holder: int, wanting: int) -> Span:
    """What ``holder`` has to send to ``wanting``."""
    held, wanted = cut.held[holder], cut.wanted[wanting]
    start = max(held.start, wanted.start)
    return Span(start, max(start, min(held.stop, wanted.stop)))


def _part(flat: Tensor, held: Span, span: Span) -> Tensor:
    """The elements ``span`` of a tensor of which ``flat`` has ``held``."""
    return flat.narrow(0, span.start - held.start, span.numel) if span.numel else flat[:0]
