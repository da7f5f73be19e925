# SPDX-License-Identifier: Apache-2.0
"""Parameters that are sampled instead of crossed."""

import itertools
import os

import pytest

FULL = os.environ.get("FULLSHARD_TRIALS") == "full"  # all that is sampled otherwise


def pairwise(*axes, without=lambda *values: False):
    """Return parameter sets in which any two values of any two ``axes`` meet.

    A fault that needs two settings together is found as in the whole product, of which this is a
    small part, always the same. An axis is a list, or a dict from ids to values. Combinations for
    which ``without`` returns true are left out.
    """
    axes = [axis if isinstance(axis, dict) else {str(each): each for each in axis} for axis in axes]
    product = {
        ids: values
        for ids in itertools.product(*axes)
        if not without(*(values := [axis[name] for axis, name in zip(axes, ids, strict=True)]))
    }
    pairs = {ids: set(itertools.combinations(enumerate(ids), 2)) for ids in product}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(product, key=lambda ids: len(pairs[ids] & missing))  # the first of them
        missing -= pairs[best]
        chosen.append(pytest.param(*product[best], id="-".join(best)))
    return chosen
