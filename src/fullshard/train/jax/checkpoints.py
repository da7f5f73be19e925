# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run on the JAX engine: going on from one, and saving when it is time.

They have the names of the torch engine's, so that either engine goes on where the other stopped.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils

from fullshard.checkpoint import Files, Keep, RunFolder, Saving, steps_in
from fullshard.jax import StoredAs, TrainState, load_checkpoint, save_checkpoint, torch_layout
from fullshard.jax.checkpoint_runs.leaves import leaves_of
from fullshard.jax.checkpoint_runs.processes import process_ranks
from fullshard.train.jax.setup import Run
from fullshard.train.metrics import Reporter
from fullshard.train.survival import (
    CHECKPOINTS,
    COME_AGAIN,
    Clock,
    StopRequest,
    check_position,
    forget_after,
)

__all__ = ["Checkpoints", "layout"]


class Checkpoints:
    """The checkpoints of one run. With several processes all of them call each method."""

    def __init__(self, run: Run, folder: Path | None, reporter: Reporter, stop: StopRequest):
        config = run.config.checkpoint
        self._run = run
        self._reporter = reporter
        self._stop = stop
        self._clock = Clock(config)
        # The first process knows the folder; the others write into it, too.
        path = str(folder / CHECKPOINTS) if folder is not None else ""
        self._ranks = process_ranks()
        path = self._ranks.broadcast(path.encode()).decode()
        self._folder = RunFolder(path, keep=Keep(last=config.keep))
        self._names, self._about = layout(run)
        self._saving: Saving | None = None

    @property
    def there(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        found = self._ranks.rank == 0 and bool(steps_in(Files(), Path(self._folder.path)))
        return any(self._somewhere(found))

    def resume(self, state: TrainState) -> tuple[TrainState, int]:
        """The newest step that is right, and how many steps are done; ``state`` is used up."""
        like = _emptied(state, self._names)
        loaded = load_checkpoint(self._folder, like, names=self._names, fallback=True)
        position = check_position(loaded, self._run.config.train.batch)
        if self._reporter.folder is not None:
            forget_after(self._reporter.folder, loaded.step)
        self._reporter.say(f"going on after step {loaded.step}, sample {position}")
        return loaded.state, loaded.step

    def after_step(self, state: TrainState, done: int) -> None:
        """Save if it is time, or if a signal wants it; then leave with `SystemExit`."""
        due, stop = self._somewhere(self._clock.is_due(done), bool(self._stop.signal))
        if not due and not stop:
            return
        self._save(state, done, at_once=stop)
        if stop:
            self._reporter.say(f"signal received: step {done} is saved; go on with --resume")
            raise SystemExit(COME_AGAIN)

    def finish(self) -> None:
        """Wait for a save that is under way. Raises `CheckpointError` if it failed."""
        if self._saving is not None:
            self._saving.wait()

    def _save(self, state: TrainState, done: int, at_once: bool) -> None:
        config = self._run.config
        self._clock.saved()
        if not bool(_all_finite((state.params, state.optimizer.inner))):
            self._reporter.say(
                f"step {done}: parameters or optimizer state are not finite; not saved, and the "
                "checkpoints before it stay"
            )
            return
        aside = config.checkpoint.asynchronous and self._ranks.size == 1 and not at_once
        self._saving = save_checkpoint(
            self._folder,
            state,
            step=done,
            extra={"position": done * config.train.batch},
            asynchronous=aside,
            names=self._names,
            about=self._about,
        )

    def _somewhere(self, *flags: bool) -> tuple[bool, ...]:
        """Whether any process has each of ``flags``."""
        if self._ranks.size == 1:
            return flags
        told = multihost_utils.process_allgather(np.array(flags))
        return tuple(bool(each) for each in told.any(axis=0))


def layout(run: Run) -> tuple[Mapping[str, StoredAs], Mapping[str, Any]]:
    """Names under which the state is what the torch engine stores, without padding."""
    state = run.step.abstract_state()
    names, about = torch_layout(state, run.plain.names(), _group)
    paths = (leaf.path for leaf in leaves_of(state, None))
    for path, spec, rests in zip(paths, run.step.specs, jax.tree.leaves(state), strict=True):
        if spec.kind != "other" and rests.shape != spec.shape:
            names[path] = replace(names[path], shape=spec.shape)
    return names, about


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
    """The group of the torch engine's AdamW: those that decay come first."""
    return 0 if len(shape) >= 2 else 1


@jax.jit
def _all_finite(tree: Any) -> Array:
    floating = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(x).all() for x in floating]).all()
