# SPDX-License-Identifier: Apache-2.0
"""Leaves of trees: what they are called, which are random keys, how their dtypes are stored."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

__all__ = [
    "STORED_DTYPES", "as_key", "is_array", "is_key", "key_data", "path_name", "split_arrays",
]  # fmt: skip

STORED_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint16": "U16", "int16": "I16", "float16": "F16", "bfloat16": "BF16", "uint32": "U32",
    "int32": "I32", "float32": "F32", "uint64": "U64", "int64": "I64", "float64": "F64",
}  # fmt: skip
"""The names that safetensors has for dtypes, by NumPy's (and those of ml_dtypes, as JAX uses)."""


def path_name(path: tuple[Any, ...]) -> str:
    """A tree's path as one name, its parts joined by dots; what a box holds is called like it."""
    named = tuple(each for each in path if getattr(each, "name", None) != "value")
    return jax.tree_util.keystr(named, simple=True, separator=".")


def is_array(x: Any) -> bool:
    """Tell if ``x`` is an array, or the shape of one."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def split_arrays(tree: Any) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    """The arrays of ``tree``, and a function that puts such into a tree like it."""
    leaves, treedef = jax.tree.flatten(tree)
    static = [None if is_array(x) else (x,) for x in leaves]

    def rebuild(arrays: Iterable[Any]) -> Any:
        own = iter(arrays)
        return jax.tree.unflatten(treedef, [next(own) if x is None else x[0] for x in static])

    return [x for x in leaves if is_array(x)], rebuild


def is_key(x: Any) -> bool:
    """Tell if ``x`` is an array of typed random keys."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


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
