# SPDX-License-Identifier: Apache-2.0
"""Sampling takes every value of each parameter, and every pair in thorough runs."""

import itertools
from argparse import Namespace
from collections import Counter
from unittest.mock import Mock

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


def case_of(module, number, *marks, names=("on_ranks",)):
    """Make an item as pytest does for case ``number`` of a test in ``module``."""
    return Mock(
        nodeid=f"{module.name}::test_it[{number}]",
        path=module,
        module=Namespace(**dict.fromkeys(names)),
        callspec=Mock(params={"number": number}),
        iter_markers=lambda kind: [Mock(args=["number"])],
        get_closest_marker=lambda kind: kind in marks,
    )


def test_a_fast_run_has_one_case_with_ranks_and_all_of_what_has_changed(monkeypatch, tmp_path):
    monkeypatch.setattr(sampling, "FAST", True)
    monkeypatch.setattr(sampling, "THOROUGH", False)
    monkeypatch.setattr(sampling, "ROOT", tmp_path)
    monkeypatch.setattr(sampling, "changed", lambda: ("test_own.py", "fullshard.core.text"))
    names = ("ranks", "plain", "slow", "own", "of_text")
    modules = {name: tmp_path / f"test_{name}.py" for name in names}
    for module in modules.values():
        module.write_text("from fullshard.core.text import x" if "text" in module.name else "")
    items = [case_of(modules[name], n) for name in ("ranks", "own", "of_text") for n in range(3)]
    items += [case_of(modules["plain"], n, names=()) for n in range(3)]
    items += [case_of(modules[name], 9, "slow") for name in ("slow", "own")]
    taken, left_out = sampling.sample(items)
    counted = Counter(item.path.stem[5:] for item in taken)
    assert counted == {"ranks": 1, "plain": 3, "own": 4, "of_text": 3}
    assert len(left_out) == 3
