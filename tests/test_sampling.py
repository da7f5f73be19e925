# SPDX-License-Identifier: Apache-2.0
"""Sampling takes every value of each parameter, and every pair in thorough runs."""

import itertools

from support import sampling

AXES = {"door": range(2), "layout": range(3), "world": range(4)}
ROWS = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]


def taken(rows):
    return [rows[number] for number in sampling.cover(rows)]


def test_every_value_occurs_though_few_are_taken(monkeypatch):
    monkeypatch.setattr(sampling, "THOROUGH", False)
    found = taken(ROWS)
    assert len(found) == 4
    for axis, values in AXES.items():
        assert {row[axis] for row in found} == set(values)


def test_any_two_values_meet_in_a_thorough_run(monkeypatch):
    monkeypatch.setattr(sampling, "THOROUGH", True)
    found = taken(ROWS)
    assert len(found) < len(ROWS)
    for one, other in itertools.combinations(AXES, 2):
        assert len({(row[one], row[other]) for row in found}) == len(AXES[one]) * len(AXES[other])


def test_what_is_chosen_by_hand_is_taken():
    assert taken(ROWS[5:6]) == ROWS[5:6]
