# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run on the JAX engine: going on from one, and saving when it is time.

They have the names of the torch engine's, so that either engine goes on where the other stopped.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils

from fullshard.checkpoint import Saving
from fullshard.jax import StoredAs, TrainState, load_checkpoint, save_checkpoint, torch_layout
from fullshard.jax.files.leaves import leaves_of
from fullshard.jax.files.processes import process_ranks
from fullshard.train.jax.setup import JaxRun
from fullshard.train.metrics import Reporter
from fullshard.train.run_checkpoints import RunCheckpoints
from fullshard.train.survival import CHECKPOINTS, StopRequest

__all__ = ["StateCheckpoints", "layout"]


class StateCheckpoints(RunCheckpoints):
    """The checkpoints of one run. With several processes all of them call each method."""

    def __init__(self, run: JaxRun, folder: Path | None, reporter: Reporter, stop: StopRequest):
        # The first process knows the folder; the others write into it, too.
        path = str(folder / CHECKPOINTS) if folder is not None else ""
        self._ranks = process_ranks()
        path = self._ranks.broadcast(path.encode()).decode()
        super().__init__(run.config, path, self._ranks.rank == 0, reporter, stop)
        self._names, self._about = layout(run)

    def resume(self, state: TrainState) -> tuple[TrainState, int]:
        """Load the newest step that is right; return it and the steps done. Uses ``state`` up."""
        like = _emptied(state, self._names)
        loaded = load_checkpoint(self._folder, like, names=self._names, fallback=True)
        self._go_on(loaded)
        return loaded.state, loaded.step

    def after_step(self, state: TrainState, done: int) -> None:
        """Save if it is time, or if a signal wants it; then leave with `SystemExit`."""

        def is_finite() -> bool:
            return bool(_all_finite((state.params, state.optimizer.inner)))

        self._after_step(done, is_finite, lambda aside: self._save(state, done, aside))

    def _save(self, state: TrainState, done: int, aside: bool) -> Saving:
        return save_checkpoint(
            self._folder,
            state,
            step=done,
            extra=self._extra(done),
            asynchronous=aside,
            names=self._names,
            about=self._about,
        )

    def _somewhere(self, *flags: bool) -> tuple[bool, ...]:
        if self._ranks.size == 1:
            return flags
        told = multihost_utils.process_allgather(np.array(flags))
        return tuple(bool(each) for each in told.any(axis=0))


def layout(run: JaxRun) -> tuple[Mapping[str, StoredAs], Mapping[str, Any]]:
    """Names under which the state is what the torch engine stores."""
    return torch_layout(run.step.abstract_state(), run.plain.names(), _group)


def _emptied(state: TrainState, names: Mapping[str, StoredAs]) -> TrainState:
    """Shapes and shardings in place of arrays that must come, whose memory is given back."""
    kept = []
    for leaf in leaves_of(state, names):
        value = leaf.value
        if not leaf.stored.optional:
            value = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
            leaf.value.delete()
        kept.append(value)
    return jax.tree.unflatten(jax.tree.structure(state), kept)


def _group(_: str, shape: tuple[int, ...]) -> int:
    """Return the group of the torch engine's AdamW: those that decay come first."""
    return 0 if len(shape) >= 2 else 1


@jax.jit
def _all_finite(tree: Any) -> Array:
    floating = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(x).all() for x in floating]).all()
