# SPDX-License-Identifier: Apache-2.0
"""Calls of units: one alone, a chain of layers, and what stands for arrays that are not there yet.

[Note: A loop that becomes a scan]
``for block in blocks: x = block(x, mask)`` is Python, and nobody tells us that it is a loop. So
calls of a stack's layers do nothing at first: each returns a `Promise` in place of arrays, and the
last layer's call runs them all as one `jax.lax.scan`. That is right if each layer's results went
into the next layer's call and nowhere else, and its other arguments were those of the first layer.
A promise is no array: whoever does anything else with it gets an error while tracing, never a wrong
value, and the engine then starts over without the scan of that stack (`Regime.unrolled`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import nnx

from fullshard.jax.gathers import Gather
from fullshard.jax.model import UnitSpec, at
from fullshard.jax.placement import Placement

__all__ = ["Call", "Chain", "NotAsPlanned", "Promise", "Resting", "Untouchable", "keep_together"]


class NotAsPlanned(Exception):
    """Tracing found a use of the model that the regime does not allow yet."""

    def __init__(self, reason: str, *, resident: str = "", unrolled: str = "") -> None:
        super().__init__(reason)
        self.resident, self.unrolled = resident, unrolled


@dataclass(frozen=True)
class Resting:
    """The arrays at rest, and how to make one of them whole."""

    arrays: Mapping[str, Any]
    places: Mapping[str, tuple[Placement, int]]  # by path: where it rests, and its layer
    gather: Gather

    def full(self, path: str) -> Any:
        """One parameter, whole."""
        return self.gather(self.places[path][0], self.piece(path))

    def piece(self, path: str) -> Any:
        """What rests of one parameter, without the stack that it rests in."""
        placement, layer = self.places[path]
        array = self.arrays[placement.name]
        return array[layer] if placement.stacked else array

    def stack(self, path: str) -> Any:
        """All layers of the stack that the parameter rests in."""
        return self.arrays[self.places[path][0].name]


@dataclass
class Call:
    """A call of one of a unit's methods; its arguments as a flat list."""

    unit: UnitSpec
    method: str
    treedef: Any
    leaves: list[Any]
    returned: Any = None

    def __post_init__(self) -> None:
        # NumPy's arrays may be changed before the call is carried out.
        self.leaves = [x.copy() if isinstance(x, np.ndarray) else x for x in self.leaves]
        self.dynamic = [k for k, leaf in enumerate(self.leaves) if isinstance(leaf, _DYNAMIC)]

    def arrays(self) -> list[Any]:
        """Those of the arguments that are arrays."""
        return [self.leaves[k] for k in self.dynamic]

    def run(self, values: Mapping[Any, Any], arrays: list[Any] | None = None) -> Any:
        """Compute with these values of the unit's arrays: arrays returned, other state after."""
        leaves = list(self.leaves)
        for k, array in zip(self.dynamic, arrays or self.arrays(), strict=True):
            leaves[k] = array
        args, kwargs = jax.tree.unflatten(self.treedef, leaves)
        module = self.unit.merge(values)
        result = getattr(module, self.method)(*args, **kwargs)
        self._refuse_changes(module, leaves, (args, kwargs))
        results, self.returned = jax.tree.flatten(result)
        return results, module

    def _refuse_changes(self, module: Any, leaves: list[Any], args: Any) -> None:
        """What is done to arguments and to the module, which are copies, would be lost."""
        name = self.unit.name
        after, treedef = jax.tree.flatten(args, is_leaf=keep_together)
        if treedef != self.treedef or any(a is not b for a, b in zip(leaves, after, strict=True)):
            raise NotAsPlanned(f"{name}.{self.method} changes its arguments", resident=name)
        if nnx.split(module)[0] != self.unit.graph:
            raise NotAsPlanned(
                f"{name}.{self.method} changes the module itself, not only its arrays",
                resident=name,
            )

    def computation(self, resting: Resting, names: Mapping[Any, str]) -> Callable[..., Any]:
        """The call as a function of pieces, other state and arrays: gathers, then computes."""

        def compute(pieces: Any, other: Any, arrays: list[Any]) -> tuple[list[Any], Any]:
            full = {
                path: resting.gather(resting.places[names[path]][0], piece)
                for path, piece in pieces.items()
            }
            results, module = self.run({**full, **other}, arrays)
            after = {path: at(module, path).get_raw_value() for path in other}
            return results, after

        return compute

    def result(self, results: list[Any]) -> Any:
        """What the method returned, with these arrays in it."""
        return jax.tree.unflatten(self.returned, results)


