# SPDX-License-Identifier: Apache-2.0
"""A model's arrays, and a train step's state: a plain pytree of them in their true shapes.

A model is any pytree of arrays (Equinox modules, variables of Linen and Haiku), or an `nnx.Module`,
whose state is one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec
from fullshard.jax.mesh import Axis, MeshAxes
from fullshard.jax.placing import (
    annotation,
    by_path,
    dtype_on_device,
    is_array,
    is_key,
    named_leaves,
    path_name,
    put,
    split_arrays,
    split_module,
)
from fullshard.jax.rule import Placement, Rule, place


@dataclass
class ModelArrays:
    """A model's arrays by path, as far as the engine needs to know it.

    ``other`` is state that no gradient reaches: statistics, random keys and counts, constants.
    ``annotations`` are the axis names that parameters carry.
    """

    source: Any  # the model, or the function that makes it
    made: bool  # by that function; else the arrays are there already
    graph: Any  # of a module
    treedef: Any  # of the pytree, or of the module's state
    leaves: list[Any] = field(default_factory=list)  # names of arrays; all else in a tuple
    specs: list[ParamSpec] = field(default_factory=list)
    other: dict[str, jax.ShapeDtypeStruct] = field(default_factory=dict)
    annotations: dict[str, tuple[Axis, ...]] = field(default_factory=dict)

    def initial(self) -> dict[str, Any]:
        """All arrays by path; may be traced, so that no device ever holds them whole."""
        with nnx.use_eager_sharding(False):
            return self.values(self.source() if self.made else self.source)

    def values(self, model: Any) -> dict[str, Any]:
        pairs = zip(self.leaves, jax.tree.leaves(split_module(model)[1]), strict=True)
        return {name: x for name, x in pairs if isinstance(name, str)}

    def tree(self, values: Mapping[str, Any]) -> Any:
        """Put values into the model's structure, None elsewhere; for a module a nested dict."""
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


def read_model(model: Any, wrt: Any) -> ModelArrays:
    """The structure of ``model``: a module, a pytree, or a function that makes one of them.

    Nothing is allocated for a function: it is traced, now and once more to initialise. Raises
    `ConfigurationError` if there are no parameters, or ``wrt`` matches none of them.
    """
    arrays_in = any(map(is_array, jax.tree.leaves(model)))
    made = callable(model) and not isinstance(model, nnx.Module) and not arrays_in
    graph, tree = _made_of_shapes(model) if made else split_module(model)
    if graph is None and not (wrt is None or callable(wrt)):
        raise ConfigurationError(f"wrt={wrt!r}: of a pytree it is a predicate on paths")
    trained: Any = wrt
    if graph is not None:
        trained = nnx.filterlib.to_predicate(nnx.Param if wrt is None else wrt)
    found = ModelArrays(model, made, graph, jax.tree.structure(tree))
    for name, leaf, box, path in named_leaves(tree):
        if not is_array(leaf):
            found.leaves.append((leaf,))
            continue
        if name in found.leaves:
            raise ConfigurationError(
                f"2 arrays of the model would be called {name!r}: rename a key that has a dot"
            )
        found.leaves.append(name)
        inexact = not is_key(leaf) and jnp.issubdtype(leaf.dtype, np.inexact)
        if graph is None:
            chosen = is_param = inexact
            chosen = chosen and (trained is None or bool(trained(name)))
        else:
            chosen = bool(trained(tuple(each.key for each in path), box))
            is_param = chosen or isinstance(box, nnx.Param)
        if chosen and not inexact:
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
        kind = "a module" if graph is not None else type(tree).__name__
        raise ConfigurationError(f"{kind} has no arrays to be trained")
    if not any(spec.trainable for spec in found.specs):
        some = ", ".join(spec.name for spec in found.specs[:5])
        raise ConfigurationError(f"wrt={wrt!r} selects no parameter; paths are like: {some}")
    return found


def _made_of_shapes(make: Callable[[], Any]) -> tuple[Any, Any]:
    """Split what ``make`` makes of shapes in place of arrays; all else stays as it is."""
    rest: list[Any] = []

    def arrays() -> Any:
        graph, tree = split_module(make())
        arrays, rebuild = split_arrays(tree)
        rest.extend((graph, rebuild))
        return arrays

    with nnx.use_eager_sharding(False):  # annotations name axes of a mesh that is not there yet
        shapes = jax.eval_shape(arrays)
    graph, rebuild = rest
    return graph, rebuild(shapes)


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


def state_shapes(
    axes: MeshAxes, model: ModelArrays, placements: Mapping[str, Placement], tx: Any
) -> TrainState:
    """A state's shapes, dtypes and shardings: in an optimizer's state those of the parameters."""

    def placed(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        cut: tuple[Axis, ...] = ()
        if path[0].name in ("params", "optimizer") and not is_key(leaf):
            # As the parameter that it mirrors rests (its path at the end, its shape), or by itself.
            names = [path_name(path[start:]) for start in range(1, len(path) + 1)]
            owners = [placements[name] for name in names if name in placements]
            own = ParamSpec(names[0], tuple(leaf.shape), np.dtype(leaf.dtype).name)
            alike = [each for each in owners if each.spec.shape == own.shape]
            cut = (alike or place([own], axes, Rule(min_numel=2)))[0].axes
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=axes.sharding(*cut))

    shapes = {name: jax.ShapeDtypeStruct(each.spec.shape, each.spec.dtype)
              for name, each in placements.items()}  # fmt: skip
    trained = {name: x for name, x in shapes.items() if placements[name].spec.trainable}
    kept = jax.eval_shape(tx.init, model.tree(trained))
    step = jax.ShapeDtypeStruct((), np.int32)
    state = TrainState(model.tree(shapes), kept, dict(model.other), step)
    return jax.tree.map_with_path(placed, state)


def fitted(state: TrainState, expected: TrainState) -> TrainState:
    """``state`` with each array where it rests: what lies elsewhere, as on the host, is moved.

    Raises `ConfigurationError` if it is no state of these shapes, or was used up by a step.
    """
    if not isinstance(state, TrainState):
        raise ConfigurationError(f"expected a TrainState, got {type(state).__name__}")
    theirs: Any = jax.tree.structure(state)
    if theirs != jax.tree.structure(expected):
        known, given = set(by_path(expected)), set(by_path(state))
        for what, names in (("lacks", known - given), ("has beside", given - known)):
            if names:
                raise ConfigurationError(
                    f"the state {what} {min(names)!r}: another model or optimizer made it"
                )
        raise ConfigurationError("the state is another tree than the step's")
    return jax.tree.map_with_path(_fitted, expected, state)


def _fitted(path: Any, expected: jax.ShapeDtypeStruct, given: Any) -> Any:
    """``given`` where it rests, moved if it lies elsewhere."""
    given = given if isinstance(given, jax.Array) else np.asarray(given)
    text = ""
    if isinstance(given, jax.Array) and given.is_deleted():  # a CPU's process would end with it
        text = "was used up by a step before: go on with the state which that returned, or make "
        text += "the step with donate=False"
    elif given.shape != expected.shape:
        text = f"has shape {given.shape}, the step expects {expected.shape}: another model or "
        text += "optimizer made it"
    elif given.dtype != expected.dtype:
        text = f"is {given.dtype}, the step expects {expected.dtype}"
    if text:
        raise ConfigurationError(f"the state's {path[0].name} {path_name(path[1:])!r} {text}")
    return put(given, expected.sharding)
