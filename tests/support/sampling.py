# SPDX-License-Identifier: Apache-2.0
"""Parameters that are sampled instead of crossed, and surveys that are left out.

``FULLSHARD_TRIALS`` says how far: by default every value of every parameter of a test occurs,
``thorough`` runs surveys and lets any two values of any two parameters meet, ``full`` takes all.
"""

import itertools
import os

FULL = os.environ.get("FULLSHARD_TRIALS") == "full"
THOROUGH = FULL or os.environ.get("FULLSHARD_TRIALS") == "thorough"


def cover(rows):
    """Return the numbers of those ``rows``, dicts from axes to values, that do for all of them.

    Every value of an axis occurs, in a thorough run any two values of two axes that do in ``rows``:
    a fault that needs two settings together is then found as by all, of which this is a small part,
    always the same.
    """
    if FULL:
        return range(len(rows))
    alone = [set(row.items()) for row in rows]
    pairs = [set(itertools.combinations(sorted(row.items()), 2)) for row in rows]
    missing, unmet = set().union(*alone), set().union(*pairs)
    chosen = []

    def use(number):
        return len(alone[number] & missing), len(pairs[number] & unmet)

    while missing or (THOROUGH and unmet):
        best = max(range(len(rows)), key=use)  # the first of them
        missing -= alone[best]
        unmet -= pairs[best]
        chosen.append(best)
    return sorted(chosen)


def few(cases):
    """Return those of ``cases``, tuples, that are taken where each place is an axis."""
    return [cases[number] for number in cover([dict(enumerate(map(str, case))) for case in cases])]


def axes_of(item):
    """Return what each ``parametrize`` and each parametrized fixture gives a case of a test."""
    params, axes = dict(item.callspec.params), {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.replace(" ", "").split(",") if isinstance(names, str) else names
        axes[",".join(names)] = tuple(id(params.pop(name)) for name in names)
    return axes | {name: id(value) for name, value in params.items()}


def sample(items):
    """Return those of pytest's ``items`` that run, and the others.

    Where a test has several ``parametrize``, not all of what they have runs with all of the others;
    pairs that matter stand in one. What is marked ``thorough`` runs in thorough runs only.
    """
    cases, left_out = {}, set()
    for item in items:
        if item.get_closest_marker("thorough") and not THOROUGH:
            left_out.add(item)
        elif hasattr(item, "callspec"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in cases.values():
        taken = cover([axes_of(item) for item in same])
        left_out |= {*same} - {same[number] for number in taken}
    return [item for item in items if item not in left_out], [*left_out]
