# SPDX-License-Identifier: Apache-2.0
"""Arrays placed on a mesh in their own shapes, for programs that `jax.jit` partitions by itself."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec
from fullshard.core.text import bytes_text, in_columns
from fullshard.jax.arrays.leaves import is_array, is_key, path_name
from fullshard.jax.arrays.mesh import MeshAxes, read_mesh
from fullshard.jax.arrays.rule import Axis, Placement, Rule, place, refuse_low_coverage

__all__ = [
    "annotation", "batch_sharding", "describe", "gather", "global_batch", "named_leaves", "put",
    "replicate", "shard", "shardings", "to_host",
]  # fmt: skip

Tree = TypeVar("Tree")


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
    axes = read_mesh(mesh, shard_axis)
    state = _state_of(tree)
    by_name = {each.name: each.axes for each in _placements(state, axes, rule)}
    return jax.tree_util.tree_map_with_path(
        lambda path, _: axes.sharding(*by_name.get(path_name(path), ())), state
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
    state = _state_of(tree)
    refuse_low_coverage(_placements(state, read_mesh(mesh), rule), at_most_unsharded)
    return _updated(tree, jax.tree.map(_put, state, shardings(state, mesh, rule)))


def replicate(tree: Tree, mesh: Mesh) -> Tree:
    """Place the arrays of ``tree`` whole on every device; a module is changed and returned."""
    whole = read_mesh(mesh).sharding()
    return _updated(tree, jax.tree.map(lambda x: _put(x, whole), _state_of(tree)))


def gather(tree: Any) -> Any:
    """The arrays of ``tree`` as NumPy arrays on the host, one after the other, in the same tree.

    An `nnx.Module` gives nested dicts. With several processes all of them must call it; each gets
    everything.
    """
    return jax.tree.map(lambda x: to_host(x) if _is_array(x) else x, _plain(tree))


def describe(tree: Any) -> str:
    """A table of ``tree``'s arrays: path, shape, how it is cut, and the bytes on each device."""
    rows: list[tuple[object, ...]] = [("array", "shape", "sharding", "bytes per device")]
    for path, x in jax.tree.leaves_with_path(_plain(tree)):
        if _is_array(x):
            sharding = getattr(x, "sharding", None)
            local = sharding.shard_shape(x.shape) if sharding is not None else x.shape
            spec = getattr(sharding, "spec", None)
            text = str(sharding) if spec is None else f"P({', '.join(map(repr, spec))})"
            size = math.prod(local) * x.dtype.itemsize
            rows.append((path_name(path), str(tuple(x.shape)), text, size))
    total = sum(int(str(row[-1])) for row in rows[1:])
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


def put(whole: np.ndarray[Any, Any], sharding: Any) -> jax.Array:
    """``whole`` on the devices; each gets its slice only, and a process reads its own only."""
    with jax.transfer_guard_host_to_device("allow"):  # it was asked for
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


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
        names = metadata.get("out_sharding", metadata.get("sharding_names"))
        return tuple(names) if names else ()
    names = getattr(leaf, "names", None)
    return tuple(names) if isinstance(names, tuple) and hasattr(leaf, "value") else ()


def _is_array(x: Any) -> bool:
    # Typed random keys are arrays too, but there is nothing in them to cut.
    return is_array(x) and not is_key(x)


def _placements(state: Any, axes: MeshAxes, rule: Rule | None) -> list[Placement]:
    specs, names = [], {}
    for name, x, box, _ in named_leaves(state):
        if _is_array(x):
            specs.append(ParamSpec(name, tuple(x.shape), np.dtype(x.dtype).name))
            names[name] = annotation(box)
    if not specs:
        raise ConfigurationError(f"{type(state).__name__} has no arrays")
    return place(specs, axes, rule, names)


def _put(x: Any, sharding: Any) -> Any:
    return jax.device_put(x, sharding) if _is_array(x) else x


def _state_of(tree: Any) -> Any:
    return nnx.state(tree) if isinstance(tree, nnx.Module) else tree


def _plain(tree: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(tree)) if isinstance(tree, nnx.Module) else tree


def _updated(tree: Any, placed: Any) -> Any:
    if not isinstance(tree, nnx.Module):
        return placed
    nnx.update(tree, placed)
    return tree
