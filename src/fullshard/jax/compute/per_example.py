# SPDX-License-Identifier: Apache-2.0
"""A proof that a function treats examples apart, so that each device may compute its own.

[Note: Two traces in step]
The function is traced twice: over all examples and over one device's. The two programs are walked
side by side. They must be the same operations with the same constants, and in each the dimension of
examples, which is where the two differ in shape, must pass through untouched: kept by elementwise
operations, carried along by reshapes and products, never summed over, sorted, drawn at random or
compared with another example. Of operations that are not listed here nothing is known, and nothing
is claimed: the function then is left to the compiler, which is always right.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from fullshard.jax.compute.jaxprs import call, is_literal, part

__all__ = ["ELEMENTWISE", "Mixed", "example_dims"]


class Mixed(Exception):
    """Examples meet, or it cannot be told that they do not."""


Dim = int | None
Check = Callable[[Any, list[Dim], list[Dim]], None]

_NAMES = """
abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp conj
convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
imag integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter not
optimization_barrier or pow real reduce_precision rem round rsqrt select_n sign sin sinh sqrt square
stop_gradient sub tan tanh xor
"""
ELEMENTWISE = frozenset(_NAMES.split())
_REDUCTIONS = "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum"
_CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"}
_CALLS |= {"custom_jvp_call"}
_SHAPES = """
shape new_sizes slice_sizes limit_indices jaxpr call_jaxpr branches sharding out_sharding
jvp_jaxpr_fun in_shardings out_shardings ctx_mesh name policy
"""
_SHAPED = frozenset(_SHAPES.split())
"""Parameters that may differ with the number of examples, or say nothing about values."""


def example_dims(
    whole: Any, part: Any, dims: Sequence[Dim], parts: int, rules: bool = True
) -> list[Dim]:
    """Which dimension of each result is that of the examples; None: it depends on none of them.

    ``whole`` and ``part`` are the function's jaxprs over all examples and over one of ``parts``
    equal parts; ``dims`` tells the dimension of examples of each argument. Constants of the two
    must be the same. With ``rules`` that holds of derivatives, too, whose rules are the user's.

    Raises:
        Mixed: with the reason; see [Note: Two traces in step].
    """
    if len(whole.eqns) != len(part.eqns) or len(whole.invars) != len(part.invars):
        raise Mixed("it does something else with fewer examples")
    known: dict[Any, Dim] = dict.fromkeys(whole.constvars)
    known.update(zip(whole.invars, dims, strict=True))
    twins = dict(zip((*whole.constvars, *whole.invars), (*part.constvars, *part.invars)))  # noqa: B905
    for eqn, other in zip(whole.eqns, part.eqns, strict=True):
        if eqn.primitive is not other.primitive or len(eqn.invars) != len(other.invars):
            raise Mixed(f"{eqn.primitive.name} is {other.primitive.name} with fewer examples")
        for mine, theirs in zip(eqn.invars, other.invars, strict=True):
            if not _same(mine, theirs, twins):
                raise Mixed(f"{eqn.primitive.name} takes other values with fewer examples")
        given = [None if is_literal(x) else known[x] for x in eqn.invars]
        found = _through(eqn, other, given, parts, rules)
        for out, twin, dim in zip(eqn.outvars, other.outvars, found, strict=True):
            _check(eqn, out.aval.shape, twin.aval.shape, dim, parts)
            known[out], twins[out] = dim, twin
    for mine, theirs in zip(whole.outvars, part.outvars, strict=True):
        if not _same(mine, theirs, twins):
            raise Mixed("it returns something else with fewer examples")
    return [None if is_literal(x) else known[x] for x in whole.outvars]


def _through(eqn: Any, other: Any, dims: list[Dim], parts: int, rules: bool) -> list[Dim]:
    """The dimension of examples of each result of one operation."""
    name = eqn.primitive.name
    if name == "custom_jvp_call" and rules:
        given = {x: dim for x, dim in zip(eqn.invars, dims, strict=True) if not is_literal(x)}
        example_dims(_tangents(eqn), _tangents(other), [*given.values()] * 2, parts, False)
    if name in _CALLS:
        return example_dims(_inner(eqn), _inner(other), dims, parts, rules)
    for key, value in eqn.params.items():
        if key not in _SHAPED and not _equal(value, other.params[key]):
            raise Mixed(f"{name} has another {key} with fewer examples")
    found = [_differing(eqn, *each) for each in zip(eqn.outvars, other.outvars, strict=True)]
    if all(dim is None for dim in dims):
        for out, dim in zip(eqn.outvars, found, strict=True):
            _refuse_counted(eqn, out, dim)
        return found
    if name == "scan":
        return _scan(eqn, other, dims, parts, rules)
    check = _CHECKS.get(name)
    if check is None and name not in ELEMENTWISE:
        raise Mixed(f"nothing is known of {name}")
    if check is not None:
        check(eqn, dims, found)
    if None in found:
        raise Mixed(f"{name} over the examples")
    return found


def _differing(eqn: Any, whole: Any, part: Any) -> Dim:
    """The dimension in which a result differs between the two traces."""
    pairs = zip(whole.aval.shape, part.aval.shape, strict=True)
    found = [dim for dim, (mine, theirs) in enumerate(pairs) if mine != theirs]
    if len(found) > 1:
        raise Mixed(f"{eqn.primitive.name} of examples with each other")
    return found[0] if found else None


def _refuse_counted(eqn: Any, out: Any, dim: Dim) -> None:
    """Refuse a result without examples in it that is as long as they are many, unless equal."""
    if dim is None:
        return
    if eqn.primitive.name != "broadcast_in_dim":
        raise Mixed(f"{eqn.primitive.name} makes {tuple(out.aval.shape)} by the number of examples")
    if dim in eqn.params["broadcast_dimensions"]:
        source = eqn.params["broadcast_dimensions"].index(dim)
        if eqn.invars[0].aval.shape[source] != 1:
            raise Mixed("an array that is no argument is as long as the batch")


def _check(eqn: Any, whole: Any, part: Any, dim: Dim, parts: int) -> None:
    expected = tuple(size // parts if number == dim else size for number, size in enumerate(whole))
    if tuple(part) != expected or (dim is not None and whole[dim] % parts):
        raise Mixed(f"{eqn.primitive.name} gives {tuple(part)} of {tuple(whole)}")


def _only(eqn: Any, dims: Sequence[Dim]) -> int:
    found = {dim for dim in dims if dim is not None}
    if len(found) != 1:
        raise Mixed(f"{eqn.primitive.name} of examples along different dimensions")
    return found.pop()


def _anything(eqn: Any, dims: list[Dim], found: list[Dim]) -> None:
    """Judge operations that keep examples in order wherever they leave them at all."""


def _reshape(eqn: Any, dims: list[Dim], found: list[Dim]) -> None:
    """Examples must stay outermost of what they are merged with, in the same order."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if found[0] is None or math.prod(before[: dims[0]]) != math.prod(after[: found[0]]):
        raise Mixed(f"a reshape of {before} to {after} spreads the examples")


