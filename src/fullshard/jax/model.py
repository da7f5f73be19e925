# SPDX-License-Identifier: Apache-2.0
"""What there is in a model: parameters, other state, and the units that are gathered together.

Two kinds of models are known: an `nnx.Module`, whose modules show where units begin and end, and
any pytree of arrays (Equinox modules are some), which is one unit.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec
from fullshard.jax.sharding import path_name

__all__ = ["Model", "ModuleModel", "TreeModel", "UnitSpec", "at", "is_key", "read_model"]

Path = tuple[Any, ...]


@dataclass(frozen=True)
class UnitSpec:
    """A module whose parameters are gathered when it is called, and dropped after.

    ``names`` gives the model's path of each of its arrays, by the path inside the unit.
    """

    name: str
    path: Path
    graph: Any  # nnx.GraphDef
    variables: Mapping[Path, Any]  # abstract
    names: Mapping[Path, str]

    def merge(self, values: Mapping[Path, Any]) -> Any:
        """The module with these values, at the trace level of the caller."""
        return _merge(self.graph, self.variables, values)


@dataclass
class Model:
    """A model's arrays by path, as far as the engine needs to know it.

    ``other`` is state that no gradient reaches: statistics, random keys and counts, constants.
    ``stacks`` are units of equal structure that follow each other in a list.
    """

    specs: list[ParamSpec]
    other: dict[str, jax.ShapeDtypeStruct]
    made: bool  # by a function, which `initial` calls; else the arrays are there already
    units: dict[str, UnitSpec] = field(default_factory=dict)
    stacks: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def initial(self) -> dict[str, Any]:
        """All arrays by path; may be traced, so that no device ever holds them whole."""
        raise NotImplementedError

    def tree(self, values: Mapping[str, Any], *, missing: Any = None) -> Any:
        """Those values in the model's own structure; arrays that are not among them: ``missing``.

        For a module that is a nested dict.
        """
        raise NotImplementedError

    def rebuild(self, values: Mapping[str, Any]) -> Any:
        """The model as the user gave it, with these values."""
        raise NotImplementedError

    def groups(self) -> Iterator[tuple[ParamSpec, ...] | list[ParamSpec]]:
        """What rests together: each parameter alone, or as a list those of a stack's layers."""
        specs = {spec.name: spec for spec in self.specs}
        for stack in self.stacks:
            units = [self.units[name] for name in stack]
            for path, first in units[0].names.items():
                if first in specs:
                    yield [specs.pop(unit.names[path]) for unit in units]
        for spec in specs.values():
            yield (spec,)


def read_model(model: Any, wrt: Any, scan: bool | str) -> Model:
    """The structure of ``model``: a module, a pytree, or a function that makes one of them.

    Nothing is allocated for a function: it is traced, now and once more to initialise.

    Raises:
        ConfigurationError: if there are no parameters, or ``wrt`` matches none of them.
    """
    is_function = callable(model) and not isinstance(model, nnx.Module) and not _has_arrays(model)
    if is_function:
        abstract = nnx.eval_shape(model)
    else:
        abstract = model
    found: Model
    if isinstance(abstract, nnx.Module):
        found = ModuleModel.read(abstract, model, wrt, scan)
    else:
        found = TreeModel.read(abstract, model if is_function else None, wrt)
    for spec in found.specs:
        if spec.trainable and not jnp.issubdtype(spec.dtype, np.inexact):
            raise ConfigurationError(
                f"{spec.name!r} {spec.shape} is {spec.dtype}, which cannot be trained: keep it in "
                "another nnx.Variable than a parameter, or leave it out of wrt"
            )
    if not any(spec.trainable for spec in found.specs):
        some = ", ".join(spec.name for spec in found.specs[:5]) or "there are no parameters"
        raise ConfigurationError(f"wrt={wrt!r} selects no parameter; paths are like: {some}")
    return found


