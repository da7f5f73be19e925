# SPDX-License-Identifier: Apache-2.0
"""A train step as one pure function of state and batch, to be compiled as a whole.

[Note: One mathematics]
The loss function sees the whole batch, as on one device: a masked mean, a contrastive loss, the
statistics of a BatchNorm are those of all examples, on every mesh. What is said to XLA is where
arrays rest, and in `gathered`, `embed` and `cross_entropy` what each device computes.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import jaxpr_as_fun

from fullshard.core.errors import ConfigurationError
from fullshard.core.text import bytes_text
from fullshard.jax.compute.context import Tracing, tracing
from fullshard.jax.compute.outside import used_outside
from fullshard.jax.training.model import ModelArrays
from fullshard.jax.training.options import StepOptions, is_whole
from fullshard.jax.training.state import StateArrays, TrainState, by_path

__all__ = ["KEY", "StepProgram"]

_SAID_BYTES = 1 << 20
_ROUNDING = 1e-3

KEY = "loss_fn(key)"
"""The name of the random key in the other state of a step with ``key=``."""

Arrays = dict[str, Any]


@dataclass(frozen=True)
class StepProgram:
    """Everything that the step's function is made of, and what is found while it is traced.

    ``outside`` has the call to write for each array that XLA gathers where it likes.
    """

    model: ModelArrays
    arrays: StateArrays
    loss_fn: Callable[..., Any]
    options: StepOptions
    notes: list[str] = field(default_factory=list)
    outside: dict[str, str] = field(default_factory=dict)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Any, Any]:
        """State after the step, loss, and what else the loss function returned."""
        params = by_path(state.params)
        trained = {n: x for n, x in params.items() if self.arrays.params[n].spec.trainable}
        frozen = {n: x for n, x in params.items() if n not in trained}
        grads, loss, aux, other = self._gradients(trained, frozen, state.other, state.step, batch)
        tree = self.model.tree

        def again(tree: Any) -> Any:
            """The loss elsewhere, for optimizers that search."""
            return self._gradients(by_path(tree), frozen, state.other, state.step, batch)

        update = self.arrays.tx.update
        more = {"value": loss, "grad": tree(grads), "value_fn": lambda tree: again(tree)[1]}
        asked = inspect.signature(update).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in asked.values()):
            more["grad_fn"] = lambda at, _=0: tree(again(at)[0])
            more = {name: x for name, x in more.items() if name in asked}
        updates, kept = update(tree(grads), state.optimizer, tree(trained), **more)
        moved = by_path(optax.apply_updates(tree(trained), updates))
        return TrainState(tree({**params, **moved}), kept, other, state.step + 1), loss, aux

    def apply(self, function: Callable[..., Any], state: TrainState, *args: Any) -> Any:
        """``function(model, *args)`` with the model of ``state``; nothing is trained."""
        params = self._computed(by_path(state.params))
        other = {name: x for name, x in state.other.items() if name != KEY}
        with tracing(self._tracing([])):
            return function(self.model.rebuild({**params, **other}), *args)

    def refuse_mixing(self, state: TrainState, batch: Any) -> None:
        """Raise for a gathered layer whose results on a cut batch are others; the loss is run."""
        far: dict[str, float] = {}
        params, other = by_path(state.params), state.other

        def forward(params: Arrays, other: Arrays, batch: Any) -> Any:
            now = self._tracing([])
            now.mixing = far
            with tracing(now):
                return self._result(self._computed(params), other, (0, 0), batch)[0]

        jax.block_until_ready(jax.jit(forward)(params, other, batch))
        jax.effects_barrier()
        for name, share in far.items():
            if not share <= _ROUNDING:
                raise ConfigurationError(
                    f"{name} mixes examples: on a part of the batch its results differ by "
                    f"{share:.1%} from those on all of it. Leave gathered away for it, or take the "
                    "part that mixes (statistics over the batch, one random key for all) out of it"
                )

    def _tracing(self, notes: list[str]) -> Tracing:
        options = self.options
        once = options["gather"] == "once" and options["accumulate"] > 1
        return Tracing(
            self.arrays.axes,
            self.arrays.params,
            jnp.dtype(options["precision"].reduce) if options["precision"].reduce else None,
            options["remat"],
            once or options["mode"] != "weights",
            notes,
        )

    def _gradients(
        self, trained: Arrays, frozen: Arrays, other: Arrays, step: Any, batch: Any
    ) -> tuple[Arrays, Any, Any, Arrays]:
        count = self.options["accumulate"]
        once = self.options["gather"] == "once" and count > 1
        if once:
            trained, frozen = self._whole(trained), self._whole(frozen)

        def one(other: Arrays, batch: Any, number: Any) -> tuple[Arrays, Any, Any, Arrays]:
            def loss_of(trained: Arrays) -> tuple[Any, tuple[Any, Arrays]]:
                loss, aux, after = self._loss({**trained, **frozen}, other, (step, number), batch)
                return loss / count, (aux, after)

            (loss, (aux, after)), grads = jax.value_and_grad(loss_of, has_aux=True)(trained)
            return grads if once else self.arrays.at_rest(grads), loss, aux, after

        if count == 1:
            return one(other, batch, 0)
        turns = jax.tree_util.tree_map_with_path(self._parts, batch), jnp.arange(count)
        first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), turns)
        traced, shapes = jax.make_jaxpr(one, return_shape=True)(other, *first)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, _sum_dtype(x.dtype)), shapes[:2])

        def micro(carry: Any, xs: Any) -> tuple[Any, Any]:
            sums, other = carry
            results = jaxpr_as_fun(traced)(*jax.tree.leaves((other, *xs)))
            grads, loss, aux, after = jax.tree.unflatten(jax.tree.structure(shapes), results)
            sums = jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, (grads, loss))
            return (sums, after), aux

        (sums, after), aux = lax.scan(micro, (zeros, other), turns)
        rows = max((x.shape[0] for x in jax.tree.leaves(first[0]) if x.ndim), default=0)
        aux = jax.tree.map(lambda x: self._joined(x, rows), aux)
        return self.arrays.at_rest(sums[0]), sums[1], aux, after

    def _loss(self, params: Arrays, other: Arrays, at: Any, batch: Any) -> tuple[Any, Any, Arrays]:
        """Loss, what is returned beside it, and the other state after it; traced once."""

        def flat(params: list[Any], *args: Any) -> Any:
            with tracing(self._tracing(self.notes)):
                return self._result(dict(zip(names, params, strict=True)), *args)

        computed = self._computed(params)
        names = list(computed)
        operands = (list(computed.values()), other, at, batch)
        traced, shapes = jax.make_jaxpr(flat, return_shape=True)(*operands)
        self._look(traced, names)
        results = jaxpr_as_fun(traced)(*jax.tree.leaves(operands))
        loss, aux, after = jax.tree.unflatten(jax.tree.structure(shapes), results)
        return loss.astype(jnp.promote_types(loss.dtype, jnp.float32)), aux, after

    def _result(self, params: Arrays, other: Arrays, at: Any, batch: Any) -> Any:
        kept = {name: x for name, x in other.items() if name != KEY}
        model = self.model.rebuild({**params, **kept})
        keys = []
        if KEY in other:
            keys = [jax.random.fold_in(jax.random.fold_in(other[KEY], at[0]), at[1])]
        loss, aux = _checked(self.loss_fn(model, batch, *keys), self.options["has_aux"])
        return loss, aux, {**other, **self.model.read_state(model, kept)}

    def _look(self, traced: Any, names: list[str]) -> None:
        """Remember which weights XLA gathers as it likes, and what the loss closes over."""
        if self.options["mode"] == "weights":
            self.outside.update(used_outside(traced.jaxpr, names))
        closed_over = sum(x.nbytes for x in traced.consts if isinstance(x, jax.Array | np.ndarray))
        if closed_over >= _SAID_BYTES:
            self.notes.append(
                f"{bytes_text(closed_over)} of arrays that the loss closes over are on every "
                "device from beginning to end: make them a part of the model, which wrt leaves out"
            )

    def _computed(self, arrays: Arrays) -> Arrays:
        """In the dtype of computation."""
        full = self.options["precision"].full_dtype
        return {n: x.astype(full(self.arrays.params[n].spec.dtype)) for n, x in arrays.items()}

    def _whole(self, arrays: Arrays) -> Arrays:
        """On every device of the shard axis, for all micro-batches."""
        axes, params = self.arrays.axes, self.arrays.params
        constrained = lax.with_sharding_constraint
        return {n: constrained(x, axes.gathered(params[n].axes)) for n, x in arrays.items()}

    def _parts(self, path: Any, x: Any) -> Any:
        """Micro-batches in front, each made of a part of every device's examples."""
        count, axes = self.options["accumulate"], self.arrays.axes
        if is_whole(self.options, path, x):
            return jnp.broadcast_to(x, (count, *x.shape))
        parts = x.reshape(axes.parts, count, -1, *x.shape[1:]).swapaxes(0, 1)
        parts = parts.reshape(count, -1, *x.shape[1:])
        if self.options["mode"] == "activations":
            return parts
        return lax.with_sharding_constraint(parts, axes.sharding(None, axes.batch))

    def _joined(self, x: Any, rows: int) -> Any:
        """Join what micro-batches returned: examples in the batch's order, means of all else."""
        if x.ndim == 1 or x.shape[1] != rows:
            return x.mean(0) if jnp.issubdtype(x.dtype, jnp.inexact) else x[-1]
        x = x.reshape(x.shape[0], self.arrays.axes.parts, -1, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(-1, *x.shape[3:])


def _checked(result: Any, has_aux: bool) -> tuple[Any, Any]:
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise ConfigurationError(
            "with has_aux=True the loss function must return (loss, tree of arrays), got "
            f"{type(result).__name__}"
        )
    loss, aux = result if has_aux else (result, {})
    array = isinstance(loss, jax.Array)
    if not array or loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        got = f"shape {loss.shape} of {loss.dtype}" if array else type(loss).__name__
        raise ConfigurationError(
            "the loss function must return one number, a float, the mean over its batch, got "
            f"{got}; with something beside it give has_aux=True"
        )
    return loss, aux


def _sum_dtype(dtype: Any) -> Any:
    low = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if low else dtype
