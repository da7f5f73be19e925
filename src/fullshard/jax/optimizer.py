# SPDX-License-Identifier: Apache-2.0
"""An optax optimizer over arrays at rest: in lanes where it can be, else through whole arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec
from fullshard.jax.gathers import pack, unpack
from fullshard.jax.lanes import Lane, NotElementwise, Uniform, carry_out, fill, members_of
from fullshard.jax.model import Model, is_key
from fullshard.jax.placement import Placement, Rule, place
from fullshard.jax.sharding import path_name

__all__ = ["OptimizerLeaf", "ShardedOptimizer", "read_optimizer"]


@dataclass(frozen=True)
class OptimizerLeaf:
    """One array of the optimizer's state as optax makes it, and where it rests.

    ``rests_in`` is the name of the array at rest, ``member`` its place in that array's placement;
    ``placement`` is None for what is replicated as it is, such as a count of steps. In lanes
    ``owner`` names the placement of the parameters that it mirrors.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    rests_in: str
    placement: Placement | None = None
    member: int = 0
    owner: str = ""


@dataclass
class ShardedOptimizer:
    """How to initialise and to apply an optimizer on arrays at rest; every method is traceable."""

    tx: Any
    model: Model
    placements: dict[str, Placement]
    leaves: list[OptimizerLeaf]
    treedef: Any
    by_lanes: bool
    note: str = ""

    @property
    def resting(self) -> dict[str, Placement | None]:
        """How each array of the state rests, by name; None if it is replicated."""
        return {leaf.rests_in: leaf.placement for leaf in self.leaves}

    def init(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The state before the first step."""
        tree = self._tree(params)
        if not self.by_lanes:
            return self._state_at_rest(jax.tree.leaves(self.tx.init(tree)))
        program = jax.make_jaxpr(self.tx.init)(self._tree(None))
        return self._state_at_rest(carry_out(program, _leaves(tree)))

    def update(
        self,
        grads: Mapping[str, Any],
        state: Mapping[str, Any],
        params: Mapping[str, Any],
        loss: Any,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Parameters and state after one step; the loss is offered to optimizers that want it."""
        trees = (self._tree(grads), self._state(state), self._tree(params), loss)
        if self.by_lanes:
            abstract = (self._tree(None), self._abstract_state(), self._tree(None), loss)
            program = jax.make_jaxpr(_apply(self.tx))(*abstract)
            results = carry_out(program, _leaves(trees))
        else:
            results = jax.tree.leaves(_apply(self.tx)(*trees))
        count = len(jax.tree.leaves(self._tree(None)))
        return self._parameters(results[:count]), self._state_at_rest(results[count:])

    def _tree(self, arrays: Mapping[str, Any] | None) -> Any:
        """The trainable parameters, or what belongs to them, in the model's structure."""
        values: dict[str, Any] = {}
        for path, (placement, member) in members_of(self.placements).items():
            if arrays is None:
                values[path] = jax.ShapeDtypeStruct(placement.shape, placement.dtype)
            else:
                values[path] = self._member(arrays[placement.name], placement, member)
        return self.model.tree(values)

    def _member(self, array: Any, placement: Placement, member: int) -> Any:
        if self.by_lanes:
            return Lane(placement, member, array, placement.shape)
        return unpack(placement, array[member] if placement.stacked else array)

    def _state(self, state: Mapping[str, Any]) -> Any:
        leaves = []
        for leaf in self.leaves:
            array = state[leaf.rests_in]
            if leaf.placement is not None:
                placement = self.placements[leaf.owner] if self.by_lanes else leaf.placement
                array = self._member(array, placement, leaf.member)
            leaves.append(array)
        return jax.tree.unflatten(self.treedef, leaves)

    def _abstract_state(self) -> Any:
        leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.leaves]
        return jax.tree.unflatten(self.treedef, leaves)

    def _parameters(self, results: Sequence[Any]) -> dict[str, Any]:
        members = members_of(self.placements)
        order = jax.tree.leaves(self.model.tree({path: path for path in members}))
        found = _Resting(self.by_lanes)
        for path, result in zip(order, results, strict=True):
            placement, member = members[path]
            found.put(placement.name, placement, member, result)
        return found.arrays()

    def _state_at_rest(self, results: Sequence[Any]) -> dict[str, Any]:
        found = _Resting(self.by_lanes)
        for leaf, result in zip(self.leaves, results, strict=True):
            found.put(leaf.rests_in, leaf.placement, leaf.member, result)
        return found.arrays()


class _Resting:
    """Results of an optimizer, brought back to how they rest."""

    def __init__(self, by_lanes: bool) -> None:
        self._by_lanes = by_lanes
        self._found: dict[str, tuple[Placement | None, list[Any]]] = {}

    def put(self, name: str, placement: Placement | None, member: int, result: Any) -> None:
        """Take the result for one member; members of a stack come in order."""
        results = self._found.setdefault(name, (placement, []))[1]
        if placement is not None and self._by_lanes:
            _check_owner(result, placement, member)
            if results and not _equal(results[0], result):
                raise NotElementwise(f"layers of {placement.name} are treated differently")
        results.append(result)

    def arrays(self) -> dict[str, Any]:
        """All of them by name."""
        return {name: self._array(*found) for name, found in self._found.items()}

    def _array(self, placement: Placement | None, results: list[Any]) -> Any:
        result = results[0]
        if placement is None:
            return _apart(result)
        if not self._by_lanes:
            packed = [pack(placement, each) for each in results]
            return jnp.stack(packed) if placement.stacked else packed[0]
        if len(results) != len(placement.members):
            raise NotElementwise(f"only some layers of {placement.name} have a state")
        if isinstance(result, Lane) and not result.each:
            return result.array
        value = result.array if isinstance(result, Lane) else getattr(result, "value", result)
        return fill(placement, value, placement.dtype)


