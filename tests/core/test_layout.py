# SPDX-License-Identifier: Apache-2.0
"""Layouts by the thousand: what must hold for every unit and every number of ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.core.errors import ConfigurationError
from fullshard.core.layout import ALIGN_NUMEL, Span, SpansOfRanks, lay_out
from fullshard.core.spec import ParamSpec, item_bytes

DTYPES = ["float32", "bfloat16", "float64", "uint8", "complex64"]


@st.composite
def param_lists(draw):
    count = draw(st.integers(0, 8))
    return [
        ParamSpec(
            name=f"p{number}",
            shape=tuple(draw(st.lists(st.integers(0, 9), max_size=3))),
            dtype=draw(st.sampled_from(DTYPES)),
            trainable=draw(st.booleans()),
        )
        for number in range(count)
    ]


shard_counts = st.integers(1, 17)


@given(param_lists(), shard_counts)
def test_slots_hold_each_parameter_once_and_never_overlap(params, shards):
    layout = lay_out(params, shards)
    placed = [slot.spec for _, slot in layout]
    assert sorted(spec.name for spec in placed) == sorted(spec.name for spec in params)
    for segment in layout.segments:
        end = 0
        for slot in segment.slots:
            assert slot.start >= end
            assert slot.stop - slot.start == slot.spec.numel
            assert (slot.spec.dtype, slot.spec.trainable) == (segment.dtype, segment.trainable)
            end = slot.stop
        assert end <= segment.full_numel


@given(param_lists(), shard_counts)
def test_slots_and_slices_are_aligned(params, shards):
    for segment in lay_out(params, shards).segments:
        assert segment.slice_bytes % 16 == 0
        assert segment.slice_numel % ALIGN_NUMEL == 0
        for slot in segment.slots:
            assert slot.start % ALIGN_NUMEL == 0
            assert slot.start * item_bytes(segment.dtype) % 16 == 0


@given(param_lists(), shard_counts)
def test_spans_of_all_ranks_tile_each_slot(params, shards):
    for segment, slot in lay_out(params, shards):
        position = 0
        for rank, span in enumerate(segment.spans(slot)):
            assert span.start == position or span.numel == 0
            if span.numel:
                in_segment = rank * segment.slice_numel + segment.offset_in_slice(slot, rank)
                assert in_segment == slot.start + span.start
                assert 0 <= segment.offset_in_slice(slot, rank) <= segment.slice_numel - span.numel
                position = span.stop
        assert position == slot.spec.numel


@given(param_lists(), shard_counts, shard_counts)
def test_offsets_do_not_depend_on_the_number_of_ranks(params, shards, others):
    places = [(s.dtype, slot.spec.name, slot.start) for s, slot in lay_out(params, shards)]
    assert places == [(s.dtype, slot.spec.name, slot.start) for s, slot in lay_out(params, others)]


@given(param_lists(), shard_counts)
def test_bytes_add_up(params, shards):
    layout = lay_out(params, shards)
    assert layout.full_bytes == shards * layout.shard_bytes
    assert layout.grad_full_bytes == shards * layout.grad_shard_bytes
    payload = sum(param.bytes for param in params)
    padding = sum(s.padding_numel * item_bytes(s.dtype) for s in layout.segments)
    assert layout.full_bytes == payload + padding
    for segment in layout.segments:
        per_slot = (ALIGN_NUMEL - 1) * len(segment.slots)
        assert segment.padding_numel <= per_slot + ALIGN_NUMEL * shards


def test_a_layout_needs_a_rank_and_known_dtypes():
    with pytest.raises(ConfigurationError, match="at least 1 shard, got 0"):
        lay_out([], 0)
    with pytest.raises(ConfigurationError, match=r"unknown dtype 'float7'; known: .*float32"):
        _ = ParamSpec("w", (2,), "float7").bytes


def test_spans_are_worked_out_when_asked_for():
    spans = SpansOfRanks(start=32, numel=100, slice_numel=64, shards=5)
    assert [(span.start, span.stop) for span in spans] == [
        (0, 32),
        (32, 96),
        (96, 100),
        (100, 100),
        (100, 100),
    ]
    assert spans[-1] == spans[4] == Span(100, 100)
    assert spans[1:3] == [spans[1], spans[2]]
    assert spans == SpansOfRanks(32, 100, 64, 5) != SpansOfRanks(0, 100, 64, 5)
    with pytest.raises(IndexError, match="rank 5 of 5"):
        spans[5]
    many = SpansOfRanks(0, 10**9, 10**5, 10**7)
    assert many[10**4 - 1] == Span(10**9 - 10**5, 10**9)


@pytest.mark.parametrize(
    ("shards", "starts", "numel"),
    [(8, [0, 32, 64], 96), (256, [0, 32, 64], 96), (257, [0, 16, 17], 64)],
)
def test_small_parameters_cut_by_rows_are_padded_in_slices_of_few_ranks(shards, starts, numel):
    shapes = [(16, 16), (16,), (16, 16)]
    params = [ParamSpec(f"p{i}", shape, "float32", True) for i, shape in enumerate(shapes)]
    (segment,) = lay_out(params, shards, align="row").segments
    assert segment.packed
    assert [segment.offset_in_slice(slot, 0) for slot in segment.slots] == starts
    assert segment.slice_numel == numel
