# SPDX-License-Identifier: Apache-2.0
"""A train step's state: a plain pytree of sharded arrays in their true shapes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec
from fullshard.jax.arrays.leaves import as_key, key_data, path_name
from fullshard.jax.arrays.mesh import MeshAxes
from fullshard.jax.arrays.placing import put, to_host
from fullshard.jax.arrays.rule import Placement, Rule, place
from fullshard.jax.training.model import ModelArrays

__all__ = ["StateArrays", "StateSpec", "TrainState", "by_path"]


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
        self.axes: MeshAxes = axes
        self.tx: Any = _checked(tx)
        self.params: dict[str, Placement] = {each.name: each for each in placements}
        shapes = {n: jax.ShapeDtypeStruct(p.spec.shape, p.spec.dtype)
                  for n, p in self.params.items()}  # fmt: skip
        trained = {n: x for n, x in shapes.items() if self.params[n].spec.trainable}
        kept = jax.eval_shape(self.tx.init, model.tree(trained))
        step = jax.ShapeDtypeStruct((), np.int32)
        bare = TrainState(model.tree(shapes), kept, dict(model.other), step)
        self.treedef: Any = jax.tree.structure(bare)
        read = [self._read(path, leaf) for path, leaf in jax.tree.leaves_with_path(bare)]
        self._abstract = {spec.key: x for spec, x in read}
        self._specs = {spec.key: spec for spec, _ in read}
        self.specs: tuple[StateSpec, ...] = tuple(self._specs.values())
        self.abstract: TrainState = self._tree(self._abstract.values())
        self.shardings: TrainState = jax.tree.map(lambda x: x.sharding, self.abstract)

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
        return self._tree(map(_fitted, self.specs, self._abstract.values(), jax.tree.leaves(state)))

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
        self._known(key)
        array = jax.tree.leaves(state)[list(self._specs).index(key)]
        return to_host(key_data(array))

    def load_arrays(
        self, state: TrainState, items: Iterable[tuple[str, Any]], *, strict: bool = True
    ) -> TrainState:
        """``state`` with these whole arrays, by key; all processes give the same.

        With ``strict`` every parameter must come.

        Raises:
            ConfigurationError: for an unknown key, another shape, or a parameter that did not come.
        """
        leaves = dict(zip(self._specs, jax.tree.leaves(state), strict=True))
        missing = {spec.key for spec in self.specs if spec.kind == "parameters"}
        for key, given in items:
            leaves[key] = self._written(key, np.asarray(given))
            missing.discard(key)
        if strict and missing:
            raise ConfigurationError(
                f"{len(missing)} parameters did not come, among them {min(missing)!r}; "
                "strict=False keeps what they are"
            )
        return self._tree(leaves.values())

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
        spec, abstract = self._known(key), self._abstract[key]
        if given.shape != spec.shape:
            raise ConfigurationError(
                f"{key} has shape {spec.shape}, what came for it has {given.shape}"
            )
        return as_key(put(given.astype(spec.dtype), abstract.sharding), abstract)

    def _known(self, key: str) -> StateSpec:
        if key not in self._specs:
            some = ", ".join(list(self._specs)[:5])
            raise ConfigurationError(f"no array {key!r} in the state; keys are like {some}")
        return self._specs[key]

    def _read(self, path: Any, leaf: Any) -> tuple[StateSpec, jax.ShapeDtypeStruct]:
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
        sharding = self.axes.sharding(*(placement.axes if placement else ()))
        return spec, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def _of_optimizer(self, path: Any, leaf: Any) -> Placement:
        """As the parameter that it mirrors rests (its path at the end, its shape), or by itself."""
        for start in range(len(path) + 1):
            owner = self.params.get(path_name(path[start:]))
            if owner is not None and owner.spec.shape == tuple(leaf.shape):
                return owner
        spec = ParamSpec(path_name(path), tuple(leaf.shape), np.dtype(leaf.dtype).name)
        return place([spec], self.axes, Rule(min_numel=2))[0]

    def _tree(self, leaves: Iterable[Any]) -> TrainState:
        return jax.tree.unflatten(self.treedef, list(leaves))


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
