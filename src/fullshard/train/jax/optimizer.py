# SPDX-License-Identifier: Apache-2.0
"""AdamW with the arithmetic of the torch engine's, as an optax transformation.

`torch.optim.AdamW` on gradients that `torch.nn.utils.clip_grad_norm_` has clipped, where matrices
decay and norms and biases do not, with the rate of `learning_rate` for each step. A step whose
loss or gradient is not finite changes nothing but the count of steps.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fullshard.train.config import OptimConfig, learning_rate

_EPS = 1e-8  # torch's and optax's own
_CLIP_EPS = 1e-6  # torch's: a gradient of exactly the longest norm is scaled, too


class AdamWState(NamedTuple):
    """``step`` counts all steps, also skipped ones; ``grad_norm`` is the last one's, unclipped."""

    step: Array
    grad_norm: Array
    inner: Any


def adamw(optim: OptimConfig, steps: int) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of a run; ``update`` takes the loss, as `TrainStep` gives it."""
    rates = np.array([learning_rate(optim, steps, step) for step in range(steps)], np.float32)
    inner = optax.chain(
        optax.scale_by_adam(optim.beta1, optim.beta2, _EPS),
        optax.add_decayed_weights(
            optim.weight_decay, lambda params: jax.tree.map(lambda param: param.ndim >= 2, params)
        ),
    )

    def init(params: Any) -> AdamWState:
        return AdamWState(jnp.zeros((), jnp.int32), jnp.zeros(()), inner.init(params))

    def update(
        grads: Any, state: AdamWState, params: Any = None, *, value: Array, **_: Any
    ) -> tuple[Any, AdamWState]:
        norm = _global_norm(grads)
        if optim.clip_norm:
            scale = jnp.minimum(1.0, optim.clip_norm / (norm + _CLIP_EPS))
            grads = jax.tree.map(lambda grad: grad * scale.astype(grad.dtype), grads)
        updates, moved = inner.update(grads, state.inner, params)
        good = jnp.isfinite(norm) & jnp.isfinite(value)
        rate = jnp.asarray(rates)[jnp.minimum(state.step, steps - 1)]

        def scaled(update: Array) -> Array:
            return jnp.where(good, (-rate * update).astype(update.dtype), jnp.zeros_like(update))

        kept = jax.tree.map(lambda new, old: jnp.where(good, new, old), moved, state.inner)
        return jax.tree.map(scaled, updates), AdamWState(state.step + 1, norm, kept)

    return optax.GradientTransformationExtraArgs(init, update)


def _global_norm(grads: Any) -> Array:
    squares = [jnp.sum(jnp.square(grad.astype(jnp.float32))) for grad in jax.tree.leaves(grads)]
    return jnp.sqrt(sum(squares, jnp.zeros(())))
