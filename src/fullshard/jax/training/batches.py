# SPDX-License-Identifier: Apache-2.0
"""Batches on their way to the devices."""

from typing import Any

import jax
import numpy as np

from fullshard.core.errors import ConfigurationError
from fullshard.jax.arrays.mesh import Layout

__all__ = ["check_batch", "dtype_on_device", "on_device"]


def check_batch(batch: Any, parts: int, accumulate: int) -> None:
    """Raise `ConfigurationError` for a batch that ``parts`` devices cannot share."""
    first: tuple[str, int] | None = None
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        name = f"batch{jax.tree_util.keystr(path)}"
        if not hasattr(leaf, "shape"):
            raise ConfigurationError(f"{name} is a {type(leaf).__name__}, expected an array")
        if leaf.shape and leaf.shape[0] % (parts * accumulate):
            raise ConfigurationError(
                f"{name} has shape {tuple(leaf.shape)}: {parts} devices x "
                f"accumulate={accumulate} do not divide its {leaf.shape[0]} rows"
            )
        if leaf.shape:
            first = first or (name, leaf.shape[0])
            if leaf.shape[0] != first[1]:
                raise ConfigurationError(
                    f"{name} has shape {tuple(leaf.shape)}, but {first[0]} has {first[1]} rows"
                )


def on_device(leaf: Any, layout: Layout, whole_if_uneven: bool = False) -> Any:
    """An array of a batch as it lies on the mesh; each process gives all of it, or its shards."""
    sharding = layout.of_batch(leaf)
    if whole_if_uneven and np.ndim(leaf) and np.shape(leaf)[0] % layout.parts:
        sharding = layout.sharding()
    if isinstance(leaf, jax.Array):
        return leaf if leaf.sharding == sharding else jax.device_put(leaf, sharding)
    leaf = np.asarray(leaf)
    leaf = leaf.astype(dtype_on_device(leaf))
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])


def dtype_on_device(leaf: Any) -> Any:
    """The dtype that an array has on devices: of 64 bits only where JAX is told to."""
    return jax.dtypes.canonicalize_dtype(leaf.dtype)
