# SPDX-License-Identifier: Apache-2.0
"""A train step's state: a plain pytree, and access to each of its arrays in its true shape."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec
from fullshard.jax.arrays.leaves import as_key, is_key, key_data, path_name
from fullshard.jax.arrays.mesh import Layout
from fullshard.jax.arrays.placing import put, to_host
from fullshard.jax.arrays.rule import Placement, Rule, place
from fullshard.jax.model.reading import Model

__all__ = ["StateArrays", "StateSpec", "TrainState", "by_path"]


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
    aliases: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Kind and path, unique in a state."""
        return f"{self.kind}/{self.path}"

    @property
    def called(self) -> str:
        """Its field of a `TrainState` and its path, as errors name it."""
        return f"{'params' if self.kind == 'parameters' else self.kind} {self.path!r}"


class StateArrays:
    """Where each array of a state rests; in and out one array at a time.

    A position is the number of an array among the leaves of a state.
    """

    def __init__(self, layout: Layout, model: Model, placements: Sequence[Placement], tx: Any):
        self.layout = layout
        self.tx = _checked(tx)
        self._model = model
        self.params = {each.name: each for each in placements}
        trained = {each.name: _true(each) for each in placements if each.spec.trainable}
        kept = jax.eval_shape(self.tx.init, model.tree(trained))
        shapes = TrainState(
            model.tree({each.name: _true(each) for each in placements}),
            kept,
            dict(model.other),
            jax.ShapeDtypeStruct((), np.int32),
        )
        leaves = jax.tree.leaves_with_path(shapes)
        self.treedef: Any = jax.tree.structure(shapes)
        self._found: list[Placement | None] = []
        self._at_rest: list[jax.ShapeDtypeStruct] = []
        self._specs: list[StateSpec] = []
        for path, leaf in leaves:
            spec, placement = self._read(path, leaf)
            self._specs.append(spec)
            self._found.append(placement)
            self._at_rest.append(
                jax.ShapeDtypeStruct(
                    leaf.shape if placement is None else placement.rest_shape,
                    leaf.dtype,
                    sharding=layout.sharding(*(placement.axes if placement else ())),
                )
            )
        self._position = {spec.key: number for number, spec in enumerate(self._specs)}

    @property
    def specs(self) -> tuple[StateSpec, ...]:
        """All arrays of a state, in the order of its leaves."""
        return tuple(self._specs)

    @property
    def placements(self) -> tuple[Placement | None, ...]:
        """How each rests; None: replicated, as random keys and counts."""
        return tuple(self._found)

    def shardings(self) -> TrainState:
        """The sharding of each array at rest."""
        return self._tree(each.sharding for each in self._at_rest)

    def abstract(self) -> TrainState:
        """Shape at rest, dtype and sharding of each array; nothing is allocated."""
        return self._tree(self._at_rest)

    def fitted(self, state: TrainState) -> TrainState:
        """``state`` with each array where it rests: what lies elsewhere, as on the host, is moved.

        Raises:
            ConfigurationError: if it is no state of these arrays, or was used up by a step.
        """
        if not isinstance(state, TrainState):
            raise ConfigurationError(f"expected a TrainState, got {type(state).__name__}")
        leaves = jax.tree.leaves(state)
        if jax.tree.structure(state) != self.treedef:
            self._refuse_other_tree(state)
        return self._tree(map(self._fitted, self._specs, leaves, self._at_rest))

    def _fitted(self, spec: StateSpec, given: Any, rests: jax.ShapeDtypeStruct) -> Any:
        if isinstance(given, jax.Array) and given.is_deleted():
            # Running with it would end the process on a CPU.
            raise ConfigurationError(
                f"the state's {spec.called} was used up by a step before: go on with the state "
                "which that returned, or make the step with donate=False"
            )
        if not isinstance(given, jax.Array):
            given = np.asarray(given)
        if given.shape != rests.shape:
            raise ConfigurationError(
                f"the state's {spec.called} has shape {given.shape}, the step expects "
                f"{rests.shape}: another mesh, rule, model or optimizer made it; arrays in true "
                "shapes go over by arrays() and load_arrays()"
            )
        if given.dtype != rests.dtype:
            raise ConfigurationError(
                f"the state's {spec.called} is {given.dtype}, the step expects {rests.dtype}"
            )
        if not isinstance(given, jax.Array):
            return put(given, rests.sharding)
        same = given.sharding.is_equivalent_to(rests.sharding, given.ndim)
        return given if same else jax.device_put(given, rests.sharding)

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
        return self._map(self.cut, state)

    def at_rest(self, state: TrainState) -> TrainState:
        """The inverse of `true`."""
        return self._map(self._pad, state)

    def gather_array(self, state: TrainState, key: str) -> np.ndarray[Any, Any]:
        """One array whole, in its true shape, on the host; with several processes a collective."""
        number = self._number(key)
        array = key_data(jax.tree.leaves(state)[number])
        return to_host(array)[_inside(self._specs[number].shape)]

    def load_arrays(
        self, state: TrainState, items: Iterable[tuple[str, Any]], *, strict: bool = True
    ) -> TrainState:
        """``state`` with these arrays, given in their true shapes; all processes give the same.

        With ``strict`` every parameter must come.

        Raises:
            ConfigurationError: for an unknown key, another shape, or a parameter that did not come.
        """
        leaves = jax.tree.leaves(state)
        missing = {spec.key for spec in self._specs if spec.kind == "parameters"}
        for key, given in items:
            number = self._number(key)
            leaves[number] = self._written(number, leaves[number], np.asarray(given))
            missing.discard(key)
        if strict and missing:
            raise ConfigurationError(
                f"{len(missing)} parameters did not come, among them {min(missing)!r}; "
                "strict=False keeps what they are"
            )
        return self._tree(leaves)

    def from_host(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays on the devices, of whole ones by the model's paths."""
        found = {}
        for name, value in values.items():
            if isinstance(value, jax.ShapeDtypeStruct):
                raise ConfigurationError(
                    f"{name!r} of the model is a shape without values: give a function that makes "
                    "the model, or restore a state"
                )
            placement = self.params.get(name)
            if placement is None:
                data = put(to_host(key_data(value)), self.layout.sharding())
                found[name] = as_key(data, value)
            else:
                sharding = self.layout.sharding(*placement.axes)
                found[name] = put(_padded(to_host(value), placement), sharding)
        return found

    def _written(self, number: int, array: Any, given: np.ndarray[Any, Any]) -> Any:
        spec, placement = self._specs[number], self._found[number]
        if given.shape != spec.shape:
            raise ConfigurationError(
                f"{spec.key} has shape {spec.shape}, what came for it has {given.shape}"
            )
        if is_key(array):
            return as_key(put(given.astype(np.uint32), self.layout.sharding()), array)
        given = given.astype(array.dtype)
        return put(given if placement is None else _padded(given, placement), array.sharding)

    def _read(self, path: Any, leaf: Any) -> tuple[StateSpec, Placement | None]:
        part, name = path[0].name, path_name(path[1:])
        if part == "params":
            placement = self.params[name]
            spec = placement.spec
            return StateSpec(
                "parameters", name, spec.shape, spec.dtype, spec.trainable, spec.aliases
            ), placement
        if is_key(leaf):
            return StateSpec(part, name, tuple(key_data(leaf).shape), "uint32"), None
        dtype = np.dtype(leaf.dtype).name
        if part != "optimizer":
            return StateSpec(part, name or part, tuple(leaf.shape), dtype), None
        return StateSpec(part, name, tuple(leaf.shape), dtype), self._of_optimizer(path[1:], leaf)

    def _of_optimizer(self, path: Any, leaf: Any) -> Placement:
        """As the parameter that it mirrors rests (its path at the end, its shape), or by itself."""
        dtype = np.dtype(leaf.dtype).name
        for start in range(len(path) + 1):
            owner = self.params.get(path_name(path[start:]))
            if owner is not None and owner.spec.shape == tuple(leaf.shape):
                return replace(owner, spec=replace(owner.spec, dtype=dtype))
        spec = ParamSpec(path_name(path), tuple(leaf.shape), dtype)
        return place([spec], self.layout, Rule(min_numel=2))[0]

    def _number(self, key: str) -> int:
        try:
            return self._position[key]
        except KeyError:
            some = ", ".join(list(self._position)[:5])
            raise ConfigurationError(
                f"no array {key!r} in the state; keys are like {some}"
            ) from None

    def _tree(self, leaves: Iterable[Any]) -> TrainState:
        return jax.tree.unflatten(self.treedef, list(leaves))

    def _map(self, function: Any, state: TrainState) -> TrainState:
        return self._tree(map(function, jax.tree.leaves(state), self._found))

    def constrained(self, array: Any, placement: Placement) -> Any:
        """An array in its true shape, cut as it rests."""
        return lax.with_sharding_constraint(array, self.layout.sharding(*placement.axes))

    def cut(self, array: Any, placement: Placement | None) -> Any:
        """An array at rest in its true shape."""
        if placement is None or not placement.padded:
            return array
        return self.constrained(array[_inside(placement.spec.shape)], placement)

    def _pad(self, array: Any, placement: Placement | None) -> Any:
        if placement is None:
            return array
        array = self.constrained(array, placement)
        if placement.padded:
            array = self.constrained(jnp.pad(array, _widths(placement)), placement)
        return array


def by_path(tree: Any) -> dict[str, Any]:
    """The arrays of a tree by path."""
    return {path_name(path): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _checked(tx: Any) -> Any:
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ConfigurationError(
            f"expected an optax GradientTransformation, got {type(tx).__name__}; of an "
            "nnx.Optimizer that is its .tx"
        )
    return optax.with_extra_args_support(tx)


def _true(placement: Placement) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(placement.spec.shape, placement.spec.dtype)


def _inside(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def _widths(placement: Placement) -> list[tuple[int, int]]:
    return [(0, b - a) for a, b in zip(placement.spec.shape, placement.rest_shape, strict=True)]


def _padded(array: np.ndarray[Any, Any], placement: Placement) -> np.ndarray[Any, Any]:
    return np.pad(array, _widths(placement)) if placement.padded else array
