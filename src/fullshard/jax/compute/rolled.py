# SPDX-License-Identifier: Apache-2.0
"""Equal layers that follow each other in a trace, found and rolled into one scan.

[Note: Rolling up]
A Python loop over layers leaves the operations of one layer in the trace as often as there are
layers. If some operations repeat, with the same parameters, and each repetition takes what the one
before made, what is the same for all, or what stands in the same place of a list (its weights),
then a scan over the stacked weights computes the very same, wherever in the loop one lets a
repetition begin; the place is taken at which the fewest values pass from one to the next. Nothing
is assumed about the model: what differs in a constant, a shape or a wire is not rolled.

It is worth it for memory and time to compile: compilers order the operations of unrolled layers as
they like, and a CPU's gathers all weights first.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fullshard.jax.compute.context import Program
from fullshard.jax.compute.jaxprs import call, is_literal, part

__all__ = ["Roll", "roll_up"]

_Place = tuple[int, int]  # the number of an operation in a repetition, and of its result


@dataclass
class Roll:
    """Operations that are repeated ``count`` times, each time with its own of ``lists``.

    ``body`` takes ``consts``, then what ``carry`` begins with, then one of each list; it gives what
    is carried, then what is collected in ``collected``: for each result the variables that it has
    outside, by number of the repetition.
    """

    count: int
    body: Any  # jax.extend.core.Jaxpr
    consts: list[Any]
    carry: list[Any]
    lists: list[tuple[Any, ...]]
    carried: list[Any]  # the variables of the last repetition, outside
    collected: list[list[Any]]

    @property
    def invars(self) -> list[Any]:
        """The values that it takes from outside, flat."""
        return [*self.consts, *self.carry, *(each for row in self.lists for each in row)]

    @property
    def outvars(self) -> list[Any]:
        """The values that it makes for others, flat."""
        return [*self.carried, *(each for row in self.collected for each in row)]


def roll_up(
    eqns: Sequence[Any], outvars: Sequence[Any], program: Program, names: dict[Any, str]
) -> list[Any]:
    """The operations, with repeated ones as `Roll`; ``names`` are those of weights."""
    keys = _keys(eqns, program)
    used = _uses(eqns, outvars)
    return list(_rolled(list(eqns), keys, used, program, names))


def _rolled(
    eqns: list[Any], keys: np.ndarray[Any, Any], used: dict[Any, int], program: Program, names: Any
) -> Iterator[Any]:
    for start, period, count, slack in _repetitions(keys):
        found = _best(eqns, (start, period, count, slack), used, names)
        if found is None:
            continue
        first, roll = found
        program.findings.note(_said(roll, names))
        end = first + period * count
        yield from _rolled(eqns[:first], keys[:first], used, program, names)
        yield roll
        yield from _rolled(eqns[end:], keys[end:], used, program, names)
        return
    yield from eqns


def _best(
    eqns: list[Any], where: tuple[int, int, int, int], used: dict[Any, int], names: Any
) -> tuple[int, Roll] | None:
    """The beginning with the fewest values carried, and its roll."""
    start, period, count, slack = where
    best: tuple[int, Roll] | None = None
    for first in range(start, start + slack + 1):
        roll = _Wiring(eqns[first : first + period * count], period, count, used).roll()
        if roll is not None and not any(each in names for row in roll.lists for each in row):
            return None
        if roll is not None and (best is None or len(roll.carry) < len(best[1].carry)):
            best = first, roll
    return best


def _repetitions(keys: np.ndarray[Any, Any]) -> list[tuple[int, int, int, int]]:
    """Start, period, count and how far the start may move; what covers most comes first."""
    last: dict[int, int] = {}
    periods = set()
    for place, key in enumerate(keys.tolist()):
        if key in last:
            periods.add(place - last[key])
        last[key] = place
    found = []
    for period in sorted(periods):
        equal = np.flatnonzero(np.diff(np.r_[0, keys[period:] == keys[:-period], 0]))
        for begin, end in zip(equal[::2].tolist(), equal[1::2].tolist(), strict=True):
            count = (end - begin) // period + 1
            if count > 1:
                found.append((begin, period, count, (end - begin) % period))
    # The shortest period of those that cover as much: two layers repeat wherever one does.
    return sorted(found, key=lambda each: (-each[1] * each[2], each[1]))


def _keys(eqns: Sequence[Any], program: Program) -> np.ndarray[Any, Any]:
    """A number for each operation, equal for those that differ in their operands only."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(_key(eqn, program), len(numbers)) for eqn in eqns], int)


def _key(eqn: Any, program: Program) -> Any:
    operands = tuple(
        ("literal", repr(x.val), str(x.aval)) if is_literal(x) else str(x.aval) for x in eqn.invars
    )
    own = eqn.primitive.name.startswith("custom_")  # its functions are new in each call
    params = tuple(
        (name, _said_of(value, program))
        for name, value in sorted(eqn.params.items())
        if not (own and callable(value))
    )
    return eqn.primitive.name, operands, params, _derivative(eqn) if _has_own_rule(eqn) else None


def _has_own_rule(eqn: Any) -> bool:
    """Whether a function inside has a rule of differentiation that is the user's."""
    inner = [getattr(x, "jaxpr", x) for x in jax.tree.leaves(eqn.params)]
    return eqn.primitive.name.startswith("custom_") or any(
        _has_own_rule(each) for x in inner for each in getattr(x, "eqns", ())
    )


