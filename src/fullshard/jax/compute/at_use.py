# SPDX-License-Identifier: Apache-2.0
"""A loss function's trace, carried out with each weight gathered where it is used.

[Note: At use]
The loss is traced once, as a function of whole arrays. That trace is then carried out operation by
operation with weights that are still cut: a cast or a slice of one is done on the pieces, a scan, a
`jax.checkpoint`, a function or a branch that takes one is entered, and whatever else meets a weight
gets it gathered there. So a scan over stacked layers gathers one layer at a time, whoever wrote the
scan, and what is recomputed in backward is gathered again. What XLA makes of a gather's transpose
(an all-reduce, a reduce-scatter) is its choice, but in a layer that `gathered` was asked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fullshard.core.spec import ParamSpec
from fullshard.jax.arrays.rule import place
from fullshard.jax.compute.context import Program
from fullshard.jax.compute.jaxprs import call, is_literal, part
from fullshard.jax.compute.pieces import Weight, array_of, axes_after, before_scans, bind
from fullshard.jax.compute.policies import OF_ROLLED, keep_computed
from fullshard.jax.compute.rolled import Roll, roll_up

__all__ = ["gather", "run"]


_CALLS = ("jit", "pjit", "closed_call")


@dataclass
class _Level:
    """One jaxpr that is being carried out; a weight is gathered once in it."""

    program: Program
    keeping: bool  # whether a checkpoint around it decides what backward keeps
    rolling: bool
    in_scan: bool = False
    whole: dict[int, Any] = field(default_factory=dict)

    def gather(self, x: Any) -> Any:
        if not isinstance(x, Weight):
            return x
        if self.program.mode != "weights":
            return x.array
        if id(x) not in self.whole:
            # The weight stays alive with the entry, so that no other gets its identity.
            self.whole[id(x)] = gather(self.program, x.array, x.axes), x
        return self.whole[id(x)][0]

    def hold(self, x: Any, why: str) -> Any:
        """Gather a weight for longer than its use, and say so."""
        if isinstance(x, Weight) and self.program.mode == "weights":
            self.program.findings.hold(x.name, x.array.nbytes, why)
        return self.gather(x)

    def constrained(self, array: Any, axes: Any) -> Any:
        """An array, cut along these axes."""
        return lax.with_sharding_constraint(array, self.program.layout.sharding(*axes))

    def inside(self, keeping: bool = False, in_scan: bool = False) -> "_Level":
        """The level of a jaxpr that an operation of this one holds."""
        rolling = self.rolling and not (keeping or in_scan)
        return _Level(self.program, self.keeping or keeping, rolling, self.in_scan or in_scan)


def run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], program: Program) -> list[Any]:
    """The results of ``jaxpr``; in mode "weights" those among ``args`` are gathered at use."""
    keeping = program.remat == "none" or program.mode != "weights"
    level = _Level(program, keeping, program.scan)
    return _evaluate(jaxpr, [*consts, *args], level)


def _evaluate(
    jaxpr: Any, args: Sequence[Any], level: _Level, *, as_they_rest: bool = False
) -> list[Any]:
    """The results of ``jaxpr``; weights among them are gathered, or given ``as_they_rest``."""
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if is_literal(atom) else values[atom]

    eqns = list(jaxpr.eqns)
    if level.rolling:
        weights = {atom: x.name for atom, x in values.items() if isinstance(x, Weight)}
        eqns = roll_up(eqns, jaxpr.outvars, level.program, weights)
    given = {atom for atom, x in values.items() if isinstance(x, Weight)}

    def entered(eqn: Any) -> bool:
        return _entered(eqn) or _is_the_model(eqn, given, level.program)

    early: set[int] = set()
    if given and level.program.mode == "weights":
        needed = jaxpr.outvars if as_they_rest else ()
        early = before_scans(jaxpr, eqns, entered, given, needed)

    def apart(eqn: Any) -> bool:
        return entered(eqn) or id(eqn) in early

    for each in eqns if level.keeping else _parts(eqns, jaxpr.outvars, apart):
        operands = [read(atom) for atom in each.invars]
        results = None
        if isinstance(each, Roll):
            results = _roll(each, operands, level)
        elif any(isinstance(x, Weight) for x in operands):
            if isinstance(each, _Run):
                results = _kept(each, operands, level)
            else:
                results = _of_weights(each, operands, level, id(each) in early)
        if results is None and getattr(each, "primitive", None) is not None:
            loop = each.primitive.name == "while"
            gather = partial(level.hold, why="a while loop uses it") if loop else level.gather
            results = _bind(each, list(map(gather, operands)))
        if results is None:
            results = _bind(each, [level.gather(x) for x in operands])
        values.update(zip(each.outvars, results, strict=True))
    found = map(read, jaxpr.outvars)
    return list(found if as_they_rest else map(level.gather, found))


@dataclass
class _Run:
    """Operations behind each other, none of which is entered, as one."""

    eqns: list[Any]
    invars: list[Any]
    outvars: list[Any]

    def jaxpr(self) -> Any:
        return part(self.eqns, self.invars, self.outvars)


def _parts(eqns: Sequence[Any], outvars: Sequence[Any], apart: Callable[[Any], bool]) -> list[Any]:
    """The operations: those that stand ``apart``, and runs of all others."""
    parts: list[Any] = []
    run: list[Any] = []
    for eqn in eqns:
        if apart(eqn):
            parts += [run, eqn] if run else [eqn]
            run = []
        else:
            run.append(eqn)
    parts += [run] if run else []
    used = {atom for atom in outvars if not is_literal(atom)}
    found: list[Any] = []
    for piece in reversed(parts):
        each = _as_run(piece, used) if isinstance(piece, list) else piece
        used |= {atom for atom in each.invars if not is_literal(atom)}
        found.append(each)
    return found[::-1]


def _as_run(eqns: list[Any], used: set[Any]) -> _Run:
    made = dict.fromkeys(out for eqn in eqns for out in eqn.outvars)
    taken = dict.fromkeys(atom for eqn in eqns for atom in eqn.invars if not is_literal(atom))
    return _Run(eqns, [x for x in taken if x not in made], [x for x in made if x in used])


def _entered(eqn: Any) -> bool:
    """Whether it holds a scan or a checkpoint, whose own decisions stand."""
    if isinstance(eqn, Roll) or eqn.primitive.name in ("scan", "remat2", "remat", "checkpoint"):
        return True
    inner = eqn.params.get("jaxpr") if eqn.primitive.name in _CALLS else None
    return any(map(_entered, getattr(getattr(inner, "jaxpr", inner), "eqns", ())))


def _is_the_model(eqn: Any, weights: set[Any], program: Program) -> bool:
    """Whether a call takes most of the weights, as ``jax.jit`` around a loss does."""
    if eqn.primitive.name not in _CALLS or len(weights) == 1:
        return False
    if eqn.params.get("name") in program.sites:
        return False
    return 2 * len(weights.intersection(x for x in eqn.invars if not is_literal(x))) > len(weights)


def _kept(run: _Run, operands: list[Any], level: _Level) -> list[Any]:
    """A run under the policy of [Note: What backward keeps]."""
    function = _entering(run.jaxpr(), operands, level)
    function = jax.checkpoint(function, policy=keep_computed, prevent_cse=not level.in_scan)
    return function(*map(array_of, operands))


def _entering(jaxpr: Any, operands: Sequence[Any], level: _Level) -> Callable[..., list[Any]]:
    """``jaxpr`` as a function of arrays, weights among them as they rest, for a checkpoint."""
    weights = list(map(_kind, operands))

    def function(*arrays: Any) -> list[Any]:
        args = [_as_weight(x, each) for x, each in zip(arrays, weights, strict=True)]
        return _evaluate(jaxpr, args, level.inside(keeping=True))

    return function


def _bind(each: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of one operation or run."""
    return call(each.jaxpr(), *operands) if isinstance(each, _Run) else bind(each, operands)


