# SPDX-License-Identifier: Apache-2.0
"""Rows that travel together come to their places, whatever the shapes and the number of ranks."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.core.layout import ALIGN_NUMEL, lay_out
from fullshard.core.spec import ParamSpec
from fullshard.torch.unit.packing import holes, pieces_of, travelling_pieces, unpack

SHAPES = st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple)


def specs_of(shapes, shards, cut_last):
    made = []
    for number, shape in enumerate(shapes):
        last = len(shape) - 1
        along = last if cut_last and shape[last] % shards == 0 else 0
        made.append(ParamSpec(f"p{number}", shape, cut_dim=along))
    return made


@given(st.lists(SHAPES, min_size=2, max_size=5), st.integers(2, 9), st.booleans())
def test_what_ranks_hold_arrives_as_the_parameters(shapes, shards, cut_last):
    specs = specs_of(shapes, shards, cut_last)
    (segment,) = lay_out(specs, shards, align="row").segments
    assert segment.travels_apart
    values = [torch.rand(spec.shape) + 1 for spec in specs]
    travelling = torch.zeros(segment.full_numel)
    for slot, value in zip(segment.slots, values, strict=True):
        rows = value.movedim(slot.spec.cut_dim, 0)
        for rank, chunk in enumerate(rows.chunk(shards) if len(rows) else ()):
            start = rank * segment.slice_numel + segment.offset_in_slice(slot, rank)
            span = segment.span(slot, rank)
            assert chunk.numel() == span.numel
            travelling[start : start + span.numel] = chunk.reshape(-1)
    full = torch.zeros(segment.full_numel)
    unpack([(segment, travelling, full)])
    for slot, value in zip(segment.slots, values, strict=True):
        assert slot.start % ALIGN_NUMEL == 0
        assert torch.equal(full[slot.start : slot.stop].view(slot.spec.shape), value)


@given(st.lists(SHAPES, min_size=2, max_size=5), st.integers(2, 9), st.booleans())
def test_gradients_and_holes_fill_what_travels(shapes, shards, cut_last):
    (segment,) = lay_out(specs_of(shapes, shards, cut_last), shards, align="row").segments
    travelling = torch.zeros(segment.full_numel)
    for slot in segment.slots:
        grad = torch.ones(slot.spec.shape)
        pieces = travelling_pieces(travelling, segment, slot)
        for place, part in zip(pieces, pieces_of(grad, slot, shards), strict=True):
            place.add_(part)
    for hole in holes(travelling, segment):
        hole.add_(1)
    behind = segment.slice_numel - max(
        slot.start // shards + -(-slot.spec.numel // shards) for slot in segment.slots
    )
    assert behind >= 0
    assert travelling.eq(1).all()
