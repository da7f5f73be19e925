# SPDX-License-Identifier: Apache-2.0
"""Losses, penalties and views of sharded parameters are one process's, or refused by name.

Ranks as threads refuse what DTensor's own dispatch does, so these run on Gloo.
"""

import pytest
from support.reduction_workers import LOSSES, PENALTIES, VIEWS, reductions, written_views

DOORS = [("function", "row"), ("wrapper", "row"), ("wrapper", "element")]


@pytest.mark.parametrize(("door", "align"), DOORS)
@pytest.mark.parametrize(("size", "rows"), [(2, 4), (2, 5), (3, 2), (2, 1)])
def test_losses_and_penalties_between_parameters(gloo_world, door, align, size, rows):
    for wrong, refused in gloo_world.run(size, reductions, door, align, rows):
        assert wrong == {}
        if align == "row":
            assert len(refused) < (len(LOSSES) + len(PENALTIES)) / 5


@pytest.mark.parametrize(("door", "align"), DOORS)
@pytest.mark.parametrize("rows", [4, 5])
def test_what_is_written_to_views_is_in_the_next_forward(gloo_world, door, align, rows):
    for wrong, refused in gloo_world.run(2, written_views, door, align, rows):
        assert wrong == {}
        assert len(refused) < 3 * len(VIEWS)