def gather(program: Program, array: Any, axes: Sequence[Any]) -> Any:
    """The whole array on every device of the shard axis; its gradient is cut along ``axes``."""
    layout = program.layout
    kept = layout.sharding(*(_without(layout.shard, axis) for axis in axes))
    rest = layout.sharding(*axes)

    @jax.custom_vjp
    def whole(x: Any) -> Any:
        return lax.with_sharding_constraint(x, kept)

    def backward(_: None, gradient: Any) -> tuple[Any]:
        return (lax.with_sharding_constraint(gradient, rest),)

    whole.defvjp(lambda x: (lax.with_sharding_constraint(x, kept), None), backward)
    return whole(array)


def _without(shard: str, axis: Any) -> Any:
    if isinstance(axis, tuple):
        return tuple(part for part in axis if part != shard) or None
    return None if axis == shard else axis


def _of_weights(eqn: Any, operands: list[Any], level: _Level, early: bool) -> list[Any] | None:
    """The results of an operation that takes weights; None if it wants them whole."""
    rule = _RULES.get(eqn.primitive.name)
    if rule:
        return rule(eqn, operands, level)
    found = axes_after(eqn, operands, level.program.layout)
    if found is not None:
        names = _names(operands)
        made = bind(eqn, list(map(array_of, operands)))
        return [Weight(x, axes, names) for x, axes in zip(made, found, strict=True)]
    if early and len(eqn.outvars) == 1:
        return [_laid_out(eqn, operands, level)]
    return None


