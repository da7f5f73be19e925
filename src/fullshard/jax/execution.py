# SPDX-License-Identifier: Apache-2.0
"""One run of a loss function over resting arrays: units are gathered when they are called.

[Note: Standing in for units]
The model that a loss function receives is the user's own, except that its units' classes are
replaced by subclasses whose methods call back. A call gathers the unit's parameters, makes the unit
anew from them, lets it compute, and forgets them; `jax.checkpoint` around it lets the backward
gather again. The parameters that stand in a unit outside of its calls raise when they are touched,
naming the unit; the engine then starts over with that unit's parameters gathered from the
beginning to the end (`Regime.resident`).
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fullshard.jax.calls import (
    Call,
    Chain,
    NotAsPlanned,
    Promise,
    Resting,
    Untouchable,
    keep_together,
)
from fullshard.jax.model import Model, ModuleModel, UnitSpec, at

__all__ = ["REMAT", "Execution", "Regime"]

_CALL = "_fullshard_call"


def _keep_matmuls(primitive: Any, *_: Any, **params: Any) -> bool:
    """Keep products with parameters: of matrices without batch dims, and convolutions."""
    if primitive.name == "conv_general_dilated":
        return True
    return primitive.name == "dot_general" and not any(params["dimension_numbers"][1])


REMAT: Mapping[str, Callable[..., bool] | None] = {
    "block": jax.checkpoint_policies.nothing_saveable,
    "matmuls": _keep_matmuls,
    "none": None,
}
"""What is kept of a unit's forward, beside its inputs, for its backward.

``block`` keeps nothing: the unit is gathered and computed again. ``matmuls`` keeps products with
parameters; the unit is gathered again, the cheap rest computed again. With ``none`` everything is
kept, the gathered parameters too.
"""


@dataclass
class Regime:
    """What was found out about a model while its loss was traced; grows, and is then settled."""

    resident: set[str] = field(default_factory=set)
    unrolled: set[str] = field(default_factory=set)  # the first units of stacks


class Execution:
    """One trace of a model's loss function."""

    def __init__(
        self, model: Model, resting: Resting, other: Mapping[str, Any], regime: Regime, remat: str
    ) -> None:
        self._model = model
        self._resting = resting
        self._other = dict(other)
        self._regime = regime
        self._policy = REMAT[remat]
        self._chains: dict[str, Chain] = {}
        self._stack_of = {name: stack for stack in model.stacks for name in stack}

    def run(self, loss_fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        """What ``loss_fn(model, *args)`` returns, and the other state after it."""
        model = self._model
        units = [unit for name, unit in model.units.items() if name not in self._regime.resident]
        hidden = {name: unit.name for unit in units for name in unit.names.values()}
        values: dict[str, Any] = {}
        for name in (*self._resting.places, *self._other):
            if name in hidden:
                values[name] = Untouchable(name, hidden[name])
            else:
                inside = name in self._resting.places
                values[name] = self._resting.full(name) if inside else self._other[name]
        given = model.rebuild(values)
        if not isinstance(model, ModuleModel):
            return loss_fn(given, *args), dict(self._other)
        for unit in units:
            _stand_in(at(given, unit.path), self._call, unit)
        result = loss_fn(given, *args)
        for chain in self._chains.values():
            chain.refuse("the loop over its layers did not reach the last one")
        for unit in units:
            _refuse_new_values(at(given, unit.path), unit)
        loose = {name for name in self._other if name not in hidden}
        return result, self._other | model.read_state(given, loose)

    def _call(self, unit: UnitSpec, module: nnx.Module, method: str, args: Any, kwargs: Any) -> Any:
        _refuse_other_attributes(module, unit)
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=keep_together)
        call = Call(unit, method, treedef, leaves)
        stack = self._stack_of.get(unit.name)
        if stack is not None and stack[0] not in self._regime.unrolled:
            return self._chain(stack, call)
        for leaf in leaves:
            if isinstance(leaf, Promise):
                leaf.chain.refuse(f"what a layer returned went into {unit.name}")
        places = self._resting.places
        pieces = {p: self._resting.piece(n) for p, n in unit.names.items() if n in places}
        other = {p: self._other[n] for p, n in unit.names.items() if n not in places}
        compute = self._remat(call.computation(self._resting, unit.names))
        results, other = compute(pieces, other, call.arrays())
        self._other |= {unit.names[path]: value for path, value in other.items()}
        return call.result(results)

    def _remat(self, compute: Callable[..., Any], in_scan: bool = False) -> Callable[..., Any]:
        if self._policy is None:
            return compute
        # A scan's body is compiled by itself, so nothing can be merged with the forward's.
        return jax.checkpoint(compute, policy=self._policy, prevent_cse=not in_scan)

    def _chain(self, stack: list[str], call: "Call") -> Any:
        chain = self._chains.get(stack[0])
        if chain is None:
            chain = self._chains[stack[0]] = Chain(stack)
            chain.begin(call, self._outcome(call))
        else:
            chain.extend(call)
        if len(chain.calls) < len(stack):
            return chain.promised()
        del self._chains[stack[0]]
        return chain.calls[0].result(self._scan(chain))

    def _outcome(self, call: "Call") -> list[jax.ShapeDtypeStruct]:
        """Shapes of what the first layer returns, without computing it."""
        names, places = call.unit.names, self._resting.places

        def compute(arrays: list[Any], other: Any) -> list[Any]:
            full = {
                path: jnp.zeros(places[name][0].shape, self._full_dtype(name))
                for path, name in names.items()
                if name in places
            }
            return call.run({**full, **other})[0]

        other = {path: self._other[n] for path, n in names.items() if n not in places}
        return jax.eval_shape(compute, call.arrays(), other)

    def _full_dtype(self, name: str) -> Any:
        shape = jax.eval_shape(lambda: self._resting.full(name))
        return shape.dtype

    def _scan(self, chain: "Chain") -> list[Any]:
        first = chain.calls[0]
        units = [call.unit for call in chain.calls]
        places = self._resting.places
        names = units[0].names
        pieces = {path: self._resting.stack(name) for path, name in names.items() if name in places}
        other = {
            path: jnp.stack([self._other[unit.names[path]] for unit in units])
            for path, name in names.items()
            if name not in places
        }
        compute = self._remat(first.computation(self._resting, names), in_scan=True)
        begin = first.arrays()
        carried = chain.carried  # which of the arrays a layer returns is which of its arguments

        def layer(results: list[Any], xs: Any) -> tuple[list[Any], Any]:
            arrays = list(begin)
            for number, result in carried.items():
                arrays[number] = results[result]
            return compute(xs[0], xs[1], arrays)

        start = [jnp.zeros(shape.shape, shape.dtype) for shape in chain.outcome]
        for number, result in carried.items():
            start[result] = begin[number]
        results, other = lax.scan(layer, start, (pieces, other))
        for path, stacked in other.items():
            self._other |= {unit.names[path]: stacked[k] for k, unit in enumerate(units)}
        return results


