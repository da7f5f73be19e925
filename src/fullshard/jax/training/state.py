# SPDX-License-Identifier: Apache-2.0
"""A train step's state: a plain pytree, and access to each of its arrays in its true shape."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec
from fullshard.jax.arrays.leaves import as_key, key_data, path_name
from fullshard.jax.arrays.mesh import Layout
from fullshard.jax.arrays.placing import put, to_host
from fullshard.jax.arrays.rule import Placement, Rule, place
from fullshard.jax.model.reading import Model

__all__ = ["Resting", "StateArrays", "StateSpec", "TrainState", "by_path"]


@jax.tree_util.register_dataclass
@dataclass
class TrainState:
    """All that a step changes; made by `TrainStep.init`, a pytree.

    ``params`` is a tree in the model's structure (for a module nested dicts), ``optimizer`` what
    optax keeps, ``other`` has the rest by path (statistics, random keys and counts), ``step`` the
    steps taken (int32). Arrays have their true shapes, save where the devices divide no dimension:
    those are padded at the end of one (`TrainStep.placements` tells).
    """

    params: Any
    optimizer: Any
    other: dict[str, Any]
    step: Any


@dataclass(frozen=True)
class StateSpec:
    """One array of the state in its true shape.

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

    @property
    def called(self) -> str:
        """Its field of a `TrainState` and its path, as errors name it."""
        return f"{'params' if self.kind == 'parameters' else self.kind} {self.path!r}"


@dataclass(frozen=True)
class Resting:
    """One array of a state, and how it lies between steps.

    ``abstract`` has its shape at rest, padding included, its dtype and its sharding.
    """

    spec: StateSpec
    abstract: jax.ShapeDtypeStruct
    true_shape: tuple[int, ...]  # of random keys not that of their data

    def constrained(self, array: Any) -> Any:
        """The array in either shape, cut as it rests."""
        return lax.with_sharding_constraint(array, self.abstract.sharding)

    def true(self, array: Any) -> Any:
        """The array at rest in its true shape; traceable, and moves nothing."""
        if array.shape == self.true_shape:
            return array
        return self.constrained(array[tuple(map(slice, self.true_shape))])

    def at_rest(self, array: Any) -> Any:
        """The inverse of `true`."""
        array = self.constrained(array)
        if array.shape == self.abstract.shape:
            return array
        return self.constrained(jnp.pad(array, self._widths()))

    def written(self, given: np.ndarray[Any, Any]) -> Any:
        """The array on the devices, of the whole one in its true shape (of keys, their data)."""
        if given.shape != self.spec.shape:
            raise ConfigurationError(
                f"{self.spec.key} has shape {self.spec.shape}, what came for it has {given.shape}"
            )
        given = given.astype(self.spec.dtype)
        if self.true_shape != self.abstract.shape:
            given = np.pad(given, self._widths())
        return as_key(put(given, self.abstract.sharding), self.abstract)

    def fitted(self, given: Any) -> Any:
        """``given`` where it rests, moved if it lies elsewhere."""
        expected, called = self.abstract, self.spec.called
        if not isinstance(given, jax.Array):
            given = np.asarray(given)
        elif given.is_deleted():  # running with it would end the process on a CPU
            raise ConfigurationError(
                f"the state's {called} was used up by a step before: go on with the state which "
                "that returned, or make the step with donate=False"
            )
        if given.shape != expected.shape:
            raise ConfigurationError(
                f"the state's {called} has shape {given.shape}, the step expects {expected.shape}: "
                "another mesh, rule, model or optimizer made it; arrays in true shapes go over by "
                "arrays() and load_arrays()"
            )
        if given.dtype != expected.dtype:
            raise ConfigurationError(
                f"the state's {called} is {given.dtype}, the step expects {expected.dtype}"
            )
        if not isinstance(given, jax.Array):
            return put(given, expected.sharding)
        same = given.sharding.is_equivalent_to(expected.sharding, given.ndim)
        return given if same else jax.device_put(given, expected.sharding)

    def _widths(self) -> list[tuple[int, int]]:
        return [(0, b - a) for a, b in zip(self.true_shape, self.abstract.shape, strict=True)]