class ModuleModel(Model):
    """An `nnx.Module`."""

    _source: Any
    _graph: Any
    _variables: dict[Path, Any]

    @classmethod
    def read(cls, module: nnx.Module, source: Any, wrt: Any, scan: bool | str) -> "ModuleModel":
        """Its structure; ``source`` is the module itself or the function that makes it."""
        graph, state = nnx.split(module)
        variables = {path: _abstract(leaf) for path, leaf in nnx.to_flat_state(state)}
        _refuse_equal_names(map(_joined, variables))
        trained = nnx.filterlib.to_predicate(nnx.Param if wrt is None else wrt)
        specs, other = [], {}
        for path, leaf in variables.items():
            value = _value(leaf)
            chosen = trained(path, leaf)
            if chosen or isinstance(leaf, nnx.Param):
                dtype = np.dtype(value.dtype).name
                specs.append(ParamSpec(_joined(path), tuple(value.shape), dtype, bool(chosen)))
            else:
                other[_joined(path)] = value
        found = cls(specs, other, not isinstance(source, nnx.Module))
        found._source, found._graph, found._variables = source, graph, variables
        found._find_units(module, scan)
        return found

    def initial(self) -> dict[str, Any]:
        """All arrays by path."""
        module = self._source if isinstance(self._source, nnx.Module) else self._source()
        return {_joined(path): _value(leaf) for path, leaf in nnx.to_flat_state(nnx.state(module))}

    def tree(self, values: Mapping[str, Any], *, missing: Any = None) -> Any:
        """Those values as nested dicts; others are left out, whatever ``missing`` is."""
        tree: dict[Any, Any] = {}
        for path in self._variables:
            if _joined(path) in values:
                node = tree
                for part in path[:-1]:
                    node = node.setdefault(part, {})
                node[path[-1]] = values[_joined(path)]
        return tree

    def rebuild(self, values: Mapping[str, Any]) -> Any:
        """A module with these values, of which none may be missing."""
        return self.merge(values)

    def merge(self, values: Mapping[str, Any]) -> Any:
        """A module whose variables hold these values, at the caller's trace level."""
        by_path = {path: values[_joined(path)] for path in self._variables}
        return _merge(self._graph, self._variables, by_path)

    def read_state(self, module: Any, names: set[str]) -> dict[str, Any]:
        """The values that the named arrays have in ``module`` now."""
        return {
            _joined(path): _value(at(module, path))
            for path in self._variables
            if _joined(path) in names
        }

    def _find_units(self, module: nnx.Module, scan: bool | str) -> None:
        names = {
            id(leaf): _joined(path)
            for path, leaf in nnx.iter_graph(module)
            if isinstance(leaf, nnx.Variable)
        }
        lists: list[list[str]] = []
        for path, each, siblings in _walk_units(module, ()):
            graph, state = nnx.split(each)
            variables = dict(nnx.to_flat_state(state))
            if not variables or not all(isinstance(v, nnx.Variable) for v in variables.values()):
                continue
            inside = {inner: names[id(at(each, inner))] for inner in variables}
            abstract = {inner: _abstract(leaf) for inner, leaf in variables.items()}
            name = _joined(path)
            self.units[name] = UnitSpec(name, path, graph, abstract, inside)
            if siblings is not None:
                if siblings:
                    lists.append([])
                lists[-1].append(name)
        if scan is not False:
            for blocks in lists:
                self._stack(blocks, scan is True)
        if scan is True and not self.stacks:
            raise ConfigurationError(
                "scan=True, but the model has no nnx.List of two or more blocks of equal structure"
            )

    def _stack(self, blocks: list[str], required: bool) -> None:
        """Group runs of equal neighbours; say, or raise if ``required``, where one differs."""
        owners: dict[str, int] = {}
        for unit in self.units.values():
            for name in unit.names.values():
                owners[name] = owners.get(name, 0) + 1
        runs: list[list[str]] = [[]]
        for name in blocks:
            unit = self.units[name]
            shared = next((each for each in unit.names.values() if owners[each] > 1), None)
            before = self.units[runs[-1][-1]] if runs[-1] else None
            why = f"{shared} is shared with another unit" if shared else None
            if why is None and before is not None:
                why = self._difference(before, unit)
            if why is None:
                runs[-1].append(name)
                continue
            if required:
                raise ConfigurationError(
                    f"scan=True, but {name!r} cannot be stacked with the blocks before it: {why}; "
                    "scan='auto' scans those that are equal"
                )
            self.notes.append(f"{name} is not stacked with the blocks before it: {why}")
            runs.append([] if shared else [name])
        self.stacks += [run for run in runs if len(run) > 1]

    def _difference(self, one: UnitSpec, other: UnitSpec) -> str | None:
        for path in {**one.variables, **other.variables}:
            a, b = one.variables.get(path), other.variables.get(path)
            if a is None or b is None:
                has, lacks = (other, one) if a is None else (one, other)
                return f"{has.names[path]} has no counterpart in {lacks.name}"
            x, y = _value(a), _value(b)
            if (x.shape, x.dtype, type(a)) != (y.shape, y.dtype, type(b)):
                return (
                    f"{other.names[path]} is {type(b).__name__} {y.shape} {y.dtype}, "
                    f"{one.names[path]} is {type(a).__name__} {x.shape} {x.dtype}"
                )
        trained = {spec.name: spec.trainable for spec in self.specs}
        for path, name in one.names.items():
            if trained.get(name) != trained.get(other.names[path]):
                return f"only one of {name} and {other.names[path]} is trained"
        return None if one.graph == other.graph else "their static attributes differ"


