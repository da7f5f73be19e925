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
from typing import Any

import numpy as np

from fullshard.jax.compute.jaxprs import is_literal

__all__ = ["ELEMENTWISE", "REDUCTIONS", "Mixed", "example_dims"]


class Mixed(Exception):
    """Examples meet, or it cannot be told that they do not."""


Dim = int | None

_NAMES = """
abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp conj
convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
imag integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter not
optimization_barrier or pow real reduce_precision rem round rsqrt select_n sign sin sinh sqrt square
stop_gradient sub tan tanh xor
"""
ELEMENTWISE = frozenset(_NAMES.split())
_REDUCTIONS = "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum"
REDUCTIONS = tuple(_REDUCTIONS.split())
_CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"}
_CALLS |= {"custom_jvp_call"}
_SHAPES = """
shape new_sizes slice_sizes limit_indices jaxpr call_jaxpr branches sharding out_sharding
jvp_jaxpr_fun in_shardings out_shardings ctx_mesh name policy
"""
_SHAPED = frozenset(_SHAPES.split())
"""Parameters that may differ with the number of examples, or say nothing about values."""


def example_dims(whole: Any, part: Any, dims: Sequence[Dim], parts: int) -> list[Dim]:
    """Which dimension of each result is that of the examples; None: it depends on none of them.

    ``whole`` and ``part`` are the function's jaxprs over all examples and over one of ``parts``
    equal parts; ``dims`` tells the dimension of examples of each argument. Constants of the two
    must be the same.

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
        found = _through(eqn, other, given, parts)
        for out, twin, dim in zip(eqn.outvars, other.outvars, found, strict=True):
            _check(eqn, out.aval.shape, twin.aval.shape, dim, parts)
            known[out], twins[out] = dim, twin
    for mine, theirs in zip(whole.outvars, part.outvars, strict=True):
        if not _same(mine, theirs, twins):
            raise Mixed("it returns something else with fewer examples")
    return [None if is_literal(x) else known[x] for x in whole.outvars]


def _through(eqn: Any, other: Any, dims: list[Dim], parts: int) -> list[Dim]:
    """The dimension of examples of each result of one operation."""
    name = eqn.primitive.name
    if name in _CALLS:
        return example_dims(_inner(eqn), _inner(other), dims, parts)
    for key, value in eqn.params.items():
        if key not in _SHAPED and not _equal(value, other.params[key]):
            raise Mixed(f"{name} has another {key} with fewer examples")
    if all(dim is None for dim in dims):
        return [_fresh(eqn, each, parts) for each in zip(eqn.outvars, other.outvars, strict=True)]
    if name in ELEMENTWISE:
        return [_common(eqn, dims)] * len(eqn.outvars)
    rule = _RULES.get(name)
    if rule is None:
        raise Mixed(f"nothing is known of {name}")
    return rule(eqn, other, dims, parts)


def _fresh(eqn: Any, outs: tuple[Any, Any], parts: int) -> Dim:
    """Of a result that no example went into: only equal values may be as many as the examples."""
    shapes = [each.aval.shape for each in outs]
    if shapes[0] == shapes[1]:
        return None
    differ = [dim for dim, (a, b) in enumerate(zip(*shapes, strict=True)) if a != b]
    if eqn.primitive.name != "broadcast_in_dim" or len(differ) != 1:
        raise Mixed(f"{eqn.primitive.name} makes {tuple(shapes[0])} by the number of examples")
    if differ[0] in eqn.params["broadcast_dimensions"]:
        source = eqn.params["broadcast_dimensions"].index(differ[0])
        if eqn.invars[0].aval.shape[source] != 1:
            raise Mixed("an array that is no argument is as long as the batch")
    return differ[0]


def _check(eqn: Any, whole: Any, part: Any, dim: Dim, parts: int) -> None:
    expected = tuple(size // parts if number == dim else size for number, size in enumerate(whole))
    if tuple(part) != expected or (dim is not None and whole[dim] % parts):
        raise Mixed(f"{eqn.primitive.name} gives {tuple(part)} of {tuple(whole)}")


def _common(eqn: Any, dims: Sequence[Dim]) -> int:
    found = {dim for dim in dims if dim is not None}
    if len(found) != 1:
        raise Mixed(f"{eqn.primitive.name} of examples along different dimensions")
    return found.pop()


def _refuse(eqn: Any, dim: Dim, touched: Any) -> None:
    if dim in tuple(touched):
        raise Mixed(f"{eqn.primitive.name} over the examples")


def _broadcast(eqn: Any, other: Any, dims: list[Dim], parts: int) -> list[Dim]:
    return [eqn.params["broadcast_dimensions"][_common(eqn, dims)]]


def _reshape(eqn: Any, other: Any, dims: list[Dim], parts: int) -> list[Dim]:
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    twin, dim = other.outvars[0].aval.shape, _common(eqn, dims)
    differ = [number for number, (a, b) in enumerate(zip(after, twin, strict=True)) if a != b]
    if len(differ) != 1 or math.prod(before[:dim]) != math.prod(after[: differ[0]]):
        raise Mixed(f"a reshape of {before} to {after} spreads the examples")
    return [differ[0]]


def _transpose(eqn: Any, other: Any, dims: list[Dim], parts: int) -> list[Dim]:
    return [eqn.params["permutation"].index(_common(eqn, dims))]


def _squeeze(eqn: Any, other: Any, dims: list[Dim], parts: int) -> list[Dim]:
    dim, gone = _common(eqn, dims), eqn.params["dimensions"]
    _refuse(eqn, dim, gone)
    return [dim - sum(each < dim for each in gone)]


def _reduce(eqn: Any, other: Any, dims: list[Dim], parts: int) -> list[Dim]:
    dim, axes = _common(eqn, dims), eqn.params["axes"]
    _refuse(eqn, dim, axes)
    return [dim - sum(each < dim for each in axes)] * len(eqn.outvars)


def _along(key: str) -> Callable[..., list[Dim]]:
    """Of operations along one dimension, which keep all others."""

    def rule(eqn: Any, other: Any, dims: list[Dim], parts: int) -> list[Dim]:
        dim = _common(eqn, dims)
        _refuse(eqn, dim, (eqn.params[key],))
        if any(each is None and not is_literal(x) and x.aval.shape for each, x in
               zip(dims, eqn.invars, strict=True)):  # fmt: skip
            raise Mixed(f"{eqn.primitive.name} of examples beside what is none")
        return [dim] * len(eqn.outvars)

    return rule


def _slice(eqn: Any, other: Any, dims: list[Dim], parts: int) -> list[Dim]:
    dim, strides = _common(eqn, dims), eqn.params["strides"]
    shape = eqn.invars[0].aval.shape
    cut = eqn.params["limit_indices"][dim] - eqn.params["start_indices"][dim] != shape[dim]
    if cut or (strides is not None and strides[dim] != 1):
        raise Mixed("a slice of the examples")
    return [dim]


def _pad(eqn: Any, other: Any, dims: list[Dim], parts: int) -> list[Dim]:
    dim = dims[0]
    if dim is None or dims[1] is not None or any(eqn.params["padding_config"][dim]):
        raise Mixed("a padding of the examples")
    return [dim]


def _dynamic_slice(eqn: Any, other: Any, dims: list[Dim], parts: int) -> list[Dim]:
    dim = dims[0]
    if dim is None or any(each is not None for each in dims[1:]):
        raise Mixed("a slice whose place depends on an example")
    if eqn.params["slice_sizes"][dim] != eqn.invars[0].aval.shape[dim]:
        raise Mixed("a slice of the examples")
    return [dim]


def _dot(eqn: Any, other: Any, dims: list[Dim], parts: int) -> list[Dim]:
    (contract, batch) = eqn.params["dimension_numbers"]
    for dim, contracted in zip(dims, contract, strict=True):
        _refuse(eqn, dim, contracted)
    left, right = dims
    if left is not None and right is not None:
        pair = [at for at, each in enumerate(zip(*batch, strict=True)) if each == (left, right)]
        if not pair:
            raise Mixed("dot_general of examples with each other")
        return [pair[0]]
    side = 0 if left is not None else 1
    dim = dims[side]
    assert dim is not None
    if dim in batch[side]:
        raise Mixed("dot_general of examples with what is none")
    shapes = [len(each.aval.shape) for each in eqn.invars]
    free = [
        [at for at in range(shapes[one]) if at not in contract[one] and at not in batch[one]]
        for one in (0, 1)
    ]
    return [len(batch[0]) + (len(free[0]) if side else 0) + free[side].index(dim)]


def _convolution(eqn: Any, other: Any, dims: list[Dim], parts: int) -> list[Dim]:
    numbers = eqn.params["dimension_numbers"]
    if dims[1] is not None or dims[0] != numbers.lhs_spec[0]:
        raise Mixed("a convolution over the examples")
    if eqn.params["batch_group_count"] != 1:
        raise Mixed("a convolution of examples with each other")
    return [numbers.out_spec[0]]


def _window(eqn: Any, other: Any, dims: list[Dim], parts: int) -> list[Dim]:
    dim, given = _common(eqn, dims), eqn.params
    still = given["window_dimensions"][dim] == given["window_strides"][dim] == 1
    if not still or tuple(given["padding"][dim]) != (0, 0):
        raise Mixed("a window over the examples")
    return [dim]


def _take(eqn: Any, other: Any, dims: list[Dim], parts: int) -> list[Dim]:
    """Rows of a table that is no example, at places that each example names."""
    numbers = eqn.params["dimension_numbers"]
    if dims[0] is not None:
        raise Mixed("an example taken by its number")
    index, rank = dims[1], len(eqn.outvars[0].aval.shape)
    assert index is not None
    batch = [dim for dim in range(rank) if dim not in numbers.offset_dims]
    if index >= len(batch):
        raise Mixed("places that are spread over examples")
    return [batch[index]]


def _scan(eqn: Any, other: Any, dims: list[Dim], parts: int) -> list[Dim]:
    consts, carries = eqn.params["num_consts"], eqn.params["num_carry"]
    rest = consts + carries
    for dim in dims[rest:]:
        _refuse(eqn, dim, (0,))
    inside = [*dims[:rest], *(None if dim is None else dim - 1 for dim in dims[rest:])]
    bodies = eqn.params["jaxpr"].jaxpr, other.params["jaxpr"].jaxpr
    found = example_dims(bodies[0], bodies[1], inside, parts)
    if found[:carries] != dims[consts:rest]:
        raise Mixed("a scan in whose carry examples come and go")
    return [*found[:carries], *(None if dim is None else dim + 1 for dim in found[carries:])]


_WINDOWS = "reduce_window reduce_window_max reduce_window_sum"
_RULES: dict[str, Callable[..., list[Dim]]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "concatenate": _along("dimension"),
    "split": _along("axis"),
    "sort": _along("dimension"),
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], _along("axis")),
    "slice": _slice,
    "pad": _pad,
    "dynamic_slice": _dynamic_slice,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "gather": _take,
    "scan": _scan,
    **dict.fromkeys(REDUCTIONS, _reduce),
    **dict.fromkeys(_WINDOWS.split(), _window),
}


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