def read_optimizer(
    tx: Any, model: Model, placements: Sequence[Placement], shards: int, loss_dtype: Any
) -> ShardedOptimizer:
    """What ``tx`` keeps for the trainable parameters, and whether it can work in lanes.

    Nothing is allocated. ``note`` of the result says why whole arrays are needed, if they are.

    Raises:
        ConfigurationError: if ``tx`` is no optax transformation.
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ConfigurationError(
            f"expected an optax GradientTransformation, got {type(tx).__name__}; of an "
            "nnx.Optimizer that is its .tx"
        )
    tx = optax.with_extra_args_support(tx)
    trainable = {each.name: each for each in placements if each.trainable}
    draft = ShardedOptimizer(tx, model, trainable, [], None, True)
    abstract = jax.eval_shape(tx.init, draft._tree(None))
    named, treedef = jax.tree_util.tree_flatten_with_path(abstract)
    for path, leaf in named:
        if is_key(leaf):
            raise ConfigurationError(
                f"the optimizer keeps a typed random key at {path_name(path)!r}, which its sharded "
                "state cannot hold: leave that transformation out"
            )
    lanes = replace(draft, leaves=_lane_leaves(named, trainable), treedef=treedef)
    try:
        jax.eval_shape(lanes.init, _abstract_rest(trainable))
        jax.eval_shape(
            lanes.update,
            _abstract_rest(trainable),
            _abstract_rest(lanes.resting, lanes.leaves),
            _abstract_rest(trainable),
            jax.ShapeDtypeStruct((), loss_dtype),
        )
    except NotElementwise as found:
        note = f"the optimizer works on whole arrays: {found}"
        return replace(
            draft,
            leaves=_whole_leaves(named, shards),
            treedef=treedef,
            by_lanes=False,
            note=note,
        )
    return lanes


def _apply(tx: Any) -> Any:
    def apply(grads: Any, state: Any, params: Any, loss: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    return apply


def _lane_leaves(
    named: Sequence[tuple[Any, Any]], placements: Mapping[str, Placement]
) -> list[OptimizerLeaf]:
    """A state's arrays: those that mirror a parameter (its path at the end, its shape) rest so."""
    members = members_of(placements)
    leaves = []
    for path, leaf in named:
        full = path_name(path)
        dtype = np.dtype(leaf.dtype).name
        owner = next(
            (
                name
                for name in (path_name(path[start:]) for start in range(len(path) + 1))
                if name in members and members[name][0].shape == tuple(leaf.shape)
            ),
            None,
        )
        if owner is None:
            leaves.append(OptimizerLeaf(full, tuple(leaf.shape), dtype, full))
            continue
        placement, member = members[owner]
        slot = full[: len(full) - len(owner)]
        retyped = tuple(replace(spec, dtype=dtype) for spec in placement.members)
        leaves.append(
            OptimizerLeaf(
                full,
                tuple(leaf.shape),
                dtype,
                slot + placement.name,
                replace(placement, members=retyped),
                member,
                placement.name,
            )
        )
    return leaves


def _whole_leaves(named: Sequence[tuple[Any, Any]], shards: int) -> list[OptimizerLeaf]:
    """A state's arrays, each resting on its own; single elements are replicated."""
    leaves = []
    for path, leaf in named:
        full, dtype = path_name(path), np.dtype(leaf.dtype).name
        spec = ParamSpec(full, tuple(leaf.shape), dtype)
        placement = place([(spec,)], {"fsdp": shards}, Rule(min_numel=2))[0]
        kept = placement if "fsdp" in placement.axes else None
        leaves.append(OptimizerLeaf(full, spec.shape, dtype, full, kept))
    return leaves


def _abstract_rest(
    placements: Mapping[str, Placement | None], leaves: Sequence[OptimizerLeaf] = ()
) -> dict[str, Any]:
    alone = {leaf.rests_in: leaf for leaf in leaves}
    return {
        name: jax.ShapeDtypeStruct(each.rest_shape, each.dtype)
        if each is not None
        else jax.ShapeDtypeStruct(alone[name].shape, alone[name].dtype)
        for name, each in placements.items()
    }


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Lane))


def _apart(result: Any) -> Any:
    if isinstance(result, Lane):
        if result.shape:
            raise NotElementwise(f"state that is no parameter's is made of {result.placement.name}")
        return result.alone()
    return jnp.broadcast_to(result.value, result.shape) if isinstance(result, Uniform) else result


def _check_owner(result: Any, placement: Placement, member: int) -> None:
    if isinstance(result, Lane):
        if (result.placement.name, result.member) != (placement.name, member):
            raise NotElementwise(f"an array of {placement.name} is made of another parameter's")
    elif not isinstance(result, Uniform) and (placement.shape or jnp.ndim(result)):
        raise NotElementwise(f"an array of {placement.name} is made without any of its arrays")


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Lane) and isinstance(other, Lane):
        return one.array is other.array
    if isinstance(one, Uniform) and isinstance(other, Uniform):
        return one.value is other.value or _literally(one.value, other.value)
    return one is other


def _literally(one: Any, other: Any) -> bool:
    return (
        not isinstance(one, jax.core.Tracer)
        and not isinstance(other, jax.core.Tracer)
        and bool(np.array_equal(one, other))
    )
