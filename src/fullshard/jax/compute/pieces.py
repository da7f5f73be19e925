# SPDX-License-Identifier: Apache-2.0
"""Operations that a cut weight goes through without being gathered, and what cuts the result."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from fullshard.jax.compute.jaxprs import is_literal
from fullshard.jax.compute.per_example import ELEMENTWISE, REDUCTIONS
from fullshard.jax.compute.rolled import Roll

__all__ = ["Weight", "array_of", "axes_after", "before_scans"]

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


def axes_after(eqn: Any, operands: Sequence[Any]) -> Axes | None:
    """Return the axes that cut what an operation makes of pieces; None if it needs it whole."""
    name = eqn.primitive.name
    rule = _elementwise if name in ELEMENTWISE else _RULES.get(name)
    return rule(eqn, operands) if rule and len(eqn.outvars) == 1 else None


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


def _elementwise(eqn: Any, operands: Sequence[Any]) -> Axes | None:
    shape = eqn.outvars[0].aval.shape
    arrays = [x for x in operands if jnp.shape(array_of(x))]
    if not all(isinstance(x, Weight) and x.array.shape == shape for x in arrays):
        return None
    return _common(arrays)


def _common(weights: Sequence[Any]) -> Axes | None:
    found = {x.axes for x in weights}
    return found.pop() if len(found) == 1 else None


def _slice(eqn: Any, operands: Sequence[Any]) -> Axes | None:
    """Return the axes of a layer that is taken out of a stack by hand."""
    weight = operands[0]
    if not isinstance(weight, Weight) or any(isinstance(x, Weight) for x in operands[1:]):
        return None
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    touched = [a != b for a, b in zip(before, after, strict=True)]
    if any(axis is not None and cut for axis, cut in zip(weight.axes, touched, strict=True)):
        return None
    return weight.axes


def _squeeze(eqn: Any, operands: Sequence[Any]) -> Axes | None:
    axes, gone = operands[0].axes, eqn.params["dimensions"]
    if any(axes[dim] is not None for dim in gone):
        return None
    return tuple(axis for dim, axis in enumerate(axes) if dim not in gone)


def _transpose(eqn: Any, operands: Sequence[Any]) -> Axes | None:
    return tuple(operands[0].axes[dim] for dim in eqn.params["permutation"])


def _reshape(eqn: Any, operands: Sequence[Any]) -> Axes | None:
    """Return the axes after a reshape that leaves the dimensions that are cut as they are."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    axes: list[Any] = [None] * len(after)
    for dim, axis in enumerate(operands[0].axes):
        if axis is None:
            continue
        same = [
            at
            for at, size in enumerate(after)
            if size == before[dim] and math.prod(after[:at]) == math.prod(before[:dim])
        ]
        if not same:
            return None
        axes[same[0]] = axis
    return tuple(axes)


def _broadcast(eqn: Any, operands: Sequence[Any]) -> Axes | None:
    """Return the axes after new dimensions of one element.

    None if elements are repeated: that is better done after a weight was sent.
    """
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if math.prod(before) != math.prod(after):
        return None
    axes: list[Any] = [None] * len(after)
    for axis, dim in zip(operands[0].axes, eqn.params["broadcast_dimensions"], strict=True):
        axes[dim] = axis
    return tuple(axes)


def _concatenate(eqn: Any, operands: Sequence[Any]) -> Axes | None:
    if not all(isinstance(x, Weight) for x in operands):
        return None
    axes = _common(operands)
    return axes if axes is not None and axes[eqn.params["dimension"]] is None else None


def _stack(eqn: Any, operands: Sequence[Any]) -> Axes | None:
    axes = _common(operands) if all(isinstance(x, Weight) for x in operands) else None
    new = eqn.params["axis"]
    return None if axes is None else (*axes[:new], None, *axes[new:])


def _reverse(eqn: Any, operands: Sequence[Any]) -> Axes | None:
    axes: Axes = operands[0].axes
    return None if any(axes[dim] is not None for dim in eqn.params["dimensions"]) else axes


def _reduce(eqn: Any, operands: Sequence[Any]) -> Axes | None:
    """Return the axes of a weight's sum or norm.

    Devices exchange their results instead of the weight.
    """
    gone = eqn.params["axes"]
    return tuple(axis for dim, axis in enumerate(operands[0].axes) if dim not in gone)


_RULES: dict[str, Callable[[Any, Sequence[Any]], Axes | None]] = {
    "slice": _slice,
    "dynamic_slice": _slice,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "stack": _stack,
    "rev": _reverse,
    **dict.fromkeys((name for name in REDUCTIONS if name.startswith("reduce_")), _reduce),
}