def _stand_in(module: nnx.Module, call: Callable[..., Any], unit: UnitSpec) -> None:
    if _CALL in vars(module):
        return  # the same module under two names
    vars(module)[_CALL] = functools.partial(call, unit)
    _set_class(module, _calling_back(type(module)))


def _refuse_new_values(module: nnx.Module, unit: UnitSpec) -> None:
    """Calls take the unit's arrays from elsewhere, so what was put into it would be lost."""
    for path, name in unit.names.items():
        if not isinstance(at(module, path).get_raw_value(), Untouchable):
            raise NotAsPlanned(
                f"{name} is set outside of the methods of {unit.name}", resident=unit.name
            )


def _set_class(module: nnx.Module, cls: type) -> None:
    # Flax would note the assignment as one of the module's attributes.
    object.__setattr__(module, "__class__", cls)


def _refuse_other_attributes(module: nnx.Module, unit: UnitSpec) -> None:
    """Calls make the unit anew, from what the model was when it was read."""
    stands_in = module.__class__
    call = vars(module).pop(_CALL)
    _set_class(module, stands_in.__mro__[1])
    try:
        same = nnx.split(module)[0] == unit.graph
    finally:
        _set_class(module, stands_in)
        vars(module)[_CALL] = call
    if not same:
        raise NotAsPlanned(
            f"attributes of {unit.name} were changed by the loss function", resident=unit.name
        )


@functools.cache
def _calling_back(cls: type) -> type:
    """A subclass of ``cls`` whose public methods are handed to the execution that made it."""

    def passed_on(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return vars(self)[_CALL](self, name, args, kwargs)

        return method

    names = [
        name
        for base in cls.__mro__
        if base not in nnx.Module.__mro__
        for name, each in vars(base).items()
        if inspect.isroutine(each) and (name == "__call__" or not name.startswith("_"))
        if not isinstance(each, (staticmethod, classmethod))
    ]
    return type(cls)(cls.__name__, (cls,), {name: passed_on(name) for name in names})