@dataclass
class Chain:
    """Calls of a stack's layers, one after the other, that wait for the last of them."""

    stack: list[str]
    calls: list[Call] = field(default_factory=list)
    outcome: list[Any] = field(default_factory=list)
    carried: dict[int, int] = field(default_factory=dict)

    def refuse(self, why: str) -> None:
        """Raise `NotAsPlanned`: this stack cannot be a scan."""
        raise NotAsPlanned(f"layers from {self.stack[0]} on: {why}", unrolled=self.stack[0])

    def begin(self, call: Call, outcome: list[Any]) -> None:
        """The first layer's call, which must return arrays like ``outcome``."""
        self.calls, self.outcome = [call], outcome
        if call.unit.name != self.stack[0]:
            self.refuse(f"the first to be called is {call.unit.name}")
        if any(isinstance(leaf, Promise) for leaf in call.leaves):
            self.refuse("another stack's layers were not called to the last")

    def extend(self, call: Call) -> None:
        """A further layer's call: promises of the one before it, and the first one's arguments."""
        first, number = self.calls[0], len(self.calls)
        if call.unit.name != self.stack[number] or call.method != first.method:
            self.refuse(f"after {self.stack[number - 1]} came {call.unit.name}.{call.method}")
        if call.treedef != first.treedef:
            self.refuse(f"{call.unit.name} was called with other arguments than the first layer")
        carried = {}
        position = {k: n for n, k in enumerate(first.dynamic)}
        for k, (before, leaf) in enumerate(zip(first.leaves, call.leaves, strict=True)):
            if isinstance(leaf, Promise):
                if leaf.chain is not self or leaf.layer != number - 1 or k not in position:
                    self.refuse(f"{call.unit.name} was given what no layer before it returned")
                carried[position[k]] = leaf.result
                self._refuse_change(before, self.outcome[leaf.result], call)
            elif not _same(before, leaf):
                self.refuse(f"{call.unit.name} was called with other values than the first layer")
        if len(set(carried.values())) < len(carried) or (number > 1 and carried != self.carried):
            self.refuse(f"{call.unit.name} takes results otherwise than the layers before it")
        self.carried = carried
        self.calls.append(call)

    def _refuse_change(self, before: Any, after: Any, call: Call) -> None:
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            self.refuse(
                f"{call.unit.name} takes {after.shape} {after.dtype} where the first layer took "
                f"{before.shape} {before.dtype}"
            )

    def promised(self) -> Any:
        """What stands for the results of the layer that was called last."""
        layer = len(self.calls) - 1
        promises = [
            Promise(self, layer, n, shape.shape, shape.dtype)
            for n, shape in enumerate(self.outcome)
        ]
        return jax.tree.unflatten(self.calls[0].returned, promises)


class _NoArray:
    """No array: any use as one raises."""

    __hash__ = object.__hash__

    def _used(self, *_: Any) -> Any:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__jax_array__":
            raise AttributeError(name)
        return self._used()


def _asked_for(self: Any) -> Any:
    # Raised where JAX looks whether there is such a method, as it does not say why a call failed.
    return self._used()


_BINARY = """add sub mul matmul truediv floordiv mod pow and or xor lshift rshift divmod"""
_OTHER = (
    """neg pos abs invert getitem setitem len iter eq ne lt le gt ge bool float int index array"""
)
for _name in (
    *(f"__{name}__" for name in (*_BINARY.split(), *_OTHER.split())),
    *(f"__r{name}__" for name in _BINARY.split()),
):
    setattr(_NoArray, _name, lambda self, *_: self._used())
_NoArray.__jax_array__ = property(_asked_for)  # type: ignore[attr-defined]


class Untouchable(_NoArray):
    """In place of a unit's array outside of the unit's calls."""

    def __init__(self, name: str, unit: str) -> None:
        self.__dict__.update(path=name, unit=unit)

    def _used(self, *_: Any) -> Any:
        unit = self.__dict__["unit"]
        raise NotAsPlanned(
            f"{self.__dict__['path']} is used outside of the methods of {unit}", resident=unit
        )


class Promise(_NoArray):
    """In place of what a layer will return once the scan over its stack has run."""

    def __init__(self, chain: Chain, layer: int, result: int, shape: Any, dtype: Any) -> None:
        self.__dict__.update(chain=chain, layer=layer, result=result, shape=shape, dtype=dtype)
        self.__dict__["ndim"] = len(shape)

    def _used(self, *_: Any) -> Any:
        layer = self.chain.stack[self.layer]
        self.chain.refuse(f"what {layer} returned went elsewhere than into the next layer")


_DYNAMIC = (jax.Array, Promise)


def keep_together(x: Any) -> bool:
    """Whether ``x`` is one argument of a call, though JAX could take it apart."""
    return isinstance(x, (_NoArray, nnx.Module, nnx.Variable))


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    plain = (bool, int, float, str, type(None))
    return isinstance(one, plain) and type(one) is type(other) and bool(one == other)
