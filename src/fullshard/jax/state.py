# SPDX-License-Identifier: Apache-2.0
"""A train step's state: arrays as they rest, and access to each in its true shape."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fullshard.core.errors import ConfigurationError
from fullshard.jax.gathers import resting_sharding
from fullshard.jax.model import Model, is_key
from fullshard.jax.optimizer import ShardedOptimizer
from fullshard.jax.placement import Form, Placement
from fullshard.jax.sharding import to_host

__all__ = ["RestingPlace", "StateArrays", "StateSpec", "TrainState"]


@jax.tree_util.register_dataclass
@dataclass
class TrainState:
    """All that a step changes, as it rests; made by `TrainStep.init`, a pytree.

    ``params`` has an array for each placement by its name, ``optimizer`` those that the optimizer
    keeps, ``other`` replicated state by path (statistics, random keys and counts), ``step`` the
    steps taken (int32).
    """

    params: dict[str, Any]
    optimizer: dict[str, Any]
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


@dataclass(frozen=True)
class RestingPlace:
    """Where an array rests: an attribute of `TrainState`, a name there, the layer if stacked."""

    part: str
    name: str
    layer: int | None


@dataclass(frozen=True)
class _Place:
    spec: StateSpec
    part: str  # the attribute of TrainState
    name: str
    placement: Placement | None
    member: int


class StateArrays:
    """Where each array of a state rests; in and out one array at a time."""

    def __init__(
        self, mesh: Mesh, model: Model, placements: Sequence[Placement], tx: ShardedOptimizer
    ) -> None:
        self._mesh = mesh
        self._placements = placements
        self._tx = tx
        self._other = model.other
        self._shapes: dict[str, dict[str, tuple[int, ...]]] | None = None
        self._places = {place.spec.key: place for place in self._find()}

    @property
    def specs(self) -> tuple[StateSpec, ...]:
        """All arrays of a state: parameters, other state, optimizer state, and the step."""
        return tuple(place.spec for place in self._places.values())

    def resting_place(self, key: str) -> RestingPlace:
        """Where the array ``key`` rests."""
        place = self._place(key)
        stacked = place.placement is not None and place.placement.stacked
        return RestingPlace(place.part, place.name, place.member if stacked else None)

    def shardings(self) -> TrainState:
        """The sharding of each array at rest."""
        whole = NamedSharding(self._mesh, PartitionSpec())
        return TrainState(
            {each.name: resting_sharding(self._mesh, each) for each in self._placements},
            {
                name: resting_sharding(self._mesh, each) if each else whole
                for name, each in self._tx.resting.items()
            },
            dict.fromkeys(self._other, whole),
            whole,
        )

    def abstract(self) -> TrainState:
        """Shape, dtype and sharding of each array at rest; nothing is allocated."""
        alone = {leaf.rests_in: leaf for leaf in self._tx.leaves}
        shapes = TrainState(
            {
                each.name: jax.ShapeDtypeStruct(each.rest_shape, each.dtype)
                for each in self._placements
            },
            {
                name: jax.ShapeDtypeStruct(
                    each.rest_shape if each else alone[name].shape, alone[name].dtype
                )
                for name, each in self._tx.resting.items()
            },
            dict(self._other),
            jax.ShapeDtypeStruct((), np.int32),
        )
        return jax.tree.map(
            lambda shape, sharding: jax.ShapeDtypeStruct(
                shape.shape, shape.dtype, sharding=sharding
            ),
            shapes,
            self.shardings(),
        )

    def abstract_flat(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """The shapes at rest of what is named, by part of a state and name."""
        if self._shapes is None:
            state = self.abstract()
            self._shapes = {
                part: {name: x.shape for name, x in getattr(state, part).items()}
                for part in ("params", "optimizer", "other")
            }
        return self._shapes

    def gather_array(self, state: TrainState, key: str) -> np.ndarray[Any, Any]:
        """One array whole, in its true shape, on the host; with several processes a collective."""
        place = self._place(key)
        array = self._resting(state, place)
        if is_key(array):
            return to_host(jax.random.key_data(array))
        if place.placement is not None and place.placement.stacked:
            array = array[place.member]
        whole = to_host(array)
        if place.placement is not None and place.placement.form is Form.FLAT:
            size = place.placement.members[0].numel
            whole = whole[:size].reshape(place.spec.shape)
        return whole

    def arrays(
        self, state: TrainState, kinds: Sequence[str] = ("parameters",)
    ) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Key and whole array of those kinds, gathered one after the other."""
        for spec in self.specs:
            if spec.kind in kinds:
                yield spec.key, self.gather_array(state, spec.key)

    def load_arrays(
        self, state: TrainState, items: Iterable[tuple[str, Any]], *, strict: bool = True
    ) -> TrainState:
        """``state``, not to be used again, with these arrays, given in their true shapes.

        With ``strict`` every parameter must come. All processes must give the same.

        Raises:
            ConfigurationError: for an unknown key, another shape, or a parameter that did not come;
                with an iterator, arrays that came before have been taken then.
        """
        parts: dict[str, dict[str, Any]] = {
            "params": dict(state.params),
            "optimizer": dict(state.optimizer),
            "other": dict(state.other),
            "step": {"step": state.step},
        }
        missing = {spec.key for spec in self.specs if spec.kind == "parameters"}
        for key, given in items:
            place = self._place(key)
            part = parts[place.part]
            part[place.name] = self._written(place, part[place.name], np.asarray(given))
            missing.discard(key)
        if strict and missing:
            raise ConfigurationError(
                f"{len(missing)} parameters did not come, among them {min(missing)!r}; "
                "strict=False keeps what they are"
            )
        return TrainState(
            parts["params"], parts["optimizer"], parts["other"], parts["step"]["step"]
        )

    def params_from_host(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters at rest, from whole arrays by the model's paths."""
        params = {}
        for each in self._placements:
            members = [_packed(each, to_host(values[spec.name])) for spec in each.members]
            whole = np.stack(members) if each.stacked else members[0]
            params[each.name] = _put(whole, resting_sharding(self._mesh, each))
        return params

    def other_from_host(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Other state on all devices, from arrays by path."""
        whole = NamedSharding(self._mesh, PartitionSpec())
        other = {}
        for name, value in values.items():
            if is_key(value):
                data = _put(to_host(jax.random.key_data(value)), whole)
                other[name] = jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
            else:
                other[name] = _put(to_host(value), whole)
        return other

    def _written(self, place: _Place, array: Any, given: np.ndarray[Any, Any]) -> Any:
        spec = place.spec
        if given.shape != spec.shape:
            raise ConfigurationError(
                f"{spec.key} has shape {spec.shape}, what came for it has {given.shape}"
            )
        if is_key(array):
            data = _put(given.astype(np.uint32), array.sharding)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
        given = given.astype(array.dtype)
        placement = place.placement
        if placement is None:
            return _put(given, array.sharding)
        given = _packed(placement, given)
        if not placement.stacked:
            return _put(given, array.sharding)
        layer = NamedSharding(self._mesh, PartitionSpec(*placement.axes[1:]))
        return _write_layer(array.sharding)(array, place.member, _put(given, layer))

    def _place(self, key: str) -> _Place:
        try:
            return self._places[key]
        except KeyError:
            some = ", ".join(list(self._places)[:5])
            raise ConfigurationError(
                f"no array {key!r} in the state; keys are like {some}"
            ) from None

    @staticmethod
    def _resting(state: TrainState, place: _Place) -> Any:
        part = getattr(state, place.part)
        return part if place.part == "step" else part[place.name]

    def _find(self) -> Iterator[_Place]:
        for placement in self._placements:
            for number, each in enumerate(placement.members):
                spec = StateSpec(
                    "parameters", each.name, each.shape, each.dtype, each.trainable, each.aliases
                )
                yield _Place(spec, "params", placement.name, placement, number)
        for name, value in self._other.items():
            shown = jax.eval_shape(jax.random.key_data, value) if is_key(value) else value
            spec = StateSpec("other", name, tuple(shown.shape), np.dtype(shown.dtype).name)
            yield _Place(spec, "other", name, None, 0)
        for leaf in self._tx.leaves:
            spec = StateSpec("optimizer", leaf.path, leaf.shape, leaf.dtype)
            yield _Place(spec, "optimizer", leaf.rests_in, leaf.placement, leaf.member)
        yield _Place(StateSpec("step", "step", (), "int32"), "step", "step", None, 0)


_writers: dict[Any, Any] = {}


def _write_layer(sharding: NamedSharding) -> Any:
    if sharding not in _writers:

        def write(stack: Any, layer: Any, piece: Any) -> Any:
            return stack.at[layer].set(piece)

        _writers[sharding] = jax.jit(write, donate_argnums=(0,), out_shardings=sharding)
    return _writers[sharding]


def _packed(placement: Placement, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if placement.form is not Form.FLAT:
        return array
    return np.pad(array.reshape(-1), (0, placement.rest_shape[-1] - array.size))


def _put(whole: np.ndarray[Any, Any], sharding: Any) -> Any:
    """``whole`` on the devices; each gets its slice only, and a process reads its own only."""
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
