# SPDX-License-Identifier: Apache-2.0
"""A train step as one pure function of state and batch, to be compiled as a whole.

[Note: Where the optimizer runs]
Gradients are made inside `jax.shard_map`, where each device sees its slices and its part of the
batch. The optimizer runs beside it, in the same program, on the global arrays: sums over an array
are then sums over all devices without anybody's doing, and XLA fuses the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fullshard.core.errors import ConfigurationError
from fullshard.jax.calls import Resting
from fullshard.jax.execution import Execution, Regime
from fullshard.jax.gathers import (
    Gather,
    constrained_gather,
    explicit_gather,
    explicit_reduce,
    for_all,
    pack,
    resting_sharding,
    resting_spec,
)
from fullshard.jax.lanes import members_of
from fullshard.jax.mesh import BATCH_AXES
from fullshard.jax.model import Model, is_key
from fullshard.jax.optimizer import ShardedOptimizer
from fullshard.jax.options import Options
from fullshard.jax.placement import Placement
from fullshard.jax.state import TrainState

__all__ = ["KEY", "StepProgram", "batch_sharding", "batch_spec"]

KEY = "loss_fn(key)"
"""The name of the random key in the other state of a step with ``key=``."""

Arrays = dict[str, Any]


def batch_spec(leaf: Any) -> PartitionSpec:
    """How an array of a batch is cut: dimension 0 over data and fsdp; scalars are replicated."""
    return PartitionSpec(BATCH_AXES) if leaf.ndim else PartitionSpec()


def batch_sharding(mesh: Mesh, leaf: Any) -> NamedSharding:
    """How an array of a batch lies on the devices of ``mesh``."""
    return NamedSharding(mesh, batch_spec(leaf))


@dataclass(frozen=True)
class StepProgram:
    """Everything that the step's function is made of."""

    mesh: Mesh
    model: Model
    placements: Mapping[str, Placement]
    optimizer: ShardedOptimizer
    loss_fn: Callable[..., Any]
    options: Options
    regime: Regime

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Any, Any]:
        """State after the step, loss, and what else the loss function returned, averaged."""
        explicit = self.options.mode == "shard_map"
        gradients = self._on_each_device if explicit else self._by_compiler
        trained = {n: x for n, x in state.params.items() if self.placements[n].trainable}
        frozen = {n: x for n, x in state.params.items() if n not in trained}
        grads, loss, aux, other = gradients(trained, frozen, state.other, state.step, batch)
        params, optimizer = self.optimizer.update(grads, state.optimizer, trained, loss)
        params = {name: (params | frozen)[name] for name in state.params}
        return TrainState(params, optimizer, other, state.step + 1), loss, aux

    def _on_each_device(
        self, trained: Arrays, frozen: Arrays, other: Arrays, step: Any, batch: Any
    ) -> tuple[Arrays, Any, Any, Arrays]:
        def device(
            trained: Arrays, frozen: Arrays, other: Arrays, step: Any, batch: Any
        ) -> tuple[Arrays, Any, Any, Arrays]:
            apart = _fold_keys(other, lax.axis_index(BATCH_AXES), step)
            share = 1 / lax.axis_size(BATCH_AXES)
            gather = explicit_gather(self.mesh, self.options.precision)
            run = _Run(self, gather, share, step)
            once = self.options.gather == "once" and self.options.accumulate > 1
            function = run.gathered_once if once else run.accumulated
            grads, loss, aux, after = function(trained, frozen, apart, batch)
            aux = jax.tree.map(lambda x: lax.pmean(x, BATCH_AXES), aux)
            return grads, lax.psum(loss, BATCH_AXES), aux, _agreed(other, after)

        specs = {name: resting_spec(placement) for name, placement in self.placements.items()}
        of_trained = {name: specs[name] for name in trained}
        whole = PartitionSpec()
        in_batch = jax.tree.map(batch_spec, batch)
        mapped = jax.shard_map(
            device,
            mesh=self.mesh,
            in_specs=(of_trained, {name: specs[name] for name in frozen}, whole, whole, in_batch),
            out_specs=(of_trained, whole, whole, whole),
            check_vma=False,
        )
        return mapped(trained, frozen, other, step, batch)

    def _by_compiler(
        self, trained: Arrays, frozen: Arrays, other: Arrays, step: Any, batch: Any
    ) -> tuple[Arrays, Any, Any, Arrays]:
        run = _Run(self, constrained_gather(self.mesh, self.options.precision), 1.0, step)
        once = self.options.gather == "once" and self.options.accumulate > 1
        function = run.gathered_once if once else run.accumulated
        grads, loss, aux, after = function(trained, frozen, other, batch)
        grads = {
            name: lax.with_sharding_constraint(
                grad, resting_sharding(self.mesh, self.placements[name])
            )
            for name, grad in grads.items()
        }
        return grads, loss, aux, after


