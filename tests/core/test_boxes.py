# SPDX-License-Identifier: Apache-2.0
"""Boxes of intervals: exactly the interval, and few of them."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.core.boxes import Box, boxes_of_interval, intersection
from fullshard.core.errors import ConfigurationError


def flat_indices(shape, box):
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    ranges = [range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)]
    return [
        sum(index * stride for index, stride in zip(point, strides, strict=True))
        for point in itertools.product(*ranges)
    ]


@st.composite
def intervals(draw):
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    numel = math.prod(shape)
    start = draw(st.integers(0, numel))
    return shape, start, draw(st.integers(start, numel))


@given(intervals())
def test_boxes_are_exactly_the_interval_in_order(case):
    shape, start, stop = case
    boxes = boxes_of_interval(shape, start, stop)
    indices = [index for box in boxes for index in flat_indices(shape, box)]
    assert indices == list(range(start, stop))
    assert all(box.numel > 0 for box in boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_every_interval_of_a_small_tensor():
    shape = (3, 2, 4)
    for start in range(25):
        for stop in range(start, 25):
            boxes = boxes_of_interval(shape, start, stop)
            found = [index for box in boxes for index in flat_indices(shape, box)]
            assert found == list(range(start, stop))
            assert len(boxes) <= 5


def test_an_interval_outside_the_tensor_is_refused():
    with pytest.raises(ConfigurationError, match=r"\[2, 7\) is not within the 6 elements"):
        boxes_of_interval((2, 3), 2, 7)


boxes_2d = st.tuples(
    st.tuples(st.integers(0, 4), st.integers(0, 4)), st.tuples(st.integers(1, 4), st.integers(1, 4))
).map(lambda pair: Box(*pair))


@given(boxes_2d, boxes_2d)
def test_intersection_holds_what_both_hold(a, b):
    shape = (9, 9)
    common = intersection(a, b)
    indices = flat_indices(shape, common) if common else []
    assert set(indices) == set(flat_indices(shape, a)) & set(flat_indices(shape, b))


def test_intersection_of_scalars_and_of_different_dims():
    assert intersection(Box((), ()), Box((), ())) == Box((), ())
    with pytest.raises(ConfigurationError, match="1 and 0 dims"):
        intersection(Box((0,), (1,)), Box((), ()))