def _derivative(eqn: Any) -> Any:
    """The derivative of an operation as text; rules with the same name may hold other numbers."""
    atoms = dict.fromkeys(x for x in eqn.invars if not is_literal(x))
    alone = part([eqn], list(atoms), eqn.outvars)
    inexact = [jnp.issubdtype(x.aval.dtype, jnp.inexact) for x in eqn.outvars]

    def pulled(*args: Any) -> Any:
        def differentiable(*args: Any) -> list[Any]:
            return list(itertools.compress(call(alone, *args), inexact))

        results, pull = jax.vjp(differentiable, *args)
        found = pull([jnp.ones_like(x) for x in results])
        return [x for x in found if x.dtype != jax.dtypes.float0]

    try:
        closed = jax.make_jaxpr(pulled)(*(x.aval for x in atoms))
    except Exception:  # nothing is known of it then
        return id(eqn)
    return str(closed.jaxpr), tuple(np.asarray(x).tobytes() for x in closed.consts)


def _said_of(value: Any, program: Program) -> Any:
    inner = getattr(value, "jaxpr", value)
    if hasattr(inner, "eqns"):
        return str(inner), tuple(map(id, getattr(value, "consts", ())))
    if isinstance(value, tuple):
        return tuple(_said_of(each, program) for each in value)
    if isinstance(value, str) and value in program.sites:
        return repr(program.sites[value][0])
    return repr(value)


def _uses(eqns: Sequence[Any], outvars: Sequence[Any]) -> dict[Any, int]:
    """How often each variable is used."""
    counts: dict[Any, int] = {}
    for atom in (*(x for eqn in eqns for x in eqn.invars), *outvars):
        if not is_literal(atom):
            counts[atom] = counts.get(atom, 0) + 1
    return counts


@dataclass
class _Wiring:
    """Repeated operations, and what they take from where."""

    eqns: list[Any]
    period: int
    count: int
    used: dict[Any, int]
    consts: dict[Any, Any] = field(default_factory=dict)
    carry: dict[_Place, Any] = field(default_factory=dict)
    lists: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def roll(self) -> Roll | None:
        """The roll; None if a wire differs between repetitions."""
        made: dict[Any, tuple[int, _Place]] = {}
        for number, eqn in enumerate(self.eqns):
            for result, out in enumerate(eqn.outvars):
                made[out] = number // self.period, (number % self.period, result)
        for place in range(self.period):
            rows = [self.eqns[place + turn * self.period].invars for turn in range(self.count)]
            for column in zip(*rows, strict=True):
                if not is_literal(column[0]) and not self._wire(column, made):
                    return None
        if not self.lists or not self.carry:  # beside each other, as query, key and value
            return None
        return self._made(made)

    def _wire(self, column: Sequence[Any], made: dict[Any, tuple[int, _Place]]) -> bool:
        sources = [made.get(atom) for atom in column]
        turns = range(self.count)
        if sources[-1] is None:
            if any(source is not None for source in sources):
                return False
            if len(set(column)) == 1:
                self.consts[column[0]] = column[0]
            else:
                self.lists[tuple(column)] = column[0]
            return True
        place = sources[-1][1]
        if sources == [(turn, place) for turn in turns]:
            return True  # made in the same repetition
        if sources[0] is not None or sources[1:] != [(turn - 1, place) for turn in turns[1:]]:
            return False
        return self.carry.setdefault(place, column[0]) is column[0]

    def _made(self, made: dict[Any, tuple[int, _Place]]) -> Roll | None:
        first, inside = self.eqns[: self.period], dict(self.used)
        for eqn in self.eqns:
            for atom in eqn.invars:
                if not is_literal(atom):
                    inside[atom] -= 1
        outside = {out for out in made if inside.get(out, 0) > 0}
        places: dict[_Place, list[Any]] = {}
        for out in outside:
            turn, place = made[out]
            if place in self.carry and turn == self.count - 1:
                continue
            places.setdefault(place, [None] * self.count)[turn] = out
        last = {made[out][1]: out for out in made if made[out][0] == self.count - 1}
        # A variable that begins a carry may be a constant of the first repetition, too, or stand
        # in a list: the body then needs another one for it.
        clash = set(self.carry.values()) & (
            set(self.consts) | {row[0] for row in self.lists}
        ) or len(set(self.carry.values())) < len(self.carry)
        if clash or len({row[0] for row in self.lists}) < len(self.lists):
            return None
        body = part(
            first,
            [*self.consts, *self.carry.values(), *(row[0] for row in self.lists)],
            [first[at].outvars[result] for at, result in (*self.carry, *places)],
        )
        return Roll(
            self.count,
            body,
            list(self.consts),
            list(self.carry.values()),
            list(self.lists),
            [last[place] for place in self.carry],
            list(places.values()),
        )


def _said(roll: Roll, names: dict[Any, str]) -> str:
    for row in roll.lists:
        if row[0] in names and row[-1] in names:
            parts = [names[row[0]].split("."), names[row[-1]].split(".")]
            same = next(
                (at for at, pair in enumerate(zip(*parts, strict=False)) if len(set(pair)) > 1), 0
            )
            ends = [".".join(each[: same + 1]) for each in parts]
            return f"{ends[0]} to {ends[1]} are {roll.count} equal layers"
    return f"{roll.count} equal layers are a scan"
