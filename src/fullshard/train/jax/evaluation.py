# SPDX-License-Identifier: Apache-2.0
"""Functions of a sharded model without gradients: validation, and writing text."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from fullshard.jax.step import TrainState, make_train_step

__all__ = ["evaluator"]


def evaluator(
    make: Callable[[], nnx.Module], function: Callable[[Any, Any], Any], mesh: Mesh
) -> Callable[[TrainState, Any], Any]:
    """``function(model, batch)`` over a train step's state, as a call of state and batch.

    The function returns a tree of arrays, each the mean over its part of the batch; the call gives
    their means over all devices. The model is that of ``make``, which also made the state's, in
    evaluation mode: no dropout, running statistics. Nothing of the state changes.
    """

    def make_for_evaluation() -> nnx.Module:
        model = make()
        model.eval()
        return model

    def nothing_to_train(model: Any, batch: Any) -> tuple[Any, Any]:
        return jnp.zeros(()), function(model, batch)

    # A step whose optimizer does nothing: what would go backward is not even compiled.
    step = make_train_step(
        make_for_evaluation,
        optax.set_to_zero(),
        nothing_to_train,
        mesh,
        has_aux=True,
        donate=False,
        remat="none",
    )

    def evaluate(state: TrainState, batch: Any) -> Any:
        return step(TrainState(state.params, {}, state.other, state.step), batch)[2]

    return evaluate