class TreeModel(Model):
    """A pytree of arrays with a loss function that takes it."""

    _make: Callable[[], Any] | None
    _given: Any
    _treedef: Any
    _leaves: list[Any]  # names of arrays; anything else as it is

    @classmethod
    def read(cls, tree: Any, make: Callable[[], Any] | None, wrt: Any) -> "TreeModel":
        """Its structure; ``wrt`` is None or a predicate on paths."""
        named, treedef = jax.tree_util.tree_flatten_with_path(tree)
        specs, other = [], {}
        leaves: list[Any] = []
        for path, leaf in named:
            if not _is_array(leaf):
                leaves.append(_Static(leaf))
                continue
            name = path_name(path)
            leaves.append(name)
            if not is_key(leaf) and jnp.issubdtype(leaf.dtype, np.inexact):
                chosen = wrt is None or bool(wrt(name))
                dtype = np.dtype(leaf.dtype).name
                specs.append(ParamSpec(name, tuple(leaf.shape), dtype, chosen))
            else:
                other[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        _refuse_equal_names(name for name in leaves if isinstance(name, str))
        found = cls(specs, other, make is not None)
        found._make, found._given = make, None if make else tree
        found._treedef, found._leaves = treedef, leaves
        return found

    def initial(self) -> dict[str, Any]:
        """All arrays by path."""
        tree = self._make() if self._make else self._given
        return {
            name: leaf
            for name, leaf in zip(self._leaves, jax.tree.leaves(tree), strict=True)
            if isinstance(name, str)
        }

    def tree(self, values: Mapping[str, Any], *, missing: Any = None) -> Any:
        """Those values in the tree's structure, ``missing`` in all other places."""
        leaves = [values.get(x, missing) if isinstance(x, str) else missing for x in self._leaves]
        return jax.tree.unflatten(self._treedef, leaves)

    def rebuild(self, values: Mapping[str, Any]) -> Any:
        """The tree with these values, and with what is no array in it as it was."""
        leaves = [values[x] if isinstance(x, str) else x.value for x in self._leaves]
        return jax.tree.unflatten(self._treedef, leaves)


@dataclass(frozen=True)
class _Static:
    value: Any


def at(node: Any, path: Path) -> Any:
    """What lies at ``path`` below ``node``: an attribute, or an element of a list or dict."""
    for part in path:
        indexed = isinstance(node, (nnx.List, nnx.Dict, list, tuple, dict))
        node = node[part] if indexed else getattr(node, part)
    return node


def is_key(x: Any) -> bool:
    """Whether ``x`` is an array of typed random keys."""
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def _walk_units(module: nnx.Module, path: Path) -> Iterator[tuple[Path, nnx.Module, bool | None]]:
    """Modules that become units: elements of lists, and what lies beside and holds no such list.

    The third is None beside a list, True for a list's first module, False for its others.
    """
    if isinstance(module, nnx.List):
        inside = [(part, each) for part, each in enumerate(module) if isinstance(each, nnx.Module)]
        for number, (part, each) in enumerate(inside):
            yield (*path, part), each, number == 0
        return
    for name, child in _children(module):
        if _holds_list(child):
            yield from _walk_units(child, (*path, name))
        else:
            yield (*path, name), child, None


def _children(module: nnx.Module) -> Iterator[tuple[Any, nnx.Module]]:
    direct = vars(module).items() if not isinstance(module, nnx.Dict) else module.items()
    for name, child in direct:
        if isinstance(child, nnx.Module):
            yield name, child


def _holds_list(module: nnx.Module) -> bool:
    return any(isinstance(each, nnx.List) for _, each in nnx.iter_modules(module))


def _merge(graph: Any, variables: Mapping[Path, Any], values: Mapping[Path, Any]) -> Any:
    flat = [
        (path, leaf.replace(values[path]) if isinstance(leaf, nnx.Variable) else values[path])
        for path, leaf in variables.items()
    ]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _refuse_equal_names(names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigurationError(
                f"{count} arrays of the model would be called {name!r}: rename a key that has a dot"
            )


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
