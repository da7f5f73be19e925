# SPDX-License-Identifier: Apache-2.0
"""Rules that put parameters into units, and whole matrices on ranks.

However units were chosen (by class, by size, by hand), what is left of the choice is a set of
module paths. A parameter belongs to the deepest unit that contains *all* the places where it
appears: so a tied weight has one owner, the nearest common ancestor of its users, and is gathered
whenever one of them runs.

[Note: Longest first]
An optimizer that needs whole matrices wants each on one rank, and its work even. Matrices are dealt
out from the one with the most work to that with the least, on top of what ranks have of units
before. As long as a matrix fits on some rank without making the most loaded one longer, it fills
that up: first a rank on which none of the largest would fit any more, the emptiest of these, so
that small matrices are spread; else the fullest. So room stays for large matrices of units to come,
where the least loaded rank would be a quarter fuller than need be (Llama 3 8B on 64 ranks). What
fits nowhere goes to the least loaded rank. So no rank has more than the mean and one matrix.
"""

import math
from bisect import bisect, insort
from collections.abc import Container, Iterable, Iterator, Sequence

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec


def group_parameters(
    params: Iterable[ParamSpec], unit_paths: Iterable[str]
) -> dict[str, tuple[ParamSpec, ...]]:
    """The parameters of each unit, by the path of the unit's module ("" is the root).

    Units without parameters of their own are there with an empty tuple. Raises
    `ConfigurationError` if no unit contains a parameter.
    """
    groups: dict[str, list[ParamSpec]] = {path: [] for path in unit_paths}
    for param in params:
        owner = _deepest(_around(param.name), groups)
        for alias in param.aliases:
            while owner and not alias.startswith(owner + "."):  # the root contains all
                owner = _deepest(_around(owner), groups)
        if owner is None:
            raise ConfigurationError(
                f"parameter {param.name!r} lies in none of the units {sorted(groups)}; "
                "make their common root a unit"
            )
        groups[owner].append(param)
    return {path: tuple(members) for path, members in groups.items()}


def _around(name: str) -> Iterator[str]:
    """The paths of the modules around ``name``, the deepest first, the root last."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
    yield ""


def deepest_around(name: str, units: Container[str]) -> str | None:
    """Return the deepest of ``units`` that lies around the module or parameter ``name``."""
    return _deepest(_around(name), units) if name else None


def around_of(paths: Sequence[str]) -> list[int | None]:
    """Number for each of ``paths`` the deepest other one that encloses it, None if none does."""
    numbers = {path: number for number, path in enumerate(paths)}
    around = (deepest_around(path, numbers) for path in paths)
    return [None if path is None else numbers[path] for path in around]


def _deepest(paths: Iterable[str], units: Container[str]) -> str | None:
    return next((path for path in paths if path in units), None)


def muon_work(shape: tuple[int, ...]) -> float:
    """FLOPs of one Newton-Schulz iteration on a matrix, or on each matrix of a stack."""
    if len(shape) < 2:
        raise ConfigurationError(f"a matrix has at least two dims, got shape {shape}")
    *stack, rows, columns = shape
    short, long = min(rows, columns), max(rows, columns)
    count = 1
    for size in stack:
        count *= size
    return float(count * (4 * short * short * long + 2 * short**3))


def deal_out(work: Sequence[float], loads: list[float]) -> list[int]:
    """Choose the rank that owns each matrix; ``loads`` has what ranks had before, and is added to.

    See [Note: Longest first]. Equal on all ranks if the arguments are.
    """
    if not loads:
        raise ConfigurationError("matrices need at least one rank to own them")
    most, largest = max(loads), max(work, default=0.0) or 1.0
    ranks = sorted((load, rank) for rank, load in enumerate(loads))
    owners = [0] * len(work)
    for number in sorted(range(len(work)), key=lambda number: -work[number]):
        turns = math.ceil(most / largest)  # of the largest, as the fullest ranks have had them
        too_full = bisect(ranks, ((turns - 1) * largest, len(loads)))  # for one more
        fitting = bisect(ranks, (most - work[number], len(loads)))
        load, rank = ranks.pop(max(0, min(too_full, fitting - 1)))
        owners[number], loads[rank] = rank, load + work[number]
        most = max(most, loads[rank])
        insort(ranks, (loads[rank], rank))
    return owners
