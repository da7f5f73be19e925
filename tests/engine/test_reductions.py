# SPDX-License-Identifier: Apache-2.0
"""Losses, penalties and views of sharded parameters are one process's, or refused by name.

Ranks as threads refuse what DTensor's own dispatch does, so these run on Gloo.
"""

import pytest
from support.reduction_workers import LOSSES, PENALTIES, VIEWS, reductions, written_views


@pytest.mark.parametrize(
    ("door", "align", "size", "rows"),
    [
        ("function", "row", 2, 5),
        ("function", "row", 3, 2),
        ("wrapper", "row", 2, 1),
        ("wrapper", "row", 2, 4),
        ("wrapper", "element", 3, 2),
    ],
)
def test_losses_and_penalties_between_parameters(gloo_world, door, align, size, rows):
    for wrong, refused in gloo_world.run(size, reductions, door, align, rows):
        assert wrong == {}
        if align == "row":
            assert len(refused) < (len(LOSSES) + len(PENALTIES)) / 5


@pytest.mark.parametrize(
    ("door", "align", "rows"),
    [("function", "row", 5), ("wrapper", "row", 4), ("wrapper", "element", 5)],
)
def test_what_is_written_to_views_is_in_the_next_forward(gloo_world, door, align, rows):
    for wrong, refused in gloo_world.run(2, written_views, door, align, rows):
        assert wrong == {}
        assert len(refused) < 3 * len(VIEWS)
