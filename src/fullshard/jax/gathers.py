# SPDX-License-Identifier: Apache-2.0
"""From an array at rest to the array, and from its gradient to the gradient at rest.

Three ways to gather, of one signature: by explicit collectives inside `jax.shard_map`, by a
constraint that makes XLA insert them, and not at all, where everything was gathered before.

[Note: A gather's transpose]
The transpose of a gather is a reduce-scatter, so autodiff alone puts the reductions where they
belong: at the end of the backward of the unit whose forward gathered. A custom rule is needed for
the dtypes only: what is gathered in bf16 would be summed in bf16, and a sum over many devices wants
fp32.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fullshard.core.strategy import Precision
from fullshard.jax.mesh import BATCH_AXES
from fullshard.jax.placement import Form, Placement

__all__ = [
    "Gather",
    "constrained_gather",
    "explicit_gather",
    "explicit_reduce",
    "for_all",
    "has_conditional_collective",
    "pack",
    "resting_sharding",
    "resting_spec",
    "unpack",
]

Array = jax.Array


Gather = Callable[[Placement, Array], Array]
"""From what rests of one member of a placement (without the stack) to the member, in its true shape
and in the dtype of computation."""


def resting_spec(placement: Placement) -> PartitionSpec:
    """How the array at rest is cut, as a `PartitionSpec`."""
    return PartitionSpec(*placement.axes)


def resting_sharding(mesh: Mesh, placement: Placement) -> NamedSharding:
    """How the array at rest lies on the devices of ``mesh``."""
    return NamedSharding(mesh, resting_spec(placement))


def pack(placement: Placement, member: Array) -> Array:
    """One member in its true shape, as it rests: padded and flat, or as it is."""
    if placement.form is not Form.FLAT:
        return member
    length = placement.rest_shape[-1]
    return jnp.pad(member.reshape(-1), (0, length - member.size))


def unpack(placement: Placement, whole: Array) -> Array:
    """The inverse of `pack`."""
    if placement.form is not Form.FLAT:
        return whole
    return whole[: placement.members[0].numel].reshape(placement.shape)


def explicit_gather(mesh: Mesh, precision: Precision) -> Gather:
    """Gathers over fsdp and reduce-scatters back, inside `jax.shard_map` over ``mesh``.

    Full arrays have ``precision.compute``, gradients travel and are summed in
    ``precision.reduce``. On a hybrid mesh the slice that a reduce-scatter leaves is then summed
    over ``data``; the gradient of a replicated array is summed over both.
    """
    reduce = explicit_reduce(mesh, precision)

    def gather(placement: Placement, piece: Array) -> Array:
        return unpack(placement, _collect(placement, precision, reduce)(piece))

    return gather


def _collect(
    placement: Placement, precision: Precision, reduce: Gather
) -> Callable[[Array], Array]:
    full_dtype = precision.full_dtype(placement.dtype)

    @jax.custom_vjp
    def collect(piece: Array) -> Array:
        piece = piece.astype(full_dtype)
        if placement.form is Form.REPLICATED:
            return piece
        return lax.all_gather(piece, "fsdp", tiled=True)

    def forward(piece: Array) -> tuple[Array, None]:
        return collect(piece), None

    def backward(_: None, gradient: Array) -> tuple[Array]:
        return (reduce(placement, gradient),)

    collect.defvjp(forward, backward)
    return collect


def explicit_reduce(mesh: Mesh, precision: Precision) -> Gather:
    """The transpose: from one member's full packed gradient to this device's slice of the sum."""
    hybrid = mesh.shape["data"] > 1

    def reduce(placement: Placement, gradient: Array) -> Array:
        gradient = gradient.astype(precision.grad_dtype(placement.dtype))
        if placement.form is Form.REPLICATED:
            gradient = lax.psum(gradient, BATCH_AXES)
        else:
            gradient = lax.psum_scatter(gradient, "fsdp", tiled=True)
            gradient = lax.psum(gradient, "data") if hybrid else gradient
        return gradient.astype(placement.dtype)

    return reduce


def for_all(
    function: Gather, placements: Mapping[str, Placement], arrays: Mapping[str, Array]
) -> dict[str, Array]:
    """``function`` of each array; of stacks layer by layer.

    A collective over a stack's second dimension would have to take slices apart.
    """

    def changed(name: str, array: Array) -> Array:
        placement = placements[name]
        if not placement.stacked:
            return function(placement, array)
        return lax.map(lambda layer: function(placement, layer), array)

    return {name: changed(name, array) for name, array in arrays.items()}


_COLLECTIVES = frozenset({"all_gather", "reduce_scatter", "psum", "psum_invariant"})


def has_conditional_collective(jaxpr: Any, conditional: bool = False) -> bool:
    """Whether a collective stands in a branch or a while loop.

    Devices decide about these from their own part of the batch; where only some come to the
    collective, they wait forever.
    """
    for eqn in jaxpr.eqns:
        if conditional and eqn.primitive.name in _COLLECTIVES:
            return True
        inside = conditional or eqn.primitive.name in ("cond", "while")
        for value in eqn.params.values():
            for each in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(each, "jaxpr", each)
                if hasattr(inner, "eqns") and has_conditional_collective(inner, inside):
                    return True
    return False


def constrained_gather(mesh: Mesh, precision: Precision) -> Gather:
    """Gathers by a sharding constraint at the point of use, inside `jax.jit`.

    What is cut along the tensor axis stays so. XLA chooses the collectives, and in which dtype
    gradients are summed.
    """

    def gather(placement: Placement, piece: Array) -> Array:
        axes: tuple[Any, ...] = placement.axes[1:] if placement.stacked else placement.axes
        kept = PartitionSpec(*(axis if axis == "tensor" else None for axis in axes))
        whole = piece.astype(precision.full_dtype(placement.dtype))
        whole = lax.with_sharding_constraint(whole, NamedSharding(mesh, kept))
        return unpack(placement, whole)

    return gather
