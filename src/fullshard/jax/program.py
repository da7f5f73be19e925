# SPDX-License-Identifier: Apache-2.0
"""A train step as one pure function of state and batch, to be compiled as a whole; its options.

[Note: One mathematics]
The loss function sees the whole batch, as on one device: a masked mean, a contrastive loss, the
statistics of a BatchNorm are those of all examples, on every mesh. What is said to XLA is where
arrays rest, and in `gathered`, `embed` and `cross_entropy` what each device computes.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import jaxpr_as_fun

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import item_bytes
from fullshard.core.strategy import AS_IT_RESTS, Precision
from fullshard.core.text import bytes_text
from fullshard.jax.layers import Tracing, refuse_unknown_remat, tracing, used_outside
from fullshard.jax.mesh import MeshAxes
from fullshard.jax.placing import by_path, path_name
from fullshard.jax.rule import LARGE_BYTES, Placement, Rule
from fullshard.jax.state import ModelArrays, TrainState

_ROUNDING = 1e-3

KEY = "loss_fn(key)"
"""The name of the random key in the other state of a step with ``key=``."""

Arrays = dict[str, Any]


class StepOptions(TypedDict, total=False):
    """Keywords of `fullshard.jax.make_train_step`.

    - ``mode``: with "weights" (the default) `gathered`, `scan_layers`, `embed` and `cross_entropy`
      decide what travels, with "jit" these do nothing and XLA decides.
    - ``remat``: what backward finds of a layer that is gathered, unless its call says so; see
      `gathered`.
    - ``accumulate``: micro-batches in a step; the loss is the mean of theirs. Each takes equally
      many examples from every device, which matters to losses that compare examples.
    - ``precision``: dtype of full parameters, as "bfloat16" or ``jnp.bfloat16`` (where
      `gathered` is called gradients are summed in float32), or a
      `fullshard.core.strategy.Precision` for both.
    - ``donate``: reuse the memory of the state given; it must not be used again then.
    - ``has_aux``: the loss function returns (loss, tree of arrays).
    - ``wrt``: what is trained: an NNX filter, or for a pytree a predicate on paths.
    - ``rule``: which arrays are sharded (`fullshard.jax.Rule`).
    - ``at_most_unsharded``: the share of bytes that may be on every device; by default 2%, or a
      MiB, or with a rule what that asks for.
    - ``whole``: patterns of paths of the batch: arrays that are the same for all examples, as
      positions.
    - ``check``: before the first step, compare each gathered layer on a whole and on a cut batch,
      and refuse one that mixes examples.
    - ``key``: a random key; the loss function then takes a third argument, one that differs between
      steps.
    - ``shard_axis``, ``batch_axes``: the axes of a mesh whose names do not say what they are for;
      with ``batch_axes=("data",)`` examples are on every device of the shard axis.
    """

    mode: str
    remat: Any
    accumulate: int
    precision: Any
    donate: bool
    has_aux: bool
    wrt: Any
    rule: Rule | None
    at_most_unsharded: float | None
    whole: Sequence[str]
    check: bool
    key: Any
    shard_axis: str | None
    batch_axes: Sequence[str] | None


_DEFAULTS: StepOptions = {
    "mode": "weights", "remat": True, "accumulate": 1, "precision": None,
    "donate": True, "has_aux": False, "wrt": None, "rule": None, "at_most_unsharded": None,
    "whole": (), "check": False, "key": None, "shard_axis": None, "batch_axes": None,
}  # fmt: skip


def read_options(given: StepOptions) -> StepOptions:
    """Complete ``given``; raises `ConfigurationError` for an unknown keyword or value."""
    for name in given:
        if name not in _DEFAULTS:
            raise ConfigurationError(f"unknown option {name!r}; known: {', '.join(_DEFAULTS)}")
    options: StepOptions = {**_DEFAULTS, **given}
    accumulate, key, precision = options["accumulate"], options["key"], options["precision"]
    refuse_unknown_remat(options["remat"])
    if options["mode"] not in ("weights", "jit"):
        raise ConfigurationError(f"mode={options['mode']!r} is none of 'weights', 'jit'")
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ConfigurationError(
            f"accumulate={accumulate!r}: expected a whole number, at least 1 micro-batch"
        )
    if key is not None and not hasattr(key, "dtype"):
        raise ConfigurationError(f"key={key!r}: expected a random key, as jax.random.key(0)")
    if precision is None:
        options["precision"] = AS_IT_RESTS
    elif not isinstance(precision, Precision):
        dtype = precision if isinstance(precision, str) else np.dtype(precision).name
        item_bytes(dtype)  # refuses what is none
        options["precision"] = Precision(compute=dtype, reduce="float32")
    return options


def is_whole(options: StepOptions, path: Any, leaf: Any) -> bool:
    """Tell if an array of a batch, at ``path``, is the same for all examples."""
    return not np.ndim(leaf) or any(re.search(each, path_name(path)) for each in options["whole"])


@dataclass(frozen=True)
class StepProgram:
    """Everything that the step's function is made of, and what is found while it is traced.

    ``outside`` has the call to write for each array that XLA gathers where it likes.
    """

    axes: MeshAxes
    model: ModelArrays
    placements: Mapping[str, Placement]
    tx: Any
    loss_fn: Callable[..., Any]
    options: StepOptions
    notes: list[str] = field(default_factory=list)
    outside: dict[str, str] = field(default_factory=dict)

    def begin(self, values: Arrays) -> TrainState:
        """The state before the first step, of ``values``, or where there are none of new ones."""
        values = {**(self.model.initial() if self.model.made else {}), **values}
        params = self._at_rest({name: values[name] for name in self.placements})
        kept = self.tx.init(self.model.tree(self._trained(params)))
        other = {name: values[name] for name in self.model.other}
        return TrainState(self.model.tree(params), kept, other, jnp.zeros((), jnp.int32))

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Any, Any]:
        """State after the step, loss, and what else the loss function returned."""
        params, tree, update = by_path(state.params), self.model.tree, self.tx.update
        trained = self._trained(params)

        def gradients(trained: Arrays) -> tuple[Arrays, Any, Any, Arrays]:
            return self._gradients(trained, {**params, **trained}, state, batch)

        grads, loss, aux, other = gradients(trained)
        # Functions are for optimizers that search.
        more = {"value": loss, "grad": tree(grads)}
        more["value_fn"] = lambda at: gradients(by_path(at))[1]
        asked = inspect.signature(update).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in asked.values()):
            more["grad_fn"] = lambda at, _=0: tree(gradients(by_path(at))[0])
            more = {name: x for name, x in more.items() if name in asked}
        updates, kept = update(tree(grads), state.optimizer, tree(trained), **more)
        moved = by_path(optax.apply_updates(tree(trained), updates))
        return TrainState(tree({**params, **moved}), kept, other, state.step + 1), loss, aux

    def apply(self, function: Callable[..., Any], state: TrainState, *args: Any) -> Any:
        """``function(model, *args)`` with the model of ``state``; nothing is trained."""
        arrays = {**self._computed(by_path(state.params)), **state.other}
        with tracing(self._now([])):
            return function(self.model.rebuild(arrays), *args)

    def refuse_mixing(self, state: TrainState, batch: Any) -> None:
        """Raise for a gathered layer whose results on a cut batch are others; the loss is run."""
        far: dict[str, float] = {}

        def forward(params: Any, other: Arrays, batch: Any) -> Any:
            with tracing(self._now([], far)):
                return self._result(self._computed(by_path(params)), other, (0, 0), batch)[0]

        jax.block_until_ready(jax.jit(forward)(state.params, state.other, batch))
        jax.effects_barrier()
        for name, share in far.items():
            if not share <= _ROUNDING:
                raise ConfigurationError(
                    f"{name} mixes examples: on a part of the batch its results differ by "
                    f"{share:.1%} from those on all of it. Leave gathered away for it, or take the "
                    "part that mixes (statistics over the batch, one random key for all) out of it"
                )

    def _now(self, notes: list[str], mixing: dict[str, float] | None = None) -> Tracing | None:
        if self.options["mode"] == "jit":
            return None
        reduce = self.options["precision"].reduce
        dtype, remat = jnp.dtype(reduce) if reduce else None, self.options["remat"]
        return Tracing(self.axes, self.placements, dtype, remat, notes, mixing)

    def _trained(self, params: Arrays) -> Arrays:
        return {n: x for n, x in params.items() if self.placements[n].spec.trainable}

    def _at_rest(self, params: Arrays) -> Arrays:
        """Parameters or their gradients, cut as they rest."""
        rests = {name: self.axes.sharding(*self.placements[name].axes) for name in params}
        return {n: lax.with_sharding_constraint(x, rests[n]) for n, x in params.items()}

    def _computed(self, params: Arrays) -> Arrays:
        """Parameters in the dtype of computation."""
        full = self.options["precision"].full_dtype
        return {n: x.astype(full(self.placements[n].spec.dtype)) for n, x in params.items()}

    def _gradients(
        self, trained: Arrays, params: Arrays, state: TrainState, batch: Any
    ) -> tuple[Arrays, Any, Any, Arrays]:
        count = self.options["accumulate"]

        def one(other: Arrays, batch: Any, number: Any) -> tuple[Arrays, Any, Any, Arrays]:
            def loss_of(trained: Arrays) -> tuple[Any, tuple[Any, Arrays]]:
                at = (state.step, number)
                loss, aux, after = self._loss({**params, **trained}, other, at, batch)
                return loss / count, (aux, after)

            (loss, (aux, after)), grads = jax.value_and_grad(loss_of, has_aux=True)(trained)
            return self._at_rest(grads), loss, aux, after

        def micro(carry: Any, turn: Any) -> tuple[Any, Any]:
            grads, loss, aux, other = one(carry[1], *turn)
            sums = jax.tree.map(lambda a, b: a + b.astype(a.dtype), carry[0], grads)
            return (sums, other), (loss, aux)

        if count == 1:
            return one(state.other, batch, 0)
        parts = jax.tree_util.tree_map_with_path(self._parts, batch)
        wide = {n: jnp.promote_types(x.dtype, jnp.float32) for n, x in trained.items()}
        zeros = {n: jnp.zeros(x.shape, wide[n]) for n, x in trained.items()}
        turns = parts, jnp.arange(count)
        (sums, other), (losses, aux) = lax.scan(micro, (zeros, state.other), turns)
        rows = max((x.shape[1] for x in jax.tree.leaves(parts) if x.ndim > 1), default=0)
        aux = jax.tree.map(lambda x: self._joined(x, rows), aux)
        return self._at_rest(sums), sum(losses), aux, other

    def _loss(self, params: Arrays, other: Arrays, at: Any, batch: Any) -> tuple[Any, Any, Arrays]:
        """Loss, what is returned beside it, and the other state after it; traced once."""

        def flat(params: list[Any], *args: Any) -> Any:
            with tracing(self._now(self.notes)):
                return self._result(dict(zip(names, params, strict=True)), *args)

        computed = self._computed(params)
        names = list(computed)
        operands = (list(computed.values()), other, at, batch)
        traced, shapes = jax.make_jaxpr(flat, return_shape=True)(*operands)
        if self.options["mode"] == "weights":
            self.outside.update(used_outside(traced.jaxpr, names))
        closed_over = sum(x.nbytes for x in traced.consts if isinstance(x, jax.Array | np.ndarray))
        if closed_over >= LARGE_BYTES:
            self.notes.append(
                f"{bytes_text(closed_over)} of arrays that the loss closes over are on every "
                "device from beginning to end: make them a part of the model, which wrt leaves out"
            )
        results = jaxpr_as_fun(traced)(*jax.tree.leaves(operands))
        loss, aux, after = jax.tree.unflatten(jax.tree.structure(shapes), results)
        return loss.astype(jnp.promote_types(loss.dtype, jnp.float32)), aux, after

    def _result(self, params: Arrays, other: Arrays, at: Any, batch: Any) -> Any:
        model, keys = self.model.rebuild({**params, **other}), []
        if KEY in other:
            keys = [jax.random.fold_in(jax.random.fold_in(other[KEY], at[0]), at[1])]
        result, has_aux = self.loss_fn(model, batch, *keys), self.options["has_aux"]
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
        after = {**other, **self.model.values(model)}
        return loss, aux, {name: after[name] for name in other}

    def _parts(self, path: Any, x: Any) -> Any:
        """Micro-batches in front, each made of a part of every device's examples."""
        count, axes = self.options["accumulate"], self.axes
        if is_whole(self.options, path, x):
            return jnp.broadcast_to(x, (count, *x.shape))
        parts = x.reshape(axes.parts, count, -1, *x.shape[1:]).swapaxes(0, 1)
        parts = parts.reshape(count, -1, *x.shape[1:])
        return lax.with_sharding_constraint(parts, axes.sharding(None, axes.batch))

    def _joined(self, x: Any, rows: int) -> Any:
        """Join what micro-batches returned: examples in the batch's order, means of all else."""
        if x.ndim == 1 or x.shape[1] != rows:
            return x.mean(0) if jnp.issubdtype(x.dtype, jnp.inexact) else x[-1]
        x = x.reshape(x.shape[0], self.axes.parts, -1, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(-1, *x.shape[3:])
