# SPDX-License-Identifier: Apache-2.0
"""Whole matrices on one rank each: every element once, evenly, without padding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.core.errors import ConfigurationError
from fullshard.core.grouping import deal_out, muon_work
from fullshard.core.layout import lay_out
from fullshard.core.presets import transformer
from fullshard.core.spec import ParamSpec

shapes = st.tuples(st.integers(1, 40), st.integers(1, 40))


@given(st.lists(shapes, min_size=1, max_size=12), st.integers(1, 9), st.booleans())
def test_each_element_is_on_one_rank_and_in_its_place(sizes, ranks, with_others):
    owners = deal_out([muon_work(shape) for shape in sizes], [0.0] * ranks)
    specs = [
        ParamSpec(f"m{i}", shape, owner=owner)
        for i, (shape, owner) in enumerate(zip(sizes, owners, strict=True))
    ]
    others = [ParamSpec("bias", (17,)), ParamSpec("table", (13, 5))] if with_others else []
    layout = lay_out([*specs, *others], ranks, align="row")
    assert sorted(slot.spec.name for _, slot in layout) == sorted(s.name for s in [*specs, *others])
    for segment, slot in layout:
        spans = list(segment.spans(slot))
        assert sum(span.numel for span in spans) == slot.spec.numel
        if slot.spec.owner is None:
            continue
        assert segment.unequal is not None
        assert sum(segment.unequal) == segment.full_numel
        assert spans[slot.spec.owner].numel == slot.spec.numel
        held = segment.slice_of(slot.spec.owner)
        assert held.start <= slot.start <= slot.stop <= held.stop
        begin = segment.offset_in_slice(slot, slot.spec.owner)
        assert held.start + begin == slot.start
        assert segment.padding_numel < 32 * len(segment.slots)


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=40), st.integers(1, 12))
def test_the_rank_with_most_has_at_most_the_mean_and_one_matrix(work, ranks):
    loads = [0.0] * ranks
    owners = deal_out(work, loads)
    of_ranks = [sum(w for w, o in zip(work, owners, strict=True) if o == r) for r in range(ranks)]
    assert loads == pytest.approx(of_ranks)
    # Behind the first matrices the least loaded rank has no more than the mean.
    assert max(loads) <= (sum(work) / ranks + max(work)) * (1 + 1e-9)


@given(
    st.lists(st.lists(st.floats(0.1, 100), max_size=9), min_size=1, max_size=9),
    st.integers(1, 12),
)
def test_unit_by_unit_no_rank_has_more_than_the_mean_and_one_matrix(units, ranks):
    loads, most = [0.0] * ranks, 0.0
    for work in units:
        before = list(loads)
        owners = deal_out(work, loads)
        assert owners == deal_out(work, before)  # as on every other rank
        most = max([most, *work])
        assert max(loads) <= (sum(loads) / ranks + most) * (1 + 1e-9)
    assert sum(loads) == pytest.approx(sum(map(sum, units)))


@given(st.integers(1, 40), st.integers(1, 12))
def test_matrices_of_one_size_are_dealt_out_in_turns(count, ranks):
    loads = [0.0] * ranks
    for _ in range(count):
        deal_out([2.0], loads)
    assert max(loads) - min(loads) <= 2.0


def layers(preset):
    shape = transformer(preset)
    kv = shape.kv_heads * shape.head_width
    layer = [
        *[(shape.width, shape.width)] * 2,
        *[(kv, shape.width)] * 2,
        *[(shape.hidden, shape.width)] * 2,
        (shape.width, shape.hidden),
    ]
    return [[muon_work(size) for size in layer]] * shape.layers


@pytest.mark.parametrize("preset", ["llama3-8b", "llama3-70b"])
@pytest.mark.parametrize("ranks", [8, 64, 512])
@pytest.mark.parametrize("together", [True, False])
def test_large_models_are_even_or_as_even_as_their_largest_matrix_lets_them(
    preset, ranks, together
):
    units, loads = layers(preset), [0.0] * ranks
    work = [each for unit in units for each in unit]
    for unit in [work] if together else units:
        deal_out(unit, loads)
    mean = sum(work) / ranks
    assert max(loads) <= max(1.1 * mean, max(work) * (1 + 1e-9))


def test_wrong_owners_are_refused():
    with pytest.raises(ConfigurationError, match="below 2"):
        lay_out([ParamSpec("m", (4, 4), owner=2)], 2)
    with pytest.raises(ConfigurationError, match="at least one rank"):
        deal_out([1.0], [])
