# SPDX-License-Identifier: Apache-2.0
"""Parameters that are sampled instead of crossed, and tests that are left out.

``FULLSHARD_TRIALS`` says how far: by default every value of every parameter of a test occurs,
``thorough`` runs surveys and lets any two values of any two parameters meet, ``full`` takes all.
``fast`` leaves out what is slow or long, and takes one case of each test that has ranks as threads;
of modules that have changed since the last commit, or test what has, it takes all.
"""

import functools
import itertools
import os
import subprocess
import zlib
from pathlib import Path

import pytest

TRIALS = os.environ.get("FULLSHARD_TRIALS")
FAST, FULL = TRIALS == "fast", TRIALS == "full"
THOROUGH = FULL or TRIALS == "thorough"
ROOT = Path(__file__).parents[2]
FEW = 12
RANKS_AS_THREADS = {"LocalWorld", "on_ranks"}  # names that modules of such tests have imported


def cover(rows):
    """Return the numbers of those ``rows``, dicts from axes to values, that do for all of them.

    Every value of an axis occurs, in a thorough run any two values of two axes that do in ``rows``:
    a fault that needs two settings together is then found as by all, of which this is a small part,
    always the same.
    """
    rows = list(rows)
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


def survey(value):
    """Return ``value`` as a parameter of a test that is tried in thorough runs only."""
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.thorough)


def axes_of(item):
    """Return what each ``parametrize`` and each parametrized fixture gives a case of a test."""
    params, axes = dict(item.callspec.params), {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.replace(" ", "").split(",") if isinstance(names, str) else names
        axes[",".join(names)] = tuple(id(params.pop(name)) for name in names)
    return axes | {name: id(value) for name, value in params.items()}


@functools.cache
def changed():
    """Return what has changed since the last commit: files, and modules as they are imported.

    Modules that more than `FEW` files of tests import are not among these: the sample tests them.
    """
    ask = ["git", "status", "--porcelain", "--no-renames", "--untracked-files=all"]
    try:
        told = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ()  # not in a checkout
    files = [line[3:] for line in told.splitlines() if line.endswith(".py")]
    modules = [f[4:-3].replace("/", ".") for f in files if f.startswith("src/")]
    texts = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    few = [m for m in modules if sum(f"from {m} import" in text for text in texts) <= FEW]
    return (*files, *few)


@functools.cache
def is_changed(path):
    """Return whether a module of tests has changed, or one that it imports from by its own name."""
    text = path.read_text("utf-8")
    return path.relative_to(ROOT).as_posix() in changed() or any(
        f"from {name} import" in text for name in changed()
    )


def sample(items):
    """Return those of pytest's ``items`` that run, and the others.

    Where a test has several ``parametrize``, not all of what they have runs with all of the others;
    pairs that matter stand in one. What is marked ``thorough`` runs in thorough runs only, what is
    marked ``slow`` or ``long`` not in fast ones.
    """
    cases, left_out = {}, set()
    for item in items:
        fast = FAST and not is_changed(item.path)
        excluded = ["thorough"] * (not THOROUGH) + ["slow", "long"] * fast
        if any(map(item.get_closest_marker, excluded)):
            left_out.add(item)
        elif hasattr(item, "callspec"):
            one = fast and RANKS_AS_THREADS.intersection(vars(item.module))
            cases.setdefault((item.nodeid.partition("[")[0], bool(one)), []).append(item)
    for (name, one), same in cases.items():
        # By name, so that tests that have the same parameters take different ones of them.
        taken = [zlib.crc32(name.encode()) % len(same)] if one else cover(map(axes_of, same))
        left_out |= {*same} - {same[number] for number in taken}
    return [item for item in items if item not in left_out], [*left_out]
