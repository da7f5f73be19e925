# SPDX-License-Identifier: Apache-2.0
"""Read a model: its parameters, its other state, and the way values are put back into it.

A model is any pytree of arrays (Equinox modules, variables of Linen and Haiku), or an `nnx.Module`,
whose state is one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec
from fullshard.jax.arrays.leaves import is_array, is_key, split_arrays
from fullshard.jax.arrays.placing import annotation, named_leaves
from fullshard.jax.arrays.rule import Axis

__all__ = ["ModelArrays", "read_model"]


@dataclass
class ModelArrays:
    """A model's arrays by path, as far as the engine needs to know it.

    ``other`` is state that no gradient reaches: statistics, random keys and counts, constants.
    ``annotations`` are the axis names that parameters carry.
    """

    source: Any  # the model, or the function that makes it
    made: bool  # by that function; else the arrays are there already
    specs: list[ParamSpec] = field(default_factory=list)
    other: dict[str, jax.ShapeDtypeStruct] = field(default_factory=dict)
    annotations: dict[str, tuple[Axis, ...]] = field(default_factory=dict)
    graph: Any = None  # of a module
    treedef: Any = None  # of the pytree, or of the module's state
    leaves: list[Any] = field(default_factory=list)  # names of arrays; all else in a tuple

    def initial(self) -> dict[str, Any]:
        """All arrays by path; may be traced, so that no device ever holds them whole."""
        with nnx.use_eager_sharding(False):
            model = self.source() if self.made else self.source
        return self.read_state(model, [x for x in self.leaves if isinstance(x, str)])

    def tree(self, values: Mapping[str, Any]) -> Any:
        """Put those values into the model's own structure, with None in all other places.

        For a module that is a nested dict, without the others.
        """
        leaves = [values.get(x) if isinstance(x, str) else None for x in self.leaves]
        tree = jax.tree.unflatten(self.treedef, leaves)
        if self.graph is None:
            return tree
        flat = flatten_dict(nnx.to_pure_dict(tree))
        return unflatten_dict({path: x for path, x in flat.items() if jax.tree.leaves(x)})

    def rebuild(self, values: Mapping[str, Any]) -> Any:
        """The model as the user gave it, with these values, at the trace level of the caller."""
        leaves = [values[x] if isinstance(x, str) else x[0] for x in self.leaves]
        tree = jax.tree.unflatten(self.treedef, leaves)
        return tree if self.graph is None else nnx.merge(self.graph, tree)

    def read_state(self, model: Any, names: Iterable[str]) -> dict[str, Any]:
        """The values that the named arrays have in ``model`` now, after it was called."""
        tree = model if self.graph is None else nnx.state(model)
        found = dict(zip(map(str, self.leaves), jax.tree.leaves(tree), strict=True))
        return {name: found[name] for name in names}


def read_model(model: Any, wrt: Any) -> ModelArrays:
    """The structure of ``model``: a module, a pytree, or a function that makes one of them.

    Nothing is allocated for a function: it is traced, now and once more to initialise.

    Raises:
        ConfigurationError: if there are no parameters, or ``wrt`` matches none of them.
    """
    module = isinstance(model, nnx.Module)
    made = callable(model) and not module and not any(map(is_array, jax.tree.leaves(model)))
    abstract = _made_of_shapes(model) if made else model
    found = ModelArrays(model, made)
    if isinstance(abstract, nnx.Module):
        found.graph, tree = nnx.split(abstract)
        trained: Any = nnx.filterlib.to_predicate(nnx.Param if wrt is None else wrt)
    else:
        if not (wrt is None or callable(wrt)):
            raise ConfigurationError(f"wrt={wrt!r}: of a pytree it is a predicate on paths")
        tree, trained = abstract, wrt
    found.treedef = jax.tree.structure(tree)
    for name, leaf, box, path in named_leaves(tree):
        if not is_array(leaf):
            found.leaves.append((leaf,))
            continue
        found.leaves.append(name)
        if found.graph is None:
            is_param = not is_key(leaf) and jnp.issubdtype(leaf.dtype, np.inexact)
            chosen = is_param and (trained is None or bool(trained(name)))
        else:
            chosen = bool(trained(tuple(each.key for each in path), box))
            is_param = chosen or isinstance(box, nnx.Param)
        if is_param:
            dtype = np.dtype(leaf.dtype).name
            found.specs.append(ParamSpec(name, tuple(leaf.shape), dtype, chosen))
            found.annotations[name] = annotation(box)
        else:
            found.other[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    _check(found, type(abstract).__name__, wrt)
    return found


def _check(found: ModelArrays, kind: str, wrt: Any) -> None:
    for spec in found.specs:
        if spec.trainable and not jnp.issubdtype(spec.dtype, np.inexact):
            raise ConfigurationError(
                f"{spec.name!r} {spec.shape} is {spec.dtype}, which cannot be trained: keep it in "
                "another nnx.Variable than a parameter, or leave it out of wrt"
            )
    if not any(spec.trainable for spec in found.specs):
        some = ", ".join(spec.name for spec in found.specs[:5])
        if not some:
            raise ConfigurationError(f"{kind} has no arrays to be trained")
        raise ConfigurationError(f"wrt={wrt!r} selects no parameter; paths are like: {some}")
    for name, count in Counter(x for x in found.leaves if isinstance(x, str)).items():
        if count > 1:
            raise ConfigurationError(
                f"{count} arrays of the model would be called {name!r}: rename a key that has a dot"
            )


def _made_of_shapes(make: Callable[[], Any]) -> Any:
    """Call ``make`` with shapes in place of arrays; all else stays as it is."""
    rest: list[Any] = []

    def arrays() -> Any:
        made, graph = make(), None
        if isinstance(made, nnx.Module):
            graph, made = nnx.split(made)
        arrays, rebuild = split_arrays(made)
        rest.extend((graph, rebuild))
        return arrays

    with nnx.use_eager_sharding(False):  # annotations name axes of a mesh that is not there yet
        shapes = jax.eval_shape(arrays)
    graph, rebuild = rest
    tree = rebuild(shapes)
    return tree if graph is None else nnx.merge(graph, tree)