def _laid_out(eqn: Any, operands: list[Any], level: _Level) -> Any:
    """Make of weights an operand of a scan, and cut it as a weight of its shape would be cut."""
    names = _names(operands)
    (array,) = bind(eqn, list(map(array_of, operands)))
    layout = level.program.layout
    spec = ParamSpec(names, tuple(array.shape), array.dtype.name)
    (found,) = place([spec], layout, pad=False)
    shares = sum(x.array.size for x in operands if isinstance(x, Weight)) // layout.shards
    if not found.sharded and array.size > shares:
        why = f"{eqn.primitive.name} makes {spec.shape} of it for a scan"
        level.hold(Weight(array, found.axes, names), why)
    return Weight(level.constrained(array, found.axes), found.axes, names)


def _names(operands: list[Any]) -> str:
    return ", ".join(dict.fromkeys(x.name for x in operands if isinstance(x, Weight)))


def _roll(roll: Roll, operands: list[Any], level: _Level) -> list[Any]:
    """A scan over repeated operations, whose weights are stacked as they rest."""
    begin, middle = len(roll.consts), len(roll.consts) + len(roll.carry)
    consts, carry = operands[:begin], [level.gather(x) for x in operands[begin:middle]]
    rows = [operands[at : at + roll.count] for at in range(middle, len(operands), roll.count)]
    stacks = [_stacked(row, level) for row in rows]
    inside = [_kind(x, 1) for x in stacks]
    policy = OF_ROLLED[level.program.remat]
    own = policy is None or any(map(_entered, roll.body.eqns))

    def step(carry: Any, xs: Any) -> tuple[Any, Any]:
        layer = [_as_weight(x, each) for x, each in zip(xs, inside, strict=True)]
        within = level.inside(keeping=not own, in_scan=True)
        results = _evaluate(roll.body, [*consts, *carry, *layer], within)
        return results[: len(carry)], results[len(carry) :]

    if not own:
        step = jax.checkpoint(step, policy=policy, prevent_cse=False)
    carried, ys = lax.scan(step, carry, list(map(array_of, stacks)), length=roll.count)
    found = [y[turn] for y, row in zip(ys, roll.collected, strict=True) for turn in range(len(row))]
    return [*carried, *found]


