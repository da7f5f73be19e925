# SPDX-License-Identifier: Apache-2.0
"""A program over whole arrays, carried out on the arrays as they rest.

[Note: Lanes]
An optimizer is a function of arrays in their true shapes: masks ask for ``ndim``, labels for paths,
trust ratios for the norm of each array. At rest arrays are padded, flat, and stacked by layers. So
the optimizer is traced once over the true shapes, which allocates nothing, and the trace (a jaxpr)
is then carried out step by step on what rests:

- an array that belongs to a parameter is a *lane*: it stands for all members of the parameter's
  placement at once, and what is computed for one member is found again, not computed again, when
  the same is asked for the next. If members of a stack are treated differently that shows, because
  what is asked for is not the same.
- an elementwise operation is the same operation at rest.
- a reduction over all of an array is one over what rests without the padding, for each layer.
- scalars of different lanes meet (a global norm): each is taken from its lane.
- anything else (a transposition, a row's mean, a product of matrices) needs arrays as they are, and
  `NotElementwise` says which operation that was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jax_core

from fullshard.jax.placement import Form, Placement

__all__ = ["Lane", "NotElementwise", "Uniform", "carry_out", "fill", "members_of"]


class NotElementwise(Exception):
    """The program does something that only whole arrays allow."""


@dataclass(frozen=True, eq=False)
class Lane:
    """One member's array, held as the array at rest of all members of its placement.

    ``shape`` is the member's, as the program sees it. With ``each`` there is one value for each
    member, the same for all elements: ``array`` is (layers,) for a stack and () else.
    """

    placement: Placement
    member: int
    array: Any
    shape: tuple[int, ...]
    each: bool = False

    @property
    def home(self) -> tuple[str, int]:
        """The parameter whose lane this is."""
        return self.placement.name, self.member

    def alone(self) -> Any:
        """This member's scalar, apart from its lane."""
        value = self.array[self.member] if self.placement.stacked else self.array
        # A parameter that is a scalar itself may rest padded.
        return value if self.each or jnp.ndim(value) == 0 else value.reshape(-1)[0]


@dataclass(frozen=True, eq=False)
class Uniform:
    """An array of equal elements that no parameter owns yet."""

    value: Any
    shape: tuple[int, ...]


_NAMES = """
abs add add_any and atan2 cbrt ceil clamp conj convert_element_type copy copy_p cos cosh div eq
erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le log log1p logistic lt
max min mul ne neg nextafter not or pow real reduce_precision rem round rsqrt select_n sign sin
sinh sqrt square stop_gradient sub tan tanh xor
"""
_ELEMENTWISE = frozenset(_NAMES.split())
_REDUCTIONS = {
    "reduce_sum": 0,
    "reduce_max": -jnp.inf,
    "reduce_min": jnp.inf,
    "reduce_and": True,
    "reduce_or": False,
}
_SAME_ORDER = {"reshape", "squeeze", "expand_dims"}


