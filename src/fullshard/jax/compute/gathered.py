# SPDX-License-Identifier: Apache-2.0
"""`gathered`: one layer whose weights are gathered, in one piece, where it is computed.

[Note: One collective for a layer]
The slices of a layer's weights are laid one behind the other, gathered by one collective for each
dtype, and taken apart again; gradients go back the same way, through one reduce-scatter, in the
dtype of reduction. Weights of half a MiB and more travel alone: no message gets faster by being
larger, and packing copies. That happens inside `jax.shard_map`, where each device computes the
layer for its own examples, so it is done only where that is the same mathematics: see
[Note: Two traces in step].
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.sharding import AbstractMesh, PartitionSpec

from fullshard.jax.arrays.leaves import is_array
from fullshard.jax.arrays.mesh import Layout
from fullshard.jax.compute.context import Program, current
from fullshard.jax.compute.jaxprs import call
from fullshard.jax.compute.jaxprs import part as part_of
from fullshard.jax.compute.per_example import Dim, Mixed, example_dims

__all__ = ["gathered", "padded"]


_ALONE_BYTES = 1 << 19


@dataclass(frozen=True)
class _Layer:
    """One call of a layer: its program over one device's examples, and where examples are.

    ``given`` and ``found`` are the dimensions of examples of its operands (constants, weights,
    arguments) and results.
    """

    part: Any  # jax.extend.core.Jaxpr, without constants
    given: tuple[Dim, ...]
    found: tuple[Dim, ...]


def gathered(layer: Any) -> Callable[..., Any]:
    """``layer``, with weights that are gathered where it is called and dropped after.

    ``layer`` is a function of ``(weights, *args, **kwargs)``, ``weights`` being a pytree, or an
    `nnx.Module` or a method of one, which is called without its weights. Call it in the body of a
    scan over stacked layers, or wherever a layer is called. Arrays in ``args`` whose first
    dimension is the batch are examples; pass them as arguments rather than closing over them.

    In a step of `fullshard.jax.make_train_step` a layer that provably treats examples apart is
    computed by each device for its own, with one gather and one reduce-scatter for each dtype.
    Any other is left to XLA, with a note that says why; the mathematics is that of the whole batch
    either way. Outside of such a step it is the layer itself. To compute it again in backward, put
    `jax.checkpoint` around the scan's body as always.
    """
    module = layer if isinstance(layer, nnx.Module) else getattr(layer, "__self__", None)
    if isinstance(module, nnx.Module):
        method = type(module).__call__ if layer is module else layer.__func__
        return functools.partial(_call_module, method, module)
    name = getattr(layer, "__name__", type(layer).__name__)

    def function(weights: Any, args: Any, kwargs: Any) -> Any:
        return layer(weights, *args, **kwargs)

    return lambda weights, *args, **kwargs: _call(function, name, weights, args, kwargs)


def _call_module(method: Any, module: nnx.Module, *args: Any, **kwargs: Any) -> Any:
    program = current()
    if program is None or program.mode != "weights":
        return method(module, *args, **kwargs)
    split: Any = nnx.split(module, nnx.Param, ...)
    graph, weights, rest = split

    def function(weights: Any, rest: Any, args: Any, kwargs: Any) -> Any:
        here = nnx.merge(graph, weights, rest)
        result = method(here, *args, **kwargs)
        return result, nnx.state(here, nnx.Not(nnx.Param))

    result, after = _call(function, type(module).__name__, weights, rest, args, kwargs)
    nnx.update(module, after)
    return result


def _call(layer: Callable[..., Any], name: str, weights: Any, *args: Any) -> Any:
    program = current()
    if program is None or program.mode != "weights":
        return layer(weights, *args)
    layout = program.layout
    if not layout.only_batch or layout.parts == 1 or program.rows % layout.parts:
        return layer(weights, *args)
    leaves, treedef = jax.tree.flatten((weights, args))
    places = [place for place, leaf in enumerate(leaves) if is_array(leaf)]
    count = len([leaf for leaf in jax.tree.leaves(weights) if is_array(leaf)])
    arrays = [leaves[place] for place in places]
    trees: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        full = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            full[place] = array
        weights, args = jax.tree.unflatten(treedef, full)
        results, tree = jax.tree.flatten(layer(weights, *args))
        trees.append(tree)
        return results

    site = _prove(program, flat, arrays, count, name)
    if site is None:
        return layer(weights, *args)
    found, consts, whole = site
    plain = functools.partial(call, whole)
    own = functools.partial(_carry_out, found)
    results = program.mark(f"gathered_{name}", own, plain, *consts, *arrays)
    return jax.tree.unflatten(trees[0], results)


def _prove(
    program: Program, flat: Callable[..., Any], arrays: Sequence[Any], weights: int, name: str
) -> tuple[_Layer, list[Any], Any] | None:
    """The site, the constants that come before its operands, and its program over all examples."""
    shapes = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in arrays]
    whole = jax.make_jaxpr(flat)(*shapes)
    like = [at for at, x in enumerate(shapes) if at >= weights and x.shape[:1] == (program.rows,)]
    # What is as long as the batch by chance comes behind the first argument.
    for examples in (like, like[:1]):
        dims: list[Dim] = [0 if at in examples else None for at in range(len(shapes))]
        try:
            part, found = _apart(flat, shapes, dims, whole, program.layout.parts)
            break
        except Exception as error:
            # Tracing with fewer examples may fail in any way; with all of them it has worked.
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
    else:
        program.findings.note(f"{name} is left to XLA: {said}")
        return None
    dims = [*(None for _ in whole.consts), *dims]
    closed = [_without_constants(each) for each in (whole.jaxpr, part)]
    return _Layer(closed[1], tuple(dims), tuple(found)), list(whole.consts), closed[0]


def _apart(
    flat: Callable[..., Any], shapes: Sequence[Any], dims: Sequence[Dim], whole: Any, parts: int
) -> tuple[Any, list[Dim]]:
    """The program over one device's examples, and where examples are in its results."""
    own = [
        x if dim is None else jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]), x.dtype)
        for x, dim in zip(shapes, dims, strict=True)
    ]
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # a device's own, in any mesh
        part = jax.make_jaxpr(flat)(*own)
    same = len(whole.consts) == len(part.consts)
    if not same or not all(map(_same_constant, whole.consts, part.consts)):
        raise Mixed("its constants depend on the number of examples")
    return part.jaxpr, example_dims(whole.jaxpr, part.jaxpr, dims, parts)