def _along(key: str) -> Check:
    """Judge operations along dimensions, which keep all others."""

    def check(eqn: Any, dims: list[Dim], found: list[Dim]) -> None:
        along = eqn.params[key]
        if _only(eqn, dims) in (along if isinstance(along, Sequence) else (along,)):
            raise Mixed(f"{eqn.primitive.name} over the examples")

    return check


def _slice(eqn: Any, dims: list[Dim], found: list[Dim]) -> None:
    """All examples must be taken; where a slice begins may depend on none of them."""
    shapes = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if dims[0] is None or any(each is not None for each in dims[1:]):
        raise Mixed("a slice whose place depends on an example")
    if shapes[0][dims[0]] != shapes[1][dims[0]]:
        raise Mixed("a slice of the examples")


def _pad(eqn: Any, dims: list[Dim], found: list[Dim]) -> None:
    if dims[0] is None or dims[1] is not None or any(eqn.params["padding_config"][dims[0]]):
        raise Mixed("a padding of the examples")


def _convolution(eqn: Any, dims: list[Dim], found: list[Dim]) -> None:
    if dims[1] is not None or dims[0] != eqn.params["dimension_numbers"].lhs_spec[0]:
        raise Mixed("a convolution over the examples")
    if eqn.params["batch_group_count"] != 1:
        raise Mixed("a convolution of examples with each other")


