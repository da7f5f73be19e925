# SPDX-License-Identifier: Apache-2.0
"""A model's arrays, and a train step's state: a plain pytree of them in their true shapes.

A model is any pytree of arrays (Equinox modules, variables of Linen and Haiku), or an `nnx.Module`,
whose state is one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec
from fullshard.jax.mesh import Axis, MeshAxes
from fullshard.jax.placing import (
    annotation,
    as_key,
    by_path,
    dtype_on_device,
    is_array,
    is_key,
    key_data,
    named_leaves,
    path_name,
    put,
    split_arrays,
    to_host,
)
from fullshard.jax.rule import Placement, Rule, place

__all__ = ["ModelArrays", "StateArrays", "TrainState", "read_model"]


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
        if name in found.leaves:
            raise ConfigurationError(
                f"2 arrays of the model would be called {name!r}: rename a key that has a dot"
            )
        found.leaves.append(name)
        if found.graph is None:
            is_param = not is_key(leaf) and jnp.issubdtype(leaf.dtype, np.inexact)
            chosen = is_param and (trained is None or bool(trained(name)))
        else:
            chosen = bool(trained(tuple(each.key for each in path), box))
            is_param = chosen or isinstance(box, nnx.Param)
        if chosen and not jnp.issubdtype(leaf.dtype, np.inexact):
            raise ConfigurationError(
                f"{name!r} {tuple(leaf.shape)} is {leaf.dtype}, which cannot be trained: keep it "
                "in another nnx.Variable than a parameter, or leave it out of wrt"
            )
        if is_param:
            dtype = dtype_on_device(leaf).name
            found.specs.append(ParamSpec(name, tuple(leaf.shape), dtype, chosen))
            found.annotations[name] = annotation(box)
        else:
            found.other[name] = jax.ShapeDtypeStruct(leaf.shape, dtype_on_device(leaf))
    if not found.specs:
        raise ConfigurationError(f"{type(abstract).__name__} has no arrays to be trained")
    if not any(spec.trainable for spec in found.specs):
        some = ", ".join(spec.name for spec in found.specs[:5])
        raise ConfigurationError(f"wrt={wrt!r} selects no parameter; paths are like: {some}")
    return found


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


@jax.tree_util.register_dataclass
@dataclass
class TrainState:
    """All that a step changes; made by `TrainStep.init`, a pytree.

    ``params`` is a tree in the model's structure (for a module nested dicts), ``optimizer`` what
    optax keeps, ``other`` has the rest by path (statistics, random keys and counts), ``step`` the
    steps taken (int32).
    """

    params: Any
    optimizer: Any
    other: dict[str, Any]
    step: Any


class StateArrays:
    """The arrays of a state: ``abstract`` is one of their shapes, dtypes and shardings."""

    def __init__(
        self, axes: MeshAxes, model: ModelArrays, placements: Sequence[Placement], tx: Any
    ) -> None:
        if not (hasattr(tx, "init") and hasattr(tx, "update")):
            raise ConfigurationError(
                f"expected an optax GradientTransformation, got {type(tx).__name__}; of an "
                "nnx.Optimizer that is its .tx"
            )
        self.axes: MeshAxes = axes
        self.tx: Any = optax.with_extra_args_support(tx)
        self.params: dict[str, Placement] = {each.name: each for each in placements}
        shapes = {each.name: jax.ShapeDtypeStruct(each.spec.shape, each.spec.dtype)
                  for each in placements}  # fmt: skip
        trained = {n: x for n, x in shapes.items() if self.params[n].spec.trainable}
        kept = jax.eval_shape(self.tx.init, model.tree(trained))
        step = jax.ShapeDtypeStruct((), np.int32)
        bare = TrainState(model.tree(shapes), kept, dict(model.other), step)
        self.abstract: TrainState = jax.tree.map_with_path(self._placed, bare)
        self.shardings: TrainState = jax.tree.map(lambda x: x.sharding, self.abstract)
        self._treedef: Any = jax.tree.structure(self.abstract)
        self._leaves = jax.tree.leaves_with_path(self.abstract)  # looked at in every step

    def _placed(self, path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        axes: tuple[Axis, ...] = ()
        if path[0].name == "params":
            axes = self.params[path_name(path[1:])].axes
        elif path[0].name == "optimizer" and not is_key(leaf):
            axes = self._axes_in_optimizer(path[1:], leaf)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.axes.sharding(*axes))

    def _axes_in_optimizer(self, path: Any, leaf: Any) -> tuple[Axis, ...]:
        """As the parameter that it mirrors rests (its path at the end, its shape), or by itself."""
        for start in range(len(path) + 1):
            owner = self.params.get(path_name(path[start:]))
            if owner is not None and owner.spec.shape == tuple(leaf.shape):
                return owner.axes
        spec = ParamSpec(path_name(path), tuple(leaf.shape), np.dtype(leaf.dtype).name)
        return place([spec], self.axes, Rule(min_numel=2))[0].axes

    def at_rest(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters or their gradients, cut as they rest; for a trace."""
        return {
            name: jax.lax.with_sharding_constraint(x, self.axes.sharding(*self.params[name].axes))
            for name, x in params.items()
        }

    def from_host(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays on the devices, in memory of their own, of whole ones by the model's paths."""
        rest, placed = {**by_path(self.abstract.params), **self.abstract.other}, {}
        for name, value in values.items():
            if isinstance(value, jax.ShapeDtypeStruct):
                raise ConfigurationError(
                    f"{name!r} of the model is a shape without values: give a function that makes "
                    "the model, or restore a state"
                )
            whole = to_host(key_data(value))
            placed[name] = as_key(put(whole, rest[name].sharding), value)
        return placed

    def fitted(self, state: TrainState) -> TrainState:
        """``state`` with each array where it rests: what lies elsewhere, as on the host, is moved.

        Raises:
            ConfigurationError: if it is no state of these arrays, or was used up by a step.
        """
        if not isinstance(state, TrainState):
            raise ConfigurationError(f"expected a TrainState, got {type(state).__name__}")
        if jax.tree.structure(state) != self._treedef:
            known, given = set(by_path(self.abstract)), set(by_path(state))
            for what, names in (("lacks", known - given), ("has beside", given - known)):
                if names:
                    raise ConfigurationError(f"the state {what} {min(names)!r}: another model or "
                                             "optimizer made it")  # fmt: skip
            raise ConfigurationError("the state is another tree than the step's")
        pairs = zip(self._leaves, jax.tree.leaves(state), strict=True)
        return jax.tree.unflatten(self._treedef, [_fitted(*leaf, given) for leaf, given in pairs])


def _fitted(path: Any, expected: jax.ShapeDtypeStruct, given: Any) -> Any:
    """``given`` where it rests, moved if it lies elsewhere."""
    on_device, text = isinstance(given, jax.Array), ""
    given = given if on_device else np.asarray(given)
    if on_device and given.is_deleted():  # running with it would end the process on a CPU
        text = (
            "was used up by a step before: go on with the state which that returned, or make the "
            "step with donate=False"
        )
    elif given.shape != expected.shape:
        text = f"has shape {given.shape}, the step expects {expected.shape}: another model or "
        text += "optimizer made it"
    elif given.dtype != expected.dtype:
        text = f"is {given.dtype}, the step expects {expected.dtype}"
    if text:
        raise ConfigurationError(f"the state's {path[0].name} {path_name(path[1:])!r} {text}")
    return put(given, expected.sharding)