@dataclass(frozen=True)
class _Run:
    """Gradients of the loss over one device's part of the batch, or with XLA's help over all."""

    program: StepProgram
    gather: Gather
    share: float
    step: Any

    def accumulated(
        self, trained: Arrays, frozen: Arrays, other: Arrays, batch: Any
    ) -> tuple[Arrays, Any, Any, Arrays]:
        """The mean over micro-batches, each gathering for itself."""
        return self._micro_batches(trained, frozen, other, batch, self.gather)

    def gathered_once(
        self, trained: Arrays, frozen: Arrays, other: Arrays, batch: Any
    ) -> tuple[Arrays, Any, Any, Arrays]:
        """The same; everything is gathered before, and gradients are reduced after all of them."""
        placements, precision = self.program.placements, self.program.options.precision
        whole = for_all(self.gather, placements, trained)
        frozen = for_all(self.gather, placements, frozen)
        grads, *rest = self._micro_batches(
            whole, frozen, other, batch, lambda placement, member: member
        )
        reduce = explicit_reduce(self.program.mesh, precision)
        if self.program.options.mode == "compiler":
            reduce = _cast
        grads = for_all(lambda p, grad: reduce(p, pack(p, grad)), placements, grads)
        return grads, *rest

    def _micro_batches(
        self, trained: Arrays, frozen: Arrays, other: Arrays, batch: Any, gather: Gather
    ) -> tuple[Arrays, Any, Any, Arrays]:
        count = self.program.options.accumulate

        def one(other: Arrays, batch: Any, number: Any) -> tuple[Arrays, Any, Any, Arrays]:
            def loss_of(trained: Arrays) -> tuple[Any, tuple[Any, Arrays]]:
                loss, aux, after = self._loss({**trained, **frozen}, other, batch, number, gather)
                return loss * (self.share / count), (aux, after)

            (loss, (aux, after)), grads = jax.value_and_grad(loss_of, has_aux=True)(trained)
            return grads, loss, jax.tree.map(lambda x: x / count, aux), after

        if count == 1:
            return one(other, batch, 0)
        parts = jax.tree.map(lambda x: self._parts(x, count), batch)
        shapes = jax.eval_shape(one, other, jax.tree.map(lambda x: x[0], parts), 0)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, _sum_dtype(x.dtype)), shapes[:3])

        def step(carry: Any, xs: Any) -> tuple[Any, None]:
            sums, other = carry
            *found, after = one(other, xs[0], xs[1])
            return (
                jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, tuple(found)),
                after,
            ), None

        (sums, after), _ = lax.scan(step, (zeros, other), (parts, jnp.arange(count)))
        return *sums, after

    def _parts(self, x: Any, count: int) -> Any:
        """Micro-batches in front; without shard_map each is made of a part of every device's."""
        if x.ndim == 0:
            return jnp.broadcast_to(x, (count,))
        if self.program.options.mode == "shard_map":
            return x.reshape(count, -1, *x.shape[1:])
        mesh = self.program.mesh
        devices = mesh.shape["data"] * mesh.shape["fsdp"]
        parts = x.reshape(devices, count, -1, *x.shape[1:]).swapaxes(0, 1)
        parts = parts.reshape(count, -1, *x.shape[1:])
        cut = NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))
        return lax.with_sharding_constraint(parts, cut)

    def _loss(
        self, params: Arrays, other: Arrays, batch: Any, number: Any, gather: Gather
    ) -> tuple[Any, Any, Arrays]:
        program, options = self.program, self.program.options
        args: Sequence[Any] = (batch,)
        if options.key is not None:
            key = jax.random.fold_in(jax.random.fold_in(other[KEY], self.step), number)
            other = {name: value for name, value in other.items() if name != KEY}
            args = (batch, key)
        resting = Resting(params, members_of(program.placements), gather)
        execution = Execution(program.model, resting, other, program.regime, options.remat)
        result, after = execution.run(program.loss_fn, args)
        if options.has_aux and not (isinstance(result, tuple) and len(result) == 2):
            raise ConfigurationError(
                "with has_aux=True the loss function must return (loss, tree of arrays), got "
                f"{type(result).__name__}"
            )
        loss, aux = result if options.has_aux else (result, {})
        _check_loss(loss)
        if options.key is not None:
            after = {**after, KEY: key}
        return loss.astype(jnp.promote_types(loss.dtype, jnp.float32)), aux, after


def _check_loss(loss: Any) -> None:
    if not hasattr(loss, "shape") or loss.shape != ():
        got = f"shape {loss.shape}" if hasattr(loss, "shape") else type(loss).__name__
        raise ConfigurationError(
            f"the loss function must return one number, the mean over its batch, got {got}; "
            "with something beside it give has_aux=True"
        )


def _fold_keys(other: Arrays, index: Any, step: Any) -> Arrays:
    """Random keys that differ between devices and steps; everything else as it is.

    Between steps, as a key that the model itself splits and keeps is taken back after the step.
    """

    def folded(key: Any) -> Any:
        return jax.random.fold_in(jax.random.fold_in(key, index), step)

    return {
        name: jax.vmap(folded)(value.reshape(-1)).reshape(value.shape) if is_key(value) else value
        for name, value in other.items()
    }


def _agreed(before: Arrays, after: Arrays) -> Arrays:
    """State on which all devices agree: means of floating-point numbers, keys as they were."""

    def agreed(name: str) -> Any:
        if is_key(before[name]):
            return before[name]
        value = after[name]
        return lax.pmean(value, BATCH_AXES) if jnp.issubdtype(value.dtype, jnp.floating) else value

    return {name: agreed(name) for name in before}


def _cast(placement: Placement, piece: Any) -> Any:
    return piece.astype(placement.dtype)


def _sum_dtype(dtype: Any) -> Any:
    low = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if low else dtype