def _carry_out(
    site: _Layer, operands: Sequence[Any], axes: Sequence[Any], program: Program
) -> list[Any]:
    """The layer's results, computed by each device for its own examples."""
    layout, precision = program.layout, program.precision
    shapes = [x.shape for x in operands]
    cut = [_dim_of(layout, each) for each in axes]
    operands = [
        x if dim is None else padded(x, dim, layout.shards)
        for x, dim in zip(operands, cut, strict=True)
    ]

    def local(*operands: Any) -> list[Any]:
        full = list(operands)
        groups: dict[Any, list[int]] = {}
        for number, dim in enumerate(cut):
            if dim is not None:
                dtype = operands[number].dtype
                alone = operands[number].nbytes * layout.shards >= _ALONE_BYTES
                groups.setdefault((dtype, number if alone else None), []).append(number)
        for (dtype, _), numbers in groups.items():
            gather = _packed_gather(
                layout,
                tuple((shapes[number], cut[number]) for number in numbers),
                jnp.dtype(precision.reduce) if precision.reduce else dtype,
            )
            for number, each in zip(numbers, gather(*(full[n] for n in numbers)), strict=True):
                full[number] = each
        return call(site.part, *full)

    def spec(dim: Dim) -> PartitionSpec:
        return PartitionSpec() if dim is None else PartitionSpec(*(None,) * dim, layout.examples)

    in_specs = tuple(
        PartitionSpec(*(None,) * dim, layout.weights) if dim is not None else spec(given)
        for dim, given in zip(cut, site.given, strict=True)
    )
    mapped = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=in_specs,
        out_specs=[spec(dim) for dim in site.found],
        check_vma=False,
    )
    return mapped(*operands)


def _packed_gather(layout: Layout, pieces: tuple[Any, ...], reduce: Any) -> Callable[..., Any]:
    """Whole arrays of slices, by one collective; ``pieces`` are shapes and the dimensions cut."""
    count, axis = layout.shards, layout.shard

    def full(slices: Sequence[Array]) -> list[Array]:
        packed = jnp.concatenate([x.reshape(-1) for x in slices])
        rows = lax.all_gather(packed, axis)
        found, start = [], 0
        for x, (shape, dim) in zip(slices, pieces, strict=True):
            piece = rows[:, start : start + x.size].reshape(count, *x.shape)
            piece = jnp.moveaxis(piece, 0, dim)
            whole = piece.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])
            found.append(lax.slice_in_dim(whole, 0, shape[dim], axis=dim))
            start += x.size
        return found

    @jax.custom_vjp
    def gather(*slices: Array) -> list[Array]:
        return full(slices)

    def backward(slices: Any, gradients: Sequence[Array]) -> tuple[Array, ...]:
        rows, shapes = [], []
        for gradient, (_, dim) in zip(gradients, pieces, strict=True):
            x = padded(gradient, dim, count)
            x = x.reshape(*x.shape[:dim], count, -1, *x.shape[dim + 1 :])
            x = jnp.moveaxis(x, dim, 0)
            shapes.append(x.shape[1:])
            rows.append(x.reshape(count, -1).astype(reduce))
        dtype = gradients[0].dtype
        summed = lax.psum_scatter(jnp.concatenate(rows, 1), axis).astype(dtype)
        ends = np.cumsum([each.shape[1] for each in rows])[:-1]
        parts = jnp.split(summed, ends)
        return tuple(x.reshape(shape) for x, shape in zip(parts, shapes, strict=True))

    # Forward must show its collective to the policy of `jax.checkpoint`, so it calls `full` itself.
    gather.defvjp(lambda *slices: (full(slices), None), backward)
    return gather


def padded(x: Array, dim: int, count: int) -> Array:
    """``x`` with zeros at the end of ``dim``, so that ``count`` divides it."""
    missing = -x.shape[dim] % count
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if at == dim else 0) for at in range(x.ndim)])


def _dim_of(layout: Layout, axes: Any) -> int | None:
    return axes.index(layout.shard) if axes is not None and layout.shard in axes else None


def _without_constants(jaxpr: Any) -> Any:
    return part_of(jaxpr.eqns, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars)


def _same_constant(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, jax.core.Tracer) or isinstance(other, jax.core.Tracer):
        return False
    return bool(np.array_equal(one, other))
