# SPDX-License-Identifier: Apache-2.0
"""Operations that a cut weight goes through without being gathered, and what cuts the result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh

from fullshard.jax.arrays.mesh import Layout
from fullshard.jax.compute.jaxprs import call, is_literal, part
from fullshard.jax.compute.per_example import ELEMENTWISE
from fullshard.jax.compute.rolled import Roll

__all__ = ["Weight", "array_of", "axes_after", "before_scans", "bind"]

Axes = tuple[Any, ...]


@dataclass(eq=False)
class Weight:
    """A weight at rest, in its true shape, and what cuts each of its dimensions."""

    array: Any
    axes: Axes
    name: str


def array_of(x: Any) -> Any:
    """The array of a weight, as it rests; anything else as it is."""
    return x.array if isinstance(x, Weight) else x


def axes_after(eqn: Any, operands: Sequence[Any], layout: Layout) -> list[Axes] | None:
    """Return the axes that cut what an operation makes of pieces; None if it wants whole weights.

    JAX's own rules for arrays whose type has a sharding are asked. Weights stay in pieces if all
    that the operation takes are weights and scalars, nothing is repeated (that is better done after
    a weight was sent) and no dimension that is cut becomes shorter or longer.
    """
    weights = [x for x in operands if isinstance(x, Weight)]
    if any(jnp.shape(x) for x in operands if not isinstance(x, Weight)):
        return None
    mesh = layout.explicit
    like = [
        jax.ShapeDtypeStruct(
            x.array.shape, x.array.dtype, sharding=NamedSharding(mesh, PartitionSpec(*x.axes))
        )
        if isinstance(x, Weight)
        else jax.ShapeDtypeStruct((), jnp.result_type(x))
        for x in operands
    ]
    try:
        with use_abstract_mesh(AbstractMesh((), ())), use_abstract_mesh(mesh):
            here = jax.make_jaxpr(jnp.sin)(1.0).eqns[0].ctx  # not that of a mesh the user has set
            made = jax.eval_shape(partial(bind, eqn.replace(ctx=here)), like)
    except Exception:  # each rule has errors of its own
        return None
    if any(x.sharding is None for x in made):  # of what JAX knows no types with shardings
        return None
    found = [(*x.sharding.spec, *(None for _ in x.shape))[: len(x.shape)] for x in made]
    before = {cut for x in weights for cut in zip(x.axes, x.array.shape, strict=True)}
    after = {cut for x, axes in zip(made, found, strict=True)
             for cut in zip(axes, x.shape, strict=True) if cut[0] is not None}  # fmt: skip
    if not after <= before:
        divide = all(size % layout.count(axis) == 0 for axis, size in before | after)
        if eqn.primitive.name != "reshape" or not divide:
            return None
    repeats = sum(x.size for x in made) > sum(x.array.size for x in weights)
    return None if repeats else found


def bind(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of one operation, with its own rules of differentiation."""
    given = [
        (atom, x) for atom, x in zip(eqn.invars, operands, strict=True) if not is_literal(atom)
    ]
    places = dict(given)
    return call(part([eqn], list(places), eqn.outvars), *places.values())


def before_scans(
    jaxpr: Any,
    eqns: Sequence[Any],
    entered: Callable[[Any], bool],
    weights: set[Any],
    results: Sequence[Any] = (),
) -> set[int]:
    """The ids of operations that change weights for one that is entered, such as a scan over them.

    The same of those that make ``results``.

    What these make lives as long as that runs, so it must be cut as weights are. They take nothing
    but weights and constants, or are elementwise over what a weight's shape has.
    """
    fixed, changed = set(jaxpr.constvars), set(weights)
    changing = []
    for eqn in eqns:
        if entered(eqn):
            continue
        atoms = {x for x in eqn.invars if not is_literal(x)}
        if atoms <= fixed:
            fixed.update(eqn.outvars)
            continue
        like = atoms & changed
        same = eqn.primitive.name in ELEMENTWISE and any(
            x.aval.shape == eqn.outvars[0].aval.shape for x in like
        )
        if like and (same or atoms <= changed | fixed):
            changing.append(eqn)
            changed.update(eqn.outvars)
    needed = {x for eqn in eqns if entered(eqn) for x in _stays(eqn) if not is_literal(x)}
    needed.update(x for x in results if not is_literal(x))
    marked = set()
    for eqn in reversed(changing):
        if needed.intersection(eqn.outvars):
            marked.add(id(eqn))
            needed.update(x for x in eqn.invars if not is_literal(x))
    return marked


def _stays(eqn: Any) -> Sequence[Any]:
    """The operands of an entered operation but those that a scan carries, as activations are."""
    if isinstance(eqn, Roll):
        return [*eqn.consts, *(x for row in eqn.lists for x in row)]
    if eqn.primitive.name != "scan":
        operands: Sequence[Any] = eqn.invars
        return operands
    first, carried = eqn.params["num_consts"], eqn.params["num_carry"]
    return [*eqn.invars[:first], *eqn.invars[first + carried :]]
