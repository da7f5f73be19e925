# SPDX-License-Identifier: Apache-2.0
"""Read a model: its parameters, its other state, and how values are put back into it.

Two kinds of models are known: an `nnx.Module`, and any pytree of arrays (Equinox modules, variables
of Linen and Haiku).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec
from fullshard.jax.arrays.leaves import is_key, path_name
from fullshard.jax.arrays.placing import annotation
from fullshard.jax.arrays.rule import Axis

__all__ = ["Model", "read_model"]

Path = tuple[Any, ...]


@dataclass
class Model:
    """A model's arrays by path, as far as the engine needs to know it.

    ``other`` is state that no gradient reaches: statistics, random keys and counts, constants.
    ``annotations`` are the axis names that parameters carry.
    """

    specs: list[ParamSpec]
    other: dict[str, jax.ShapeDtypeStruct]
    source: Any  # the model, or the function that makes it
    made: bool  # by that function; else the arrays are there already
    annotations: dict[str, tuple[Axis, ...]] = field(default_factory=dict)

    def initial(self) -> dict[str, Any]:
        """All arrays by path; may be traced, so that no device ever holds them whole."""
        raise NotImplementedError

    def tree(self, values: Mapping[str, Any]) -> Any:
        """Those values in the model's own structure, which has None in all other places.

        For a module that is a nested dict, without the others.
        """
        raise NotImplementedError

    def rebuild(self, values: Mapping[str, Any]) -> Any:
        """The model as the user gave it, with these values, at the trace level of the caller."""
        raise NotImplementedError

    def read_state(self, model: Any, names: Iterable[str]) -> dict[str, Any]:
        """The values that the named arrays have in ``model`` now, after it was called."""
        raise NotImplementedError


def read_model(model: Any, wrt: Any) -> Model:
    """The structure of ``model``: a module, a pytree, or a function that makes one of them.

    Nothing is allocated for a function: it is traced, now and once more to initialise.

    Raises:
        ConfigurationError: if there are no parameters, or ``wrt`` matches none of them.
    """
    made = callable(model) and not isinstance(model, nnx.Module) and not _has_arrays(model)
    abstract = _made_of_shapes(model) if made else model
    kind = _Module if isinstance(abstract, nnx.Module) else _Tree
    found = kind.read(abstract, model, made, wrt)
    for spec in found.specs:
        if spec.trainable and not jnp.issubdtype(spec.dtype, np.inexact):
            raise ConfigurationError(
                f"{spec.name!r} {spec.shape} is {spec.dtype}, which cannot be trained: keep it in "
                "another nnx.Variable than a parameter, or leave it out of wrt"
            )
    if not any(spec.trainable for spec in found.specs):
        some = ", ".join(spec.name for spec in found.specs[:5])
        if not some:
            raise ConfigurationError(f"{type(abstract).__name__} has no arrays to be trained")
        raise ConfigurationError(f"wrt={wrt!r} selects no parameter; paths are like: {some}")
    for name, count in Counter([*(spec.name for spec in found.specs), *found.other]).items():
        if count > 1:
            raise ConfigurationError(
                f"{count} arrays of the model would be called {name!r}: rename a key that has a dot"
            )
    return found


def _made_of_shapes(make: Callable[[], Any]) -> Any:
    """What ``make`` gives, with shapes in place of arrays and all else as it is."""
    rest: list[Any] = []

    def arrays() -> Any:
        made = make()
        if isinstance(made, nnx.Module):
            graph, state = nnx.split(made)
            rest.append(lambda state: nnx.merge(graph, state))
            return state
        leaves, treedef = jax.tree.flatten(made)
        fixed = [(n, None if _is_array(x) else x) for n, x in enumerate(leaves)]
        rest.append(lambda found: jax.tree.unflatten(treedef, [found.get(n, x) for n, x in fixed]))
        return {n: x for n, x in enumerate(leaves) if _is_array(x)}

    with nnx.use_eager_sharding(False):  # annotations name axes of a mesh that is not there yet
        shapes = jax.eval_shape(arrays)
    return rest[0](shapes)


class _Module(Model):
    """An `nnx.Module`."""

    _graph: Any
    _variables: dict[Path, Any]

    @classmethod
    def read(cls, module: nnx.Module, source: Any, made: bool, wrt: Any) -> Model:
        graph, state = nnx.split(module)
        variables = {path: _abstract(leaf) for path, leaf in nnx.to_flat_state(state)}
        trained = nnx.filterlib.to_predicate(nnx.Param if wrt is None else wrt)
        found = cls([], {}, source, made)
        for path, leaf in variables.items():
            name, value = _joined(path), _value(leaf)
            chosen = trained(path, leaf)
            if chosen or isinstance(leaf, nnx.Param):
                dtype = np.dtype(value.dtype).name
                found.specs.append(ParamSpec(name, tuple(value.shape), dtype, bool(chosen)))
                found.annotations[name] = annotation(leaf)
            else:
                found.other[name] = value
        found._graph, found._variables = graph, variables
        return found

    def initial(self) -> dict[str, Any]:
        with nnx.use_eager_sharding(False):
            module = self.source() if self.made else self.source
        return {_joined(path): _value(leaf) for path, leaf in nnx.to_flat_state(nnx.state(module))}

    def tree(self, values: Mapping[str, Any]) -> Any:
        tree: dict[Any, Any] = {}
        for path in self._variables:
            if _joined(path) in values:
                node = tree
                for part in path[:-1]:
                    node = node.setdefault(part, {})
                node[path[-1]] = values[_joined(path)]
        return tree

    def rebuild(self, values: Mapping[str, Any]) -> Any:
        flat = [
            (path, leaf.replace(values[_joined(path)]) if isinstance(leaf, nnx.Variable) else
             values[_joined(path)])
            for path, leaf in self._variables.items()
        ]  # fmt: skip
        return nnx.merge(self._graph, nnx.from_flat_state(flat))

    def read_state(self, model: Any, names: Iterable[str]) -> dict[str, Any]:
        now = dict(nnx.to_flat_state(nnx.state(model)))
        wanted = set(names)
        return {
            _joined(path): _value(now[path]) for path in self._variables if _joined(path) in wanted
        }


class _Tree(Model):
    """A pytree of arrays with a loss function that takes it."""

    _treedef: Any
    _leaves: list[Any]  # names of arrays; anything else as it is

    @classmethod
    def read(cls, tree: Any, source: Any, made: bool, wrt: Any) -> Model:
        found = cls([], {}, source, made)
        boxes = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: bool(annotation(x)))[0]
        found.annotations = {path_name(path): annotation(leaf) for path, leaf in boxes}
        if not (wrt is None or callable(wrt)):
            raise ConfigurationError(f"wrt={wrt!r}: of a pytree it is a predicate on paths")
        named, found._treedef = jax.tree_util.tree_flatten_with_path(tree)
        found._leaves = []
        for path, leaf in named:
            if not _is_array(leaf):
                found._leaves.append(_Static(leaf))
                continue
            name = path_name(path)
            found._leaves.append(name)
            if not is_key(leaf) and jnp.issubdtype(leaf.dtype, np.inexact):
                chosen = wrt is None or bool(wrt(name))
                dtype = np.dtype(leaf.dtype).name
                found.specs.append(ParamSpec(name, tuple(leaf.shape), dtype, chosen))
            else:
                found.other[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return found

    def initial(self) -> dict[str, Any]:
        tree = self.source() if self.made else self.source
        return {
            name: leaf
            for name, leaf in zip(self._leaves, jax.tree.leaves(tree), strict=True)
            if isinstance(name, str)
        }

    def tree(self, values: Mapping[str, Any]) -> Any:
        leaves = [values.get(x) if isinstance(x, str) else None for x in self._leaves]
        return jax.tree.unflatten(self._treedef, leaves)

    def rebuild(self, values: Mapping[str, Any]) -> Any:
        leaves = [values[x] if isinstance(x, str) else x.value for x in self._leaves]
        return jax.tree.unflatten(self._treedef, leaves)

    def read_state(self, model: Any, names: Iterable[str]) -> dict[str, Any]:
        wanted = set(names)
        return {
            name: leaf
            for name, leaf in zip(self._leaves, jax.tree.leaves(model), strict=True)
            if isinstance(name, str) and name in wanted
        }


@dataclass(frozen=True)
class _Static:
    value: Any


def _joined(path: Path) -> str:
    return ".".join(map(str, path))


def _value(leaf: Any) -> Any:
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _abstract(leaf: Any) -> Any:
    value = _value(leaf)
    if not _is_array(value):
        raise ConfigurationError(
            f"a {type(leaf).__name__} holds {type(value).__name__}, not one array"
        )
    shape = jax.ShapeDtypeStruct(value.shape, value.dtype)
    return leaf.replace(shape) if isinstance(leaf, nnx.Variable) else shape


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _has_arrays(tree: Any) -> bool:
    return any(_is_array(leaf) for leaf in jax.tree.leaves(tree))