def _window(eqn: Any, dims: list[Dim], found: list[Dim]) -> None:
    dim, given = _only(eqn, dims), eqn.params
    still = given["window_dimensions"][dim] == given["window_strides"][dim] == 1
    if not still or tuple(given["padding"][dim]) != (0, 0):
        raise Mixed("a window over the examples")


def _take(eqn: Any, dims: list[Dim], found: list[Dim]) -> None:
    """Rows of a table that is no example, at places that each example names."""
    if dims[0] is not None:
        raise Mixed("an example taken by its number")


def _scan(eqn: Any, other: Any, dims: list[Dim], parts: int, rules: bool) -> list[Dim]:
    consts, carries = eqn.params["num_consts"], eqn.params["num_carry"]
    rest = consts + carries
    if 0 in dims[rest:]:
        raise Mixed("scan over the examples")
    inside = [*dims[:rest], *(None if dim is None else dim - 1 for dim in dims[rest:])]
    bodies = eqn.params["jaxpr"].jaxpr, other.params["jaxpr"].jaxpr
    found = example_dims(bodies[0], bodies[1], inside, parts, rules)
    if found[:carries] != dims[consts:rest]:
        raise Mixed("a scan in whose carry examples come and go")
    return [*found[:carries], *(None if dim is None else dim + 1 for dim in found[carries:])]


_FREE = "broadcast_in_dim transpose squeeze dot_general"
_WINDOWS = "reduce_window reduce_window_max reduce_window_sum"
_CUMULATIVE = "cumsum cumprod cummax cummin cumlogsumexp split"
_CHECKS: dict[str, Check] = {
    **dict.fromkeys(_FREE.split(), _anything),
    "reshape": _reshape,
    **dict.fromkeys(["concatenate", "sort"], _along("dimension")),
    **dict.fromkeys(_CUMULATIVE.split(), _along("axis")),
    **dict.fromkeys(_REDUCTIONS.split(), _along("axes")),
    **dict.fromkeys(["slice", "dynamic_slice"], _slice),
    "pad": _pad,
    "conv_general_dilated": _convolution,
    "gather": _take,
    **dict.fromkeys(_WINDOWS.split(), _window),
}
"""Conditions on the dimension of examples, in which the two traces differ."""


def _tangents(eqn: Any) -> Any:
    """Results and tangents of an operation whose rule of differentiation is the user's."""
    atoms = list(dict.fromkeys(x for x in eqn.invars if not is_literal(x)))
    alone = partial(call, part([eqn], atoms, eqn.outvars))
    avals = [x.aval for x in atoms]
    closed = jax.make_jaxpr(lambda *each: jax.jvp(alone, *each))(avals, avals)
    if closed.consts:
        raise Mixed(f"{eqn.primitive.name} holds arrays of its own")
    return closed.jaxpr


def _inner(eqn: Any) -> Any:
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if getattr(inner, "consts", ()):
        raise Mixed(f"{eqn.primitive.name} holds arrays of its own")
    return getattr(inner, "jaxpr", inner)


def _same(mine: Any, theirs: Any, twins: dict[Any, Any]) -> bool:
    """Whether two operands are the same constant, or made alike."""
    if is_literal(mine) != is_literal(theirs):
        return False
    if is_literal(mine):
        return _equal(mine.val, theirs.val)
    return twins.get(mine) is theirs


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        return bool(np.array_equal(one, other)) if hasattr(one, "shape") else bool(one == other)
    except (TypeError, ValueError):
        return False
