# SPDX-License-Identifier: Apache-2.0
"""Parameters that are sampled instead of crossed."""

import itertools

import pytest


def pairwise(*axes):
    """Return parameter sets in which any two values of any two ``axes`` meet.

    A fault that needs two settings together is found as in the whole product, of which this is a
    small part, always the same. An axis is a list, or a dict from ids to values.
    """
    axes = [axis if isinstance(axis, dict) else {str(each): each for each in axis} for axis in axes]
    product = [(ids, _pairs(ids)) for ids in itertools.product(*axes)]
    missing = set().union(*(pairs for _, pairs in product))
    chosen = []
    while missing:
        ids, found = max(product, key=lambda each: len(each[1] & missing))  # the first of the best
        missing -= found
        values = [axis[name] for axis, name in zip(axes, ids, strict=True)]
        chosen.append(pytest.param(*values, id="-".join(ids)))
    return chosen


def _pairs(ids):
    return set(itertools.combinations(enumerate(ids), 2))