def carry_out(closed: Any, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of a `jax.make_jaxpr`: lanes, uniforms and plain arrays, like ``inputs``.

    Raises:
        NotElementwise: see [Note: Lanes].
    """
    return _Program().run(closed.jaxpr, closed.consts, inputs)


def fill(placement: Placement, value: Any, dtype: Any) -> Any:
    """``value`` (a scalar, or one for each layer) in the shape at rest."""
    value = jnp.asarray(value, dtype)
    value = value.reshape(value.shape + (1,) * (len(placement.rest_shape) - value.ndim))
    return jnp.broadcast_to(value, placement.rest_shape)


class _Program:
    def __init__(self) -> None:
        self._known: dict[Any, list[Any]] = {}
        # Scalars apart from their lane, with what keeps their key's identity; and those that
        # several lanes have made together, which are of none.
        self._alone: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._met: dict[int, Any] = {}

    def run(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Any:
            return _Known(atom) if isinstance(atom, jax_core.Literal) else values[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            inner = _inner(eqn)
            if inner is not None:
                results = self.run(inner[0], inner[1], operands)
            else:
                results = self._step(eqn, operands)
            values.update(zip(eqn.outvars, results, strict=True))
        return [_plain(read(atom)) for atom in jaxpr.outvars]

    def _step(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """One operation; if the same was done for another member of a lane, its result."""
        operands, met = self._meet(eqn, operands)
        key = _key(eqn, operands)
        lane = next((x for x in operands if isinstance(x, Lane)), None)
        if key is None:
            return self._compute(eqn, operands, lane)
        if key not in self._known:
            # Operands stay alive with the entry, so that no other object gets their identity.
            self._known[key] = [self._compute(eqn, operands, lane), operands]
        results = self._known[key][0]
        if lane is None:
            if met:
                self._met.update((id(x), x) for x in results)
            return results
        return [
            Lane(x.placement, lane.member, x.array, x.shape, x.each) if isinstance(x, Lane) else x
            for x in results
        ]

    def _meet(self, eqn: Any, operands: list[Any]) -> tuple[list[Any], bool]:
        """Operands of at most one lane; whether some were taken from theirs, now or before.

        Where lanes meet, their scalars stand for themselves alone: in a global norm, and in what is
        made of it. The scalar that an array meets is not taken from the array's own lane.
        """
        lanes = [x for x in operands if isinstance(x, Lane)]
        arrays = {x.home for x in lanes if x.shape}
        if len(arrays) > 1:
            raise NotElementwise(f"{eqn.primitive.name} of two different parameters' arrays")
        met = any(id(x) in self._met for x in operands)
        if len({x.home for x in lanes}) < 2 and not (met and not arrays):
            return operands, met
        return [
            self._taken(x) if isinstance(x, Lane) and x.home not in arrays else x for x in operands
        ], True

    def _taken(self, lane: Lane) -> Any:
        key = (id(lane.array), lane.member)
        if key not in self._alone:
            self._alone[key] = lane.alone(), lane.array
        return self._alone[key][0]

    def _compute(self, eqn: Any, operands: list[Any], lane: Lane | None) -> list[Any]:
        shape = tuple(eqn.outvars[0].aval.shape)
        if lane is None:
            return _without_lanes(eqn, operands, shape)
        name = eqn.primitive.name
        if name in _ELEMENTWISE:
            return [_elementwise(eqn, operands, lane, shape)]
        if name in _REDUCTIONS and len(eqn.params["axes"]) == len(lane.shape) and not lane.each:
            return [_reduce(eqn, lane)]
        if name in _SAME_ORDER and eqn.params.get("dimensions") in (None, *_all_dims(eqn)):
            return [Lane(lane.placement, lane.member, lane.array, shape, lane.each)]
        if name == "broadcast_in_dim" and (lane.each or lane.shape == shape):
            return [Lane(lane.placement, lane.member, lane.array, shape, lane.each)]
        if name == "dot_general" and len(operands) == 2 and shape == ():
            return [_inner_product(eqn, operands)]
        path = lane.placement.members[lane.member].name
        raise NotElementwise(f"{name} of an array of {path} {lane.shape}")


def _all_dims(eqn: Any) -> list[Any]:
    # A squeeze names the dimensions it drops; all orders of elements stay.
    return [eqn.params.get("dimensions")] if eqn.primitive.name != "reshape" else []


@dataclass(frozen=True)
class _Known:
    """A literal of the program."""

    atom: Any

    @property
    def value(self) -> Any:
        return self.atom.val


def _plain(x: Any) -> Any:
    return jnp.asarray(x.value, x.atom.aval.dtype) if isinstance(x, _Known) else x


def _key(eqn: Any, operands: Sequence[Any]) -> Any:
    def identity(x: Any) -> Any:
        if isinstance(x, _Known):
            return ("literal", str(x.atom.aval), repr(x.value))
        if isinstance(x, Lane):
            return (id(x.array), x.shape, x.each)
        return (id(x.value), x.shape) if isinstance(x, Uniform) else id(x)

    shapes = tuple(str(var.aval) for var in eqn.outvars)
    key = (eqn.primitive.name, tuple(sorted(eqn.params.items(), key=lambda item: item[0])))
    try:
        hash(key)
    except TypeError:
        return None
    return (*key, shapes, *map(identity, operands))


def _inner(eqn: Any) -> tuple[Any, Sequence[Any]] | None:
    """The program inside of a call (jit, a custom derivative, a checkpoint), if ``eqn`` is one."""
    if eqn.primitive.name in ("cond", "while", "scan"):
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(name)
        if inner is not None:
            closed = hasattr(inner, "jaxpr")
            return (inner.jaxpr, inner.consts) if closed else (inner, ())
    return None


def _without_lanes(eqn: Any, operands: list[Any], shape: tuple[int, ...]) -> list[Any]:
    name = eqn.primitive.name
    operands = [_plain(x) for x in operands]
    scalars = all(isinstance(x, Uniform) or jnp.ndim(x) == 0 for x in operands)
    uniform = any(isinstance(x, Uniform) for x in operands)
    if name == "broadcast_in_dim" and scalars and operands:
        value = operands[0].value if uniform else operands[0]
        return [Uniform(value, shape)]
    if uniform and scalars and name in _ELEMENTWISE:
        values = [x.value if isinstance(x, Uniform) else x for x in operands]
        return [Uniform(_bind(eqn, values)[0], shape)]
    whole = [jnp.broadcast_to(x.value, x.shape) if isinstance(x, Uniform) else x for x in operands]
    return _bind(eqn, whole)


def _bind(eqn: Any, operands: Sequence[Any], **changed: Any) -> list[Any]:
    results = eqn.primitive.bind(*operands, **{**eqn.params, **changed})
    return list(results) if eqn.primitive.multiple_results else [results]


def _elementwise(eqn: Any, operands: list[Any], lane: Lane, shape: tuple[int, ...]) -> Lane:
    each = all(x.each for x in operands if isinstance(x, Lane))
    target = next((x for x in operands if isinstance(x, Lane) and not x.each), lane).array.shape
    arrays = []
    for x in operands:
        if isinstance(x, Lane):
            array = x.array
            if x.each and not each:
                array = array.reshape(array.shape + (1,) * (len(target) - array.ndim))
        else:
            array = x.value if isinstance(x, Uniform) else _plain(x)
            if jnp.ndim(array):
                raise NotElementwise(f"{eqn.primitive.name} with an array of shape {array.shape}")
        arrays.append(jnp.broadcast_to(array, target))
    return Lane(lane.placement, lane.member, _bind(eqn, arrays)[0], shape, each)


def _reduce(eqn: Any, lane: Lane) -> Lane:
    placement, array = lane.placement, lane.array
    if placement.form is Form.FLAT:
        neutral = _REDUCTIONS[eqn.primitive.name]
        true = jnp.arange(placement.rest_shape[-1]) < placement.members[0].numel
        if not jnp.issubdtype(array.dtype, jnp.floating) and jnp.issubdtype(
            array.dtype, jnp.number
        ):
            limits = jnp.iinfo(array.dtype)
            neutral = {-jnp.inf: limits.min, jnp.inf: limits.max}.get(neutral, neutral)
        array = jnp.where(true, array, jnp.asarray(neutral, array.dtype))
    axes = tuple(range(int(placement.stacked), array.ndim))
    array = _bind(eqn, [array], axes=axes)[0] if axes else array
    return Lane(placement, lane.member, array, (), each=True)


def _inner_product(eqn: Any, operands: list[Any]) -> Lane:
    left, right = operands
    contracted = eqn.params["dimension_numbers"][0]
    if not (isinstance(left, Lane) and isinstance(right, Lane)) or left.each or right.each:
        raise NotElementwise("dot_general of an array with one that is no parameter's")
    if any(tuple(dims) != tuple(range(len(left.shape))) for dims in contracted):
        raise NotElementwise(f"dot_general of arrays of {left.placement.name} {left.shape}")
    placement = left.placement
    product = left.array * right.array
    if placement.form is Form.FLAT:
        true = jnp.arange(placement.rest_shape[-1]) < placement.members[0].numel
        product = jnp.where(true, product, 0)
    axes = tuple(range(int(placement.stacked), product.ndim))
    return Lane(placement, left.member, product.sum(axes), (), each=True)


def members_of(placements: Mapping[str, Placement]) -> dict[str, tuple[Placement, int]]:
    """By path of each parameter: the placement that it rests in, and which member of it it is."""
    return {
        spec.name: (placement, number)
        for placement in placements.values()
        for number, spec in enumerate(placement.members)
    }
