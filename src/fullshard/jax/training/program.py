# SPDX-License-Identifier: Apache-2.0
"""A train step as one pure function of state and batch, to be compiled as a whole.

[Note: One mathematics]
The loss function sees the whole batch, as on one device: a masked mean, a contrastive loss, the
statistics of a BatchNorm are those of all examples, in every mode and on every mesh. Modes differ
in what they constrain, and in nothing that has a value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import jaxpr_as_fun

from fullshard.core.errors import ConfigurationError
from fullshard.core.text import bytes_text
from fullshard.jax.arrays.mesh import Layout
from fullshard.jax.arrays.rule import Placement
from fullshard.jax.compute.at_use import run
from fullshard.jax.compute.context import Findings, Program, tracing
from fullshard.jax.compute.pieces import Weight
from fullshard.jax.model.reading import Model
from fullshard.jax.training.options import Options
from fullshard.jax.training.state import StateArrays, TrainState, by_path

__all__ = ["KEY", "StepProgram"]

_SAID_BYTES = 1 << 20

KEY = "loss_fn(key)"
"""The name of the random key in the other state of a step with ``key=``."""

Arrays = dict[str, Any]


@dataclass(frozen=True)
class StepProgram:
    """Everything that the step's function is made of."""

    model: Model
    arrays: StateArrays
    loss_fn: Callable[..., Any]
    options: Options
    findings: Findings

    @property
    def layout(self) -> Layout:
        """The mesh, and what its axes are for."""
        return self.arrays.layout

    @property
    def _mode(self) -> str:
        """The kind that travels; before it was decided, weights."""
        return "weights" if self.options.mode == "auto" else self.options.mode

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Any, Any]:
        """State after the step, loss, and what else the loss function returned."""
        state = self.arrays.true(state)
        params = by_path(state.params)
        trained = {n: x for n, x in params.items() if self._placement(n).spec.trainable}
        frozen = {n: x for n, x in params.items() if n not in trained}
        grads, loss, aux, other = self._gradients(trained, frozen, state.other, state.step, batch)
        tree = self.model.tree
        tx = self.arrays.tx
        updates, kept = tx.update(tree(grads), state.optimizer, tree(trained), value=loss)
        moved = by_path(optax.apply_updates(tree(trained), updates))
        after = TrainState(tree({**params, **moved}), kept, other, state.step + 1)
        return self.arrays.at_rest(after), loss, aux

    def apply(self, function: Callable[..., Any], state: TrainState, *args: Any) -> Any:
        """``function(model, *args)`` with the model of ``state``; nothing is trained."""
        state = self.arrays.true(state)
        params = self._computed(by_path(state.params))
        names = list(params)
        other = {name: x for name, x in state.other.items() if name != KEY}

        def flat(params: Any, other: Arrays, args: Any) -> Any:
            model = self.model.rebuild({**dict(zip(names, params, strict=True)), **other})
            return function(model, *args)

        return self._carried_out(flat, params, (other, args), self._rows(args), Findings())

    def _gradients(
        self, trained: Arrays, frozen: Arrays, other: Arrays, step: Any, batch: Any
    ) -> tuple[Arrays, Any, Any, Arrays]:
        count = self.options.accumulate
        once = self.options.gather == "once" and count > 1
        if once:
            trained, frozen = self._whole(trained), self._whole(frozen)
        batch = self._placed(batch)

        def one(other: Arrays, batch: Any, number: Any) -> tuple[Arrays, Any, Any, Arrays]:
            def loss_of(trained: Arrays) -> tuple[Any, tuple[Any, Arrays]]:
                loss, aux, after = self._loss(trained, frozen, other, (step, number), batch, once)
                return loss / count, (aux, after)

            (loss, (aux, after)), grads = jax.value_and_grad(loss_of, has_aux=True)(trained)
            if not once:
                grads = {name: self._at_rest(name, grad) for name, grad in grads.items()}
            return grads, loss, aux, after

        if count == 1:
            return one(other, batch, 0)
        parts = jax.tree.map(lambda x: self._parts(x, count), batch)
        turns = parts, jnp.arange(count)
        first = jax.tree.map(lambda x: _shape(x[0]), turns)
        traced, shapes = jax.make_jaxpr(one, return_shape=True)(other, *first)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, _sum_dtype(x.dtype)), shapes[:2])

        def micro(carry: Any, xs: Any) -> tuple[Any, Any]:
            sums, other = carry
            found = jaxpr_as_fun(traced)(*jax.tree.leaves((other, *xs)))
            grads, loss, aux, after = jax.tree.unflatten(jax.tree.structure(shapes), found)
            sums = jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, (grads, loss))
            return (sums, after), aux

        (sums, after), aux = lax.scan(micro, (zeros, other), turns)
        grads = {name: self._at_rest(name, grad) for name, grad in sums[0].items()}
        rows = self._rows(parts, 1)
        return grads, sums[1], jax.tree.map(lambda x: self._joined(x, rows), aux), after

    def _loss(
        self, trained: Arrays, frozen: Arrays, other: Arrays, at: Any, batch: Any, whole: bool
    ) -> tuple[Any, Any, Arrays]:
        """Loss, what is returned beside it, and the other state after it."""
        options = self.options
        key = None
        if options.key is not None:
            key = jax.random.fold_in(jax.random.fold_in(other[KEY], at[0]), at[1])
        kept = {name: x for name, x in other.items() if name != KEY}
        trained = self._computed(trained)
        frozen = self._computed(frozen)
        names = [*trained, *frozen]

        def flat(params: Any, other: Arrays, batch: Any, key: Any) -> Any:
            model = self.model.rebuild({**dict(zip(names, params, strict=True)), **other})
            result = self.loss_fn(model, batch, *(() if key is None else (key,)))
            after = self.model.read_state(model, other)
            return (*_checked(result, options.has_aux), after)

        rows = self._rows(batch)
        loss, aux, after = self._carried_out(
            flat, {**trained, **frozen}, (kept, batch, key), rows, self.findings, whole
        )
        if options.key is not None:
            after = {**after, KEY: other[KEY]}
        loss = loss.astype(jnp.promote_types(loss.dtype, jnp.float32))
        return loss, aux, after

    def _carried_out(
        self,
        function: Callable[..., Any],
        params: Arrays,
        args: tuple[Any, ...],
        rows: int,
        findings: Findings,
        whole: bool = False,
    ) -> Any:
        """The results of ``function(params, *args)`` in the step's mode."""
        options = self.options
        mode = "jit" if whole else self._mode
        program = Program(
            self.layout,
            mode,
            rows,
            options.vocabulary,
            options.remat,
            options.scan,
            options.precision,
            findings,
        )
        shapes = jax.tree.map(_shape, (list(params.values()), *args))
        with tracing(program):
            traced, shape = jax.make_jaxpr(function, return_shape=True)(*shapes)
        closed_over = sum(x.nbytes for x in traced.consts if isinstance(x, jax.Array | np.ndarray))
        if closed_over >= _SAID_BYTES:
            findings.note(
                f"{bytes_text(closed_over)} of arrays that the function closes over are on every "
                "device from beginning to end: make them a part of the model, which wrt leaves out"
            )
        leaves = jax.tree.leaves(args)
        treedef = jax.tree.structure(shape)

        weights = [Weight(x, self._placement(name).axes, name) for name, x in params.items()]
        results = run(traced.jaxpr, traced.consts, [*weights, *leaves], program)
        return jax.tree.unflatten(treedef, results)

    def _computed(self, arrays: Arrays) -> Arrays:
        """In the dtype of computation."""
        precision = self.options.precision
        return {
            name: x.astype(precision.full_dtype(self._placement(name).spec.dtype))
            for name, x in arrays.items()
        }

    def _whole(self, arrays: Arrays) -> Arrays:
        """On every device of the shard axis, for all micro-batches."""
        layout = self.layout

        def gathered(name: str, x: Any) -> Any:
            axes = tuple(None if a == layout.shard else a for a in self._placement(name).axes)
            return lax.with_sharding_constraint(x, layout.sharding(*axes))

        return {name: gathered(name, x) for name, x in arrays.items()}

    def _at_rest(self, name: str, x: Any) -> Any:
        return lax.with_sharding_constraint(x, self.layout.sharding(*self._placement(name).axes))

    def _placement(self, name: str) -> Placement:
        return self.arrays.params[name]

    def _placed(self, batch: Any) -> Any:
        """The batch where the mode wants it: cut, or the same along the shard axis."""
        layout = self.layout
        if self._mode != "activations":
            return batch
        axes = tuple(axis for axis in layout.batch if axis != layout.shard) or None
        return jax.tree.map(
            lambda x: lax.with_sharding_constraint(
                x, layout.sharding(*((axes,) if x.ndim else ()))
            ),
            batch,
        )

    def _rows(self, batch: Any, dim: int = 0) -> int:
        return next((x.shape[dim] for x in jax.tree.leaves(batch) if jnp.ndim(x) > dim), 0)

    def _parts(self, x: Any, count: int) -> Any:
        """Micro-batches in front, each made of a part of every device's examples."""
        if x.ndim == 0:
            return jnp.broadcast_to(x, (count,))
        parts = x.reshape(self.layout.parts, count, -1, *x.shape[1:]).swapaxes(0, 1)
        parts = parts.reshape(count, -1, *x.shape[1:])
        if self._mode == "activations":
            return parts
        return lax.with_sharding_constraint(parts, self.layout.sharding(None, self.layout.batch))

    def _joined(self, x: Any, rows: int) -> Any:
        """Join what micro-batches returned: examples in the batch's order, means of all else."""
        if x.ndim == 1 or x.shape[1] != rows:
            return x.mean(0) if jnp.issubdtype(x.dtype, jnp.inexact) else x[-1]
        x = x.reshape(x.shape[0], self.layout.parts, -1, *x.shape[2:]).swapaxes(0, 1)
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


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(
        jnp.shape(x), jnp.result_type(x) if not hasattr(x, "dtype") else x.dtype
    )


def _sum_dtype(dtype: Any) -> Any:
    low = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if low else dtype
