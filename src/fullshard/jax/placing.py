# SPDX-License-Identifier: Apache-2.0
"""Leaves of trees, and arrays placed on a mesh in their own shapes, as `jax.jit` takes them."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec
from fullshard.core.text import bytes_text, in_columns
from fullshard.jax.mesh import Axis, MeshAxes, read_mesh
from fullshard.jax.rule import Placement, Rule, place, refuse_low_coverage

Tree = TypeVar("Tree")


# -- leaves --------------------------------------------------------------------------------------


def path_name(path: tuple[Any, ...]) -> str:
    """A tree's path as one name, its parts joined by dots; what a box holds is called like it."""
    named = tuple(each for each in path if getattr(each, "name", None) != "value")
    return jax.tree_util.keystr(named, simple=True, separator=".")


def by_path(tree: Any) -> dict[str, Any]:
    """The arrays of a tree by path."""
    return {path_name(path): x for path, x in jax.tree.leaves_with_path(tree)}


def is_array(x: Any) -> bool:
    """Tell if ``x`` is an array, or the shape of one."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def split_module(tree: Any) -> tuple[Any, Any]:
    """The graph of an `nnx.Module` and its state, a pytree; of other trees None and themselves."""
    return nnx.split(tree) if isinstance(tree, nnx.Module) else (None, tree)


def split_arrays(tree: Any) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    """The arrays of ``tree``, and a function that puts such into a tree like it."""
    leaves, treedef = jax.tree.flatten(tree)
    static = [None if is_array(x) else (x,) for x in leaves]

    def rebuild(arrays: Iterable[Any]) -> Any:
        own = iter(arrays)
        return jax.tree.unflatten(treedef, [next(own) if x is None else x[0] for x in static])

    return [x for x in leaves if is_array(x)], rebuild


def dtype_on_device(x: Any) -> Any:
    """The dtype that an array has on devices: of 64 bits only where JAX is told to."""
    return x.dtype if is_key(x) else jax.dtypes.canonicalize_dtype(x.dtype)


def is_key(x: Any) -> bool:
    """Tell if ``x`` is an array of typed random keys."""
    return is_array(x) and bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def key_data(x: Any) -> Any:
    """The data of random keys, or their shape and sharding if ``x`` is a shape; else ``x``."""
    if not is_key(x):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        data = jax.eval_shape(jax.random.key_data, x)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)
    return jax.random.key_data(x)


def as_key(data: Any, like: Any) -> Any:
    """Random keys of this data if ``like`` are such (arrays or shapes); else ``data``."""
    if not is_key(like):
        return data
    kinds: list[Any] = []
    # Of a shape alone nobody tells the kind of key, of a traced one they do.
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(data, impl=kinds[0])


def named_leaves(tree: Any) -> Iterator[tuple[str, Any, Any, tuple[Any, ...]]]:
    """Name and value of each leaf, the variable or box that holds it, and the path of that."""

    def is_box(x: Any) -> bool:
        return isinstance(x, nnx.Variable) or bool(annotation(x))

    for path, box in jax.tree.leaves_with_path(tree, is_leaf=is_box):
        for inner, leaf in jax.tree.leaves_with_path(box) if is_box(box) else [((), box)]:
            yield path_name((*path, *inner)), leaf, box, path


def annotation(leaf: Any) -> tuple[Axis, ...]:
    """The axis names that a variable carries: of Flax NNX's metadata, or of Linen's boxes."""
    if isinstance(leaf, nnx.Variable):
        metadata: Mapping[str, Any] = leaf.get_metadata()
        return tuple(metadata.get("out_sharding", metadata.get("sharding_names")) or ())
    names = getattr(leaf, "names", None)
    return tuple(names) if isinstance(names, tuple) and hasattr(leaf, "value") else ()


# -- arrays on a mesh ----------------------------------------------------------------------------


def shardings(
    tree: Any, mesh: Mesh | AbstractMesh, rule: Rule | None = None, shard_axis: str | None = None
) -> Any:
    """Return a `NamedSharding` for each array of ``tree``, in the same structure.

    ``tree`` is an `nnx.Module`, its state, or any pytree of arrays or of what only has a shape and
    a dtype; of a module the result has the structure of ``nnx.state``. The shard axis cuts each
    array's largest dimension that divides; what has none, and what is no array, stays whole. Axis
    names that variables carry are kept.

    Raises:
        ConfigurationError: for a rule or a mesh that cannot be, as `make_train_step`.
    """
    axes, state = read_mesh(mesh, shard_axis), split_module(tree)[1]
    cuts = {each.name: each.axes for each in _placements(state, axes, rule)}
    return jax.tree.map_with_path(
        lambda path, _: axes.sharding(*cuts.get(path_name(path), ())), state
    )


def shard(
    tree: Tree, mesh: Mesh, rule: Rule | None = None, at_most_unsharded: float = 0.02
) -> Tree:
    """Place the arrays of ``tree`` as `shardings` says.

    ``tree`` is an `nnx.Module`, which is changed and returned, or any pytree of arrays.

    Raises:
        ConfigurationError: if more than the share ``at_most_unsharded`` of the bytes would be on
            every device, or the rule cannot be. Nothing has been placed then.
    """
    graph, state = split_module(tree)
    refuse_low_coverage(_placements(state, read_mesh(mesh), rule), at_most_unsharded)
    cuts = shardings(state, mesh, rule)
    placed = jax.tree.map(lambda x, cut: jax.device_put(x, cut) if _cut(x) else x, state, cuts)
    if graph is None:
        return placed
    nnx.update(tree, placed)
    return tree


def describe(tree: Any) -> str:
    """A table of ``tree``'s arrays: path, shape, how it is cut, and the bytes on each device."""
    rows: list[tuple[object, ...]] = [("array", "shape", "sharding", "bytes per device")]
    total = 0
    for name, x in by_path(split_module(tree)[1]).items():
        if _cut(x):
            sharding = getattr(x, "sharding", None)
            local = sharding.shard_shape(x.shape) if sharding is not None else x.shape
            spec = getattr(sharding, "spec", None)
            text = str(sharding) if spec is None else f"P({', '.join(map(repr, spec))})"
            rows.append((name, str(tuple(x.shape)), text, math.prod(local) * x.dtype.itemsize))
            total += math.prod(local) * x.dtype.itemsize
    return in_columns(rows, right=(3,)) + f"\ntogether {bytes_text(total)} per device"


