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

__all__ = ["ModelArrays", "StateArrays", "StateSpec", "TrainState", "read_model"]


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
            dtype = np.dtype(leaf.dtype).name
            found.specs.append(ParamSpec(name, tuple(leaf.shape), dtype, chosen))
            found.annotations[name] = annotation(box)
        else:
            found.other[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
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


@dataclass(frozen=True)
class StateSpec:
    """One array of the state.

    ``kind`` is "parameters", "other", "optimizer" or "step". ``path`` is the model's, for the
    optimizer that in the state which optax makes. Random keys appear as their data (uint32).
    """

    kind: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = False

    @property
    def key(self) -> str:
        """Kind and path, unique in a state."""
        return f"{self.kind}/{self.path}"


class StateArrays:
    """All arrays of a state, in the order of its leaves; in and out one array at a time.

    ``abstract`` is a state of their shapes, dtypes and shardings.
    """

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
        self.treedef: Any = jax.tree.structure(bare)
        read = [self._read(path, leaf) for path, leaf in jax.tree.leaves_with_path(bare)]
        self._known = {spec.key: (spec, x) for spec, x in read}
        self.specs: tuple[StateSpec, ...] = tuple(spec for spec, _ in read)
        self.abstract: TrainState = jax.tree.unflatten(self.treedef, [x for _, x in read])
        self.shardings: TrainState = jax.tree.map(lambda x: x.sharding, self.abstract)

    def _read(self, path: Any, leaf: Any) -> tuple[StateSpec, jax.ShapeDtypeStruct]:
        kind, name, data = path[0].name, path_name(path[1:]), key_data(leaf)
        axes: tuple[Axis, ...] = ()
        shape, dtype = tuple(data.shape), np.dtype(data.dtype).name
        if kind == "params":
            axes, said = self.params[name].axes, self.params[name].spec
            spec = StateSpec("parameters", name, shape, dtype, said.trainable)
        else:
            spec = StateSpec(kind, name or kind, shape, dtype)
            if kind == "optimizer" and data is leaf:
                axes = self._axes_in_optimizer(path[1:], leaf)
        sharding = self.axes.sharding(*axes)
        return spec, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

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

    def fitted(self, state: TrainState) -> TrainState:
        """``state`` with each array where it rests: what lies elsewhere, as on the host, is moved.

        Raises:
            ConfigurationError: if it is no state of these arrays, or was used up by a step.
        """
        if not isinstance(state, TrainState):
            raise ConfigurationError(f"expected a TrainState, got {type(state).__name__}")
        if jax.tree.structure(state) != self.treedef:
            self._refuse_other_tree(state)
        leaves = zip(self._known.values(), jax.tree.leaves(state), strict=True)
        return jax.tree.unflatten(self.treedef, [_fitted(*known, x) for known, x in leaves])

    def _refuse_other_tree(self, state: TrainState) -> None:
        for part in ("params", "optimizer", "other"):
            known, given = (set(by_path(getattr(x, part))) for x in (self.abstract, state))
            for where, names in (
                ("lacks", known - given),
                ("has, and the step does not know,", given - known),
            ):
                if names:
                    raise ConfigurationError(f"the state {where} {part} {min(names)!r}")
        raise ConfigurationError(
            f"the state is a tree of {jax.tree.structure(state)}, the step's of {self.treedef}"
        )

    def gather_array(self, state: TrainState, key: str) -> np.ndarray[Any, Any]:
        """One array whole, on the host; with several processes a collective."""
        self._lookup(key)
        return to_host(key_data(jax.tree.leaves(state)[list(self._known).index(key)]))

    def load_arrays(
        self, state: TrainState, items: Iterable[tuple[str, Any]], *, strict: bool = True
    ) -> TrainState:
        """``state`` with these whole arrays, by key; all processes give the same.

        With ``strict`` every parameter must come.

        Raises:
            ConfigurationError: for an unknown key, another shape, or a parameter that did not come.
        """
        leaves = dict(zip(self._known, jax.tree.leaves(state), strict=True))
        missing = {spec.key for spec in self.specs if spec.kind == "parameters"}
        for key, given in items:
            leaves[key] = self._written(key, np.asarray(given))
            missing.discard(key)
        if strict and missing:
            raise ConfigurationError(
                f"{len(missing)} parameters did not come, among them {min(missing)!r}; "
                "strict=False keeps what they are"
            )
        return jax.tree.unflatten(self.treedef, list(leaves.values()))

    def from_host(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays on the devices, of whole ones by the model's paths."""
        placed = {}
        for name, value in values.items():
            if isinstance(value, jax.ShapeDtypeStruct):
                raise ConfigurationError(
                    f"{name!r} of the model is a shape without values: give a function that makes "
                    "the model, or restore a state"
                )
            kind = "parameters" if name in self.params else "other"
            placed[name] = self._written(f"{kind}/{name}", to_host(key_data(value)))
        return placed

    def _written(self, key: str, given: np.ndarray[Any, Any]) -> Any:
        spec, abstract = self._lookup(key)
        if given.shape != spec.shape:
            raise ConfigurationError(
                f"{key} has shape {spec.shape}, what came for it has {given.shape}"
            )
        return as_key(put(given.astype(spec.dtype), abstract.sharding), abstract)

    def _lookup(self, key: str) -> tuple[StateSpec, jax.ShapeDtypeStruct]:
        if key not in self._known:
            some = ", ".join(list(self._known)[:5])
            raise ConfigurationError(f"no array {key!r} in the state; keys are like {some}")
        return self._known[key]


def _fitted(spec: StateSpec, expected: jax.ShapeDtypeStruct, given: Any) -> Any:
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
        part = "params" if spec.kind == "parameters" else spec.kind
        raise ConfigurationError(f"the state's {part} {spec.path!r} {text}")
    if not on_device:
        return put(given, expected.sharding)
    same = given.sharding.is_equivalent_to(expected.sharding, given.ndim)
    return given if same else jax.device_put(given, expected.sharding)
