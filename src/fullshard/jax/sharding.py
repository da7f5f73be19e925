# SPDX-License-Identifier: Apache-2.0
"""Arrays placed on a mesh in their own shapes, for programs that `jax.jit` partitions by itself.

`shard` serves a model or a tree of arrays to ``nnx.Optimizer`` and ``jax.jit`` as it is. A
dimension must divide for that, so some arrays may stay whole, and where those are more than a small
share of the bytes it refuses; `fullshard.jax.make_train_step` pads and has no such arrays.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec
from fullshard.core.text import bytes_text, in_columns
from fullshard.jax.placement import ShardingRule, place_dims, refuse_low_coverage

__all__ = ["describe", "gather", "path_name", "replicate", "shard", "to_host"]

Tree = TypeVar("Tree")


def shard(
    tree: Tree, mesh: Mesh, rule: ShardingRule = None, at_most_unsharded: float = 0.02
) -> Tree:
    """The arrays of ``tree`` cut over the fsdp axis, each along its first dimension that divides.

    ``tree`` is an `nnx.Module`, which is changed and returned, or any pytree of arrays. Where a
    tensor rule names a dimension, that one is cut over the tensor axis.

    Raises:
        ConfigurationError: if more than the share ``at_most_unsharded`` of the bytes would be on
            every device, if a pattern of the rule matches nothing, or if the tensor axis does not
            divide its dimension. Nothing has been placed then.
    """
    named = _named_arrays(tree)
    specs = [ParamSpec(name, tuple(x.shape), _dtype_name(x)) for name, x in named]
    placements = place_dims(specs, dict(mesh.shape), rule)
    refuse_low_coverage(placements, at_most_unsharded)
    shardings = {each.name: NamedSharding(mesh, PartitionSpec(*each.axes)) for each in placements}
    return _map_arrays(tree, lambda name, x: jax.device_put(x, shardings[name]))


def replicate(tree: Tree, mesh: Mesh) -> Tree:
    """The arrays of ``tree`` whole on every device; a module is changed and returned."""
    whole = NamedSharding(mesh, PartitionSpec())
    return _map_arrays(tree, lambda name, x: jax.device_put(x, whole))


def gather(tree: Any) -> Any:
    """The arrays of ``tree`` as NumPy arrays on the host, one after the other, in the same tree.

    An `nnx.Module` gives nested dicts. With several processes all of them must call it; each gets
    everything.
    """
    state = nnx.to_pure_dict(nnx.state(tree)) if isinstance(tree, nnx.Module) else tree
    return _map_arrays(state, lambda name, x: to_host(x))


def describe(tree: Any) -> str:
    """A table of ``tree``'s arrays: path, shape, how it is cut, and the bytes on each device."""
    rows: list[tuple[object, ...]] = [("array", "shape", "sharding", "bytes per device")]
    total = 0
    for name, x in _named_arrays(tree):
        sharding = getattr(x, "sharding", None)
        local = sharding.shard_shape(x.shape) if sharding is not None else x.shape
        size = int(np.prod(local, dtype=np.int64)) * x.dtype.itemsize
        spec = getattr(sharding, "spec", None)
        text = str(sharding) if spec is None else f"P({', '.join(map(repr, spec))})"
        rows.append((name, str(tuple(x.shape)), text, size))
        total += size
    return in_columns(rows, right=(3,)) + f"\ntogether {bytes_text(total)} per device"


def to_host(x: Any) -> np.ndarray[Any, Any]:
    """The whole of one array on the host; with several processes all must call it."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
        mesh = x.sharding.mesh  # type: ignore[attr-defined]
        x = jax.jit(lambda y: y, out_shardings=NamedSharding(mesh, PartitionSpec()))(x)
    return np.asarray(x)


def path_name(path: tuple[Any, ...]) -> str:
    """A tree's path as one name, its parts joined by dots."""
    return ".".join(_part(each) for each in path)


def _part(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _dtype_name(x: Any) -> str:
    return np.dtype(x.dtype).name


def _is_array(x: Any) -> bool:
    # Typed random keys are arrays too, but there is nothing in them to cut.
    return hasattr(x, "shape") and hasattr(x, "dtype") and not _is_key(x)


def _is_key(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def _named_arrays(tree: Any) -> list[tuple[str, Any]]:
    state = nnx.to_pure_dict(nnx.state(tree)) if isinstance(tree, nnx.Module) else tree
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return [(path_name(path), x) for path, x in leaves if _is_array(x)]


def _map_arrays(tree: Any, function: Callable[[str, Any], Any]) -> Any:
    def change(path: tuple[Any, ...], x: Any) -> Any:
        return function(path_name(path), x) if _is_array(x) else x

    if not isinstance(tree, nnx.Module):
        return jax.tree_util.tree_map_with_path(change, tree)
    state = nnx.to_pure_dict(nnx.state(tree))
    if not state:
        raise ConfigurationError(f"{type(tree).__name__} has no arrays")
    nnx.update(tree, jax.tree_util.tree_map_with_path(change, state))
    return tree
