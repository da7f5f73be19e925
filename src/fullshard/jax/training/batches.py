# SPDX-License-Identifier: Apache-2.0
"""Batches on their way to the devices."""

from typing import Any

import jax
import numpy as np

from fullshard.core.errors import ConfigurationError
from fullshard.jax.arrays.mesh import Layout
from fullshard.jax.arrays.placing import put

__all__ = ["check_batch", "dtype_on_device", "on_device", "read_arrays"]


def read_arrays(tree: Any) -> Any:
    """``tree`` with what is no array of JAX or NumPy, but can become one, as such."""

    def read(leaf: Any) -> Any:
        other = hasattr(leaf, "__array__") and not isinstance(leaf, jax.Array | np.generic)
        return np.asarray(leaf) if other else leaf

    return jax.tree.map(read, tree)


def check_batch(batch: Any, parts: int, accumulate: int) -> None:
    """Raise `ConfigurationError` for a batch that ``parts`` devices cannot share."""
    first: tuple[str, int] | None = None
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        name = f"batch{jax.tree_util.keystr(path)}"
        if not hasattr(leaf, "shape"):
            raise ConfigurationError(f"{name} is a {type(leaf).__name__}, expected an array")
        if not leaf.shape:
            continue
        rows, shape = leaf.shape[0], tuple(leaf.shape)
        if not rows or rows % (parts * accumulate):
            raise ConfigurationError(
                f"{name} has shape {shape}: {parts} devices x accumulate={accumulate} do not "
                f"divide its {rows} rows"
            )
        first = first or (name, rows)
        if rows != first[1]:
            raise ConfigurationError(
                f"{name} has shape {shape}, but {first[0]} has {first[1]} rows"
            )


def on_device(leaf: Any, layout: Layout, whole_if_uneven: bool = False) -> Any:
    """An array of a batch as it lies on the mesh; each process gives all of it, or its shards."""
    sharding = layout.of_batch(leaf)
    if whole_if_uneven and np.ndim(leaf) and np.shape(leaf)[0] % layout.parts:
        sharding = layout.sharding()
    if isinstance(leaf, jax.Array):
        return leaf if leaf.sharding == sharding else jax.device_put(leaf, sharding)
    leaf = np.asarray(leaf)
    return put(leaf.astype(dtype_on_device(leaf)), sharding)


def dtype_on_device(leaf: Any) -> Any:
    """The dtype that an array has on devices: of 64 bits only where JAX is told to."""
    return jax.dtypes.canonicalize_dtype(leaf.dtype)