def batch_sharding(mesh: Mesh, leaf: Any = None, shard_axis: str | None = None) -> NamedSharding:
    """Return the sharding of a batch's array on ``mesh``: dimension 0 cut, a scalar everywhere."""
    axes = read_mesh(mesh, shard_axis)
    return axes.sharding(axes.batch) if leaf is None or np.ndim(leaf) else axes.sharding()


def global_batch(mesh: Mesh, local: Any, shard_axis: str | None = None) -> Any:
    """The batch of all processes, of which each gives its own part, in order of processes.

    Each process must give as many rows as its devices have parts. Scalars must be the same on all.
    """
    join = jax.make_array_from_process_local_data
    return jax.tree.map(lambda x: join(batch_sharding(mesh, x, shard_axis), np.asarray(x)), local)


def to_host(x: Any) -> np.ndarray[Any, Any]:
    """The whole of one array on the host; with several processes all must call it."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
        mesh = x.sharding.mesh  # type: ignore[attr-defined]
        x = jax.jit(lambda y: y, out_shardings=NamedSharding(mesh, PartitionSpec()))(x)
    return np.asarray(x)


def put(x: Any, sharding: Any) -> jax.Array:
    """``x`` where ``sharding`` says; of host memory each device gets its slice only."""
    if isinstance(x, jax.Array):
        same = x.sharding.is_equivalent_to(sharding, x.ndim)
        return x if same else jax.device_put(x, sharding)
    x = np.asarray(x)
    x = x.astype(dtype_on_device(x), copy=False)
    with jax.transfer_guard_host_to_device("allow"):  # it was asked for
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def _cut(x: Any) -> bool:
    # Typed random keys are arrays too, but there is nothing in them to cut.
    return is_array(x) and not is_key(x)


def _placements(state: Any, axes: MeshAxes, rule: Rule | None) -> list[Placement]:
    found = [(ParamSpec(name, tuple(x.shape), np.dtype(x.dtype).name), annotation(box))
             for name, x, box, _ in named_leaves(state) if _cut(x)]  # fmt: skip
    if not found:
        raise ConfigurationError(f"{type(state).__name__} has no arrays")
    names = {spec.name: said for spec, said in found}
    return place([spec for spec, _ in found], axes, rule, names)