class StateArrays:
    """All arrays of a state, in the order of its leaves; in and out one array at a time."""

    def __init__(self, layout: Layout, model: Model, placements: Sequence[Placement], tx: Any):
        self.layout = layout
        self.tx = _checked(tx)
        self.params = {each.name: each for each in placements}
        trained = {each.name: _true(each) for each in placements if each.spec.trainable}
        shapes = TrainState(
            model.tree({each.name: _true(each) for each in placements}),
            jax.eval_shape(self.tx.init, model.tree(trained)),
            dict(model.other),
            jax.ShapeDtypeStruct((), np.int32),
        )
        self.treedef: Any = jax.tree.structure(shapes)
        resting = [self._read(*each) for each in jax.tree.leaves_with_path(shapes)]
        self._by_key = {each.spec.key: each for each in resting}
        self.specs = tuple(each.spec for each in resting)

    def __getitem__(self, key: str) -> Resting:
        try:
            return self._by_key[key]
        except KeyError:
            some = ", ".join(list(self._by_key)[:5])
            raise ConfigurationError(
                f"no array {key!r} in the state; keys are like {some}"
            ) from None

    def abstract(self) -> TrainState:
        """Shape at rest, dtype and sharding of each array; nothing is allocated."""
        return self._tree(each.abstract for each in self._by_key.values())

    def shardings(self) -> TrainState:
        """The sharding of each array at rest."""
        return self._tree(each.abstract.sharding for each in self._by_key.values())

    def fitted(self, state: TrainState) -> TrainState:
        """``state`` with each array where it rests: what lies elsewhere, as on the host, is moved.

        Raises:
            ConfigurationError: if it is no state of these arrays, or was used up by a step.
        """
        if not isinstance(state, TrainState):
            raise ConfigurationError(f"expected a TrainState, got {type(state).__name__}")
        if jax.tree.structure(state) != self.treedef:
            self._refuse_other_tree(state)
        return self._map(Resting.fitted, state)

    def _refuse_other_tree(self, state: TrainState) -> None:
        for part in ("params", "optimizer", "other"):
            known, given = (set(by_path(getattr(x, part))) for x in (self.abstract(), state))
            for where, names in (
                ("lacks", known - given),
                ("has, and the step does not know,", given - known),
            ):
                if names:
                    raise ConfigurationError(f"the state {where} {part} {min(names)!r}")
        raise ConfigurationError(
            f"the state is a tree of {jax.tree.structure(state)}, the step's of {self.treedef}"
        )

    def true(self, state: TrainState) -> TrainState:
        """The state in true shapes; traceable, and moves nothing."""
        return self._map(Resting.true, state)

    def at_rest(self, state: TrainState) -> TrainState:
        """The inverse of `true`."""
        return self._map(Resting.at_rest, state)

    def gather_array(self, state: TrainState, key: str) -> np.ndarray[Any, Any]:
        """One array whole, in its true shape, on the host; with several processes a collective."""
        shape = self[key].spec.shape
        array = jax.tree.leaves(state)[list(self._by_key).index(key)]
        return to_host(key_data(array))[tuple(map(slice, shape))]

    def load_arrays(
        self, state: TrainState, items: Iterable[tuple[str, Any]], *, strict: bool = True
    ) -> TrainState:
        """``state`` with these arrays, given in their true shapes; all processes give the same.

        With ``strict`` every parameter must come.

        Raises:
            ConfigurationError: for an unknown key, another shape, or a parameter that did not come.
        """
        leaves = dict(zip(self._by_key, jax.tree.leaves(state), strict=True))
        missing = {spec.key for spec in self.specs if spec.kind == "parameters"}
        for key, given in items:
            leaves[key] = self[key].written(np.asarray(given))
            missing.discard(key)
        if strict and missing:
            raise ConfigurationError(
                f"{len(missing)} parameters did not come, among them {min(missing)!r}; "
                "strict=False keeps what they are"
            )
        return self._tree(leaves.values())

    def of_model(self, name: str) -> Resting:
        """The array that has this path in the model."""
        return self[f"{'parameters' if name in self.params else 'other'}/{name}"]

    def from_host(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays on the devices, of whole ones by the model's paths."""
        found = {}
        for name, value in values.items():
            if isinstance(value, jax.ShapeDtypeStruct):
                raise ConfigurationError(
                    f"{name!r} of the model is a shape without values: give a function that makes "
                    "the model, or restore a state"
                )
            found[name] = self.of_model(name).written(to_host(key_data(value)))
        return found

    def _read(self, path: Any, leaf: Any) -> Resting:
        kind, name = path[0].name, path_name(path[1:])
        placement: Placement | None = None
        if kind == "params":
            placement = self.params[name]
            said = placement.spec
            spec = StateSpec("parameters", name, said.shape, said.dtype, said.trainable)
        else:
            data = key_data(leaf)
            spec = StateSpec(kind, name or kind, tuple(data.shape), np.dtype(data.dtype).name)
            if kind == "optimizer" and data is leaf:
                placement = self._of_optimizer(path[1:], leaf)
        shape = placement.rest_shape if placement else leaf.shape
        sharding = self.layout.sharding(*(placement.axes if placement else ()))
        abstract = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
        return Resting(spec, abstract, tuple(leaf.shape))

    def _of_optimizer(self, path: Any, leaf: Any) -> Placement:
        """As the parameter that it mirrors rests (its path at the end, its shape), or by itself."""
        for start in range(len(path) + 1):
            owner = self.params.get(path_name(path[start:]))
            if owner is not None and owner.spec.shape == tuple(leaf.shape):
                return owner
        spec = ParamSpec(path_name(path), tuple(leaf.shape), np.dtype(leaf.dtype).name)
        return place([spec], self.layout, Rule(min_numel=2))[0]

    def _tree(self, leaves: Iterable[Any]) -> TrainState:
        return jax.tree.unflatten(self.treedef, list(leaves))

    def _map(self, function: Any, state: TrainState) -> TrainState:
        return self._tree(map(function, self._by_key.values(), jax.tree.leaves(state)))


def by_path(tree: Any) -> dict[str, Any]:
    """The arrays of a tree by path."""
    return {path_name(path): x for path, x in jax.tree.leaves_with_path(tree)}


def _checked(tx: Any) -> Any:
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ConfigurationError(
            f"expected an optax GradientTransformation, got {type(tx).__name__}; of an "
            "nnx.Optimizer that is its .tx"
        )
    return optax.with_extra_args_support(tx)


def _true(placement: Placement) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(placement.spec.shape, placement.spec.dtype)