def _stacked(row: list[Any], level: _Level) -> Any:
    first = row[0]
    if not all(isinstance(x, Weight) and x.axes == first.axes for x in row):
        return jnp.stack([level.gather(x) for x in row])
    return Weight(jnp.stack([x.array for x in row]), (None, *first.axes), first.name)


def _scan(eqn: Any, operands: list[Any], level: _Level) -> list[Any]:
    given = eqn.params
    first, rest = given["num_consts"], given["num_consts"] + given["num_carry"]
    consts = operands[:first]
    carry = [level.hold(x, "a scan carries it") for x in operands[first:rest]]
    xs = [
        level.hold(x, "a scan takes slices of the dimension along which it is cut")
        if isinstance(x, Weight) and x.axes[0] is not None
        else x
        for x in operands[rest:]
    ]
    inside = [_kind(x, 1) for x in xs]
    body = given["jaxpr"]

    def step(carry: Any, xs: Any) -> tuple[Any, Any]:
        layer = [_as_weight(x, each) for x, each in zip(xs, inside, strict=True)]
        args = [*body.consts, *consts, *carry, *layer]
        results = _evaluate(body.jaxpr, args, level.inside(in_scan=True))
        return results[: rest - first], results[rest - first :]

    carried, ys = lax.scan(
        step,
        carry,
        list(map(array_of, xs)),
        length=given["length"],
        reverse=given["reverse"],
        unroll=given["unroll"],
    )
    return [*carried, *ys]


def _checkpoint(eqn: Any, operands: list[Any], level: _Level) -> list[Any]:
    function = _entering(eqn.params["jaxpr"], operands, level)
    function = jax.checkpoint(
        function, policy=eqn.params["policy"], prevent_cse=eqn.params["prevent_cse"]
    )
    return function(*map(array_of, operands))


def _call(eqn: Any, operands: list[Any], level: _Level) -> list[Any]:
    arrays = list(map(array_of, operands))
    site = level.program.site(eqn.params.get("name", ""), arrays)
    if site is not None:
        axes = [x.axes if isinstance(x, Weight) else None for x in operands]
        return site(arrays, axes, level.program)
    inner = eqn.params["jaxpr"]
    consts = getattr(inner, "consts", ())
    return _evaluate(
        getattr(inner, "jaxpr", inner), [*consts, *operands], level.inside(), as_they_rest=True
    )


def _branch(eqn: Any, operands: list[Any], level: _Level) -> list[Any] | None:
    if isinstance(operands[0], Weight):
        return None
    inside = [
        _entering(each.jaxpr, [*each.consts, *operands[1:]], level)
        for each in eqn.params["branches"]
    ]
    consts = [tuple(each.consts) for each in eqn.params["branches"]]
    branches = [
        lambda *arrays, f=function, c=held: f(*c, *arrays)
        for function, held in zip(inside, consts, strict=True)
    ]
    arrays = [array_of(x) for x in operands[1:]]
    return lax.switch(operands[0], branches, *arrays)


def _as_they_rest(eqn: Any, operands: list[Any], level: _Level) -> list[Any]:
    """Hand over arrays as they rest, to a function that the user mapped over devices."""
    return bind(eqn, list(map(array_of, operands)))


def _as_weight(x: Any, like: Weight | None) -> Any:
    return x if like is None else Weight(x, like.axes, like.name)


def _kind(x: Any, gone: int = 0) -> Weight | None:
    """Describe a weight without its array and its first ``gone`` dimensions."""
    return Weight(None, x.axes[gone:], x.name) if isinstance(x, Weight) else None


_RULES: dict[str, Callable[[Any, list[Any], _Level], list[Any] | None]] = {
    "scan": _scan,
    "remat2": _checkpoint,
    "remat": _checkpoint,
    "checkpoint": _checkpoint,
    **dict.fromkeys(_CALLS, _call),
    "cond": _branch,
    "shard_map": _as_they_rest,
}
