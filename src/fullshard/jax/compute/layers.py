# SPDX-License-Identifier: Apache-2.0
"""`scan_layers`: equal layers, one after the other in a scan, gathered one at a time."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fullshard.core.errors import ConfigurationError
from fullshard.jax.arrays.leaves import is_array, path_name
from fullshard.jax.compute.gathered import call_module, gathered

__all__ = ["scan_layers"]


def scan_layers(
    blocks: Any, layer: Callable[..., Any] | None = None, *, remat: Any = None
) -> Callable[..., Any]:
    """A function of ``(x, *args, **kwargs)`` that carries ``x`` through equal ``blocks``.

    ``blocks`` is a sequence of modules (NNX, Equinox) or of pytrees, or one whose arrays are
    stacked along dimension 0: large models are best kept so, as nothing is stacked in the step
    then. ``layer(block, x, *args, **kwargs)`` gives the next ``x``, of the same shape; without it
    blocks are called. Each is `gathered` when its turn comes and, by ``remat``, computed again in
    backward. Works the same outside of a step.

    Raises:
        ConfigurationError: for blocks that differ in more than the values of their arrays: call
            ``gathered(block)(x)`` for each of them then.
    """
    listed = isinstance(blocks, list | tuple | nnx.List)
    items = list(blocks) if listed else [blocks]
    if not items:
        raise ConfigurationError("scan_layers has no blocks")
    if isinstance(items[0], nnx.Module):
        return functools.partial(_through_modules, items, listed, layer, remat)

    def through(x: Any, *args: Any, **kwargs: Any) -> Any:
        arrays, rebuild = _stacked(items, listed)
        function = layer or (lambda block, x, *args, **kwargs: block(x, *args, **kwargs))

        def body(x: Any, arrays: Any) -> tuple[Any, None]:
            return gathered(function, remat=remat)(rebuild(arrays), x, *args, **kwargs), None

        return lax.scan(body, x, arrays)[0]

    return through


def _through_modules(
    modules: list[Any], listed: bool, layer: Any, remat: Any, x: Any, *args: Any, **kwargs: Any
) -> Any:
    splits = [nnx.split(each) for each in modules]
    graph = splits[0][0]
    for number, (other, _) in enumerate(splits):
        if other != graph:
            raise ConfigurationError(_unequal(number, "in structure or in what is no array"))
    arrays, rebuild = _stacked([state for _, state in splits], listed)

    def body(x: Any, arrays: Any) -> tuple[Any, Any]:
        block = nnx.merge(graph, rebuild(arrays))
        x = call_module(layer or type(block).__call__, block, remat, *(x, *args), **kwargs)
        return x, nnx.state(block, nnx.Not(nnx.Param))

    x, after = lax.scan(body, x, arrays)
    for number, module in enumerate(modules):  # statistics and counts of random numbers
        own = jax.tree.map(lambda leaf, n=number: leaf[n], after) if listed else after
        nnx.update(module, own)
    return x


def _stacked(items: list[Any], listed: bool) -> tuple[list[Any], Callable[[Any], Any]]:
    """The arrays of equal trees, stacked, and how one of the trees is made of its own."""
    leaves, treedef = jax.tree.flatten(items[0])
    structure: Any = treedef
    places = [at for at, x in enumerate(leaves) if is_array(x)]
    rows = [leaves]
    for number, item in enumerate(items[1:], 1):
        others, other = jax.tree.flatten(item)
        if other != structure:
            raise ConfigurationError(_unequal(number, "in structure"))
        for (path, a), b in zip(jax.tree.leaves_with_path(items[0]), others, strict=True):
            same = is_array(a) and is_array(b) and (a.shape, a.dtype) == (b.shape, b.dtype)
            if not (same or (not is_array(a) and not is_array(b) and a == b)):
                raise ConfigurationError(_unequal(number, f"in {path_name(path)}"))
        rows.append(others)
    arrays = [jnp.stack([row[at] for row in rows]) if listed else leaves[at] for at in places]

    def rebuild(own: Any) -> Any:
        full = list(leaves)
        for at, x in zip(places, own, strict=True):
            full[at] = x
        return jax.tree.unflatten(treedef, full)

    return arrays, rebuild


def _unequal(number: int, where: str) -> str:
    return (
        f"scan_layers: blocks 0 and {number} differ {where}; layers that differ go through "
        "gathered(block)(x), one by one"
    )
