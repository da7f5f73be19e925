# SPDX-License-Identifier: Apache-2.0
"""A run on the JAX engine: one compiled step over all devices, and the state that it uses up."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from fullshard.checkpoint import Loaded, RunFolder, Saving
from fullshard.jax import (
    StoredAs,
    TrainState,
    TrainStep,
    generate,
    load_checkpoint,
    save_checkpoint,
    save_weights,
    torch_layout,
)
from fullshard.jax.analysis import memory_of
from fullshard.jax.checkpoint import leaves_of, process_ranks
from fullshard.train.data import Batch
from fullshard.train.jax.record import StepsRecord
from fullshard.train.run import BytesRow, StepOutcome, TrainingRun, World

_TEMPERATURE = 0.7  # of the sample of text


@dataclass
class JaxRun(TrainingRun):
    """A run in one process; ``names`` are those of its arrays in the torch model."""

    world: "DeviceWorld"
    step: TrainStep
    names: Mapping[str, StoredAs]
    state: TrainState

    @property
    def parameters_numel(self) -> int:
        return sum(place.spec.numel for place in self.step.placements)

    def step_on(self, batch: Batch, rate: float) -> StepOutcome:
        """See `TrainingRun.step_on`. The optimizer, in the step, leaves out what is not finite."""
        self.state, loss, _ = self.step(self.state, self._typed(batch))
        numbers = float(loss), float(self.state.optimizer.grad_norm)
        return StepOutcome(*numbers, "" if all(map(math.isfinite, numbers)) else "a device")

    def evaluate(self) -> tuple[float, float]:
        """See `TrainingRun.evaluate`. The last batch is filled up with what counts nothing."""
        count, size = self.data.validation_count, self.config.train.batch
        sums = np.zeros(3)
        for first in range(0, count, size):
            places = range(first, first + size)
            samples = self.data.validation_batch([min(place, count - 1) for place in places])
            counts = np.array([place < count for place in places], np.float32)
            parts = self.step.evaluate(self.state, (*self._typed(samples), counts), _sums)
            sums += np.array([float(part) for part in parts])
        loss, right, targets_seen = sums
        return loss / targets_seen, right / targets_seen

    def _typed(self, batch: Batch) -> Batch:
        """Return inputs and targets as the model wants them."""
        inputs, targets = batch
        floating = np.issubdtype(inputs.dtype, np.floating)
        dtype = jnp.dtype(self.config.train.dtype) if floating else np.int32
        return inputs.astype(dtype), targets.astype(np.int32)

    @contextmanager
    def recorded(self, folder: str) -> Iterator[None]:
        if not (self.config.log.record and folder):
            yield
            return
        self.record = StepsRecord(folder, self.world, self.settings_told)
        ending = "finished"
        try:
            yield
        except BaseException as error:
            ending = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise
        finally:
            self.record.close(ending)

    @cached_property
    def layout(self) -> tuple[Mapping[str, StoredAs], Mapping[str, Any]]:
        """The names under which the state is what the torch engine stores, and its settings."""
        return torch_layout(self.step.abstract_state(), self.names, _group)

    def load_step(self, folder: RunFolder) -> tuple[Loaded, str]:
        """See `TrainingRun.load_step`. Uses the state up."""
        names, _ = self.layout
        loaded = load_checkpoint(folder, _emptied(self.state, names), names=names, fallback=True)
        self.state = loaded.state
        return loaded, ""

    def save_step(
        self, folder: RunFolder, step: int, extra: dict[str, Any], asynchronous: bool
    ) -> Saving:
        names, about = self.layout
        return save_checkpoint(
            folder,
            self.state,
            step=step,
            extra=extra,
            asynchronous=asynchronous,
            names=names,
            about=about,
        )

    def is_finite(self) -> bool:
        return bool(_all_finite((self.state.params, self.state.optimizer.inner)))

    def save_weights(self, path: Path) -> None:
        save_weights(path, self.state, self.names)

    def bytes_rows(self) -> list[BytesRow]:
        """See `TrainingRun.bytes_rows`.

        Parameters, gradients and optimizer state by their layout. The rest is the compiler's
        account of the whole step, gradients, full parameters and activations among it.
        """
        places = self.step.placements
        trained = [place for place in places if place.spec.trainable]
        kept = jax.tree.leaves(self.step.abstract_state().optimizer)
        at_rest = [
            _bytes_row("parameters", places),
            _bytes_row("gradients", trained),
            (
                "optimizer state",
                sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in kept),
                sum(x.size * x.dtype.itemsize for x in kept),
            ),
        ]
        _, mine, whole = zip(*at_rest, strict=True)
        batch = self._typed(self.data.train_batch(0, range(self.config.train.batch)))
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
        memory = memory_of(self.step.compiled(shapes))
        return [
            *at_rest,
            ("at rest", sum(mine), sum(whole)),
            ("full units and activations in a step, at most", memory["temporary"], None),
            ("peak, with activations", memory["peak"], None),
        ]

    def write_text(self, prompt: bytes, count: int) -> bytes:
        rows = np.frombuffer(prompt, np.uint8)[None].astype(np.int32)
        seed = self.config.train.seed
        drawn = generate(self.step, self.state, rows, count, _TEMPERATURE, seed)
        return prompt + bytes(drawn[0].tolist())


def _bytes_row(purpose: str, places: Any) -> tuple[str, int, int]:
    mine = sum(place.rest_bytes for place in places)
    return purpose, mine, sum(place.spec.bytes for place in places)


def cross_entropy(logits: Array, targets: Array) -> Array:
    """Return the loss of each target, float32, from ``logits`` (..., classes)."""
    chances = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(chances, targets[..., None], axis=-1)[..., 0]


def loss_of(model: Any, batch: tuple[Array, Array]) -> Array:
    """Return mean loss per target."""
    inputs, targets = batch
    return cross_entropy(model(inputs), targets).mean()


def _sums(model: Any, batch: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """Return the sum of losses, right answers, and targets."""
    inputs, targets, counts = batch
    logits = model(inputs)
    losses = cross_entropy(logits, targets)
    weights = jnp.broadcast_to(counts.reshape(-1, *(1,) * (targets.ndim - 1)), targets.shape)
    right = (logits.argmax(-1) == targets) * weights
    return (losses * weights).sum(), right.sum(), weights.sum()


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


# -- its devices ----------------------------------------------------------------------------------


def device_stats() -> dict[str, int]:
    """Return what this process's first device tells of its memory; empty if it tells nothing."""
    return jax.local_devices()[0].memory_stats() or {}


class DeviceWorld(World):
    """The devices of ``mesh``, over all processes.

    One process drives all its devices, so that a step takes the whole batch: what the ranks of the
    torch engine would take, one behind the other.
    """

    noun = "device"
    part: tuple[int, int] = (0, 1)

    def __init__(self, mesh: Mesh):
        self.size: int = int(mesh.devices.size)
        self.is_first: bool = jax.process_index() == 0
        self.driver: str = mesh.devices.flat[0].device_kind
        processes, cpu = jax.process_count(), mesh.devices.flat[0].platform == "cpu"
        self.name: str = f"{self.size} {'CPU devices' if cpu else self.driver}"
        if processes > 1:
            self.name += f" of {processes} processes"
        elif cpu:
            self.name = f"{self.size} simulated CPU devices"
        self.where: str = self.name

    def device_memory(self) -> tuple[int, int] | None:
        stats = device_stats()
        if "peak_bytes_in_use" in stats and "bytes_limit" in stats:
            return stats["peak_bytes_in_use"], stats["bytes_limit"]
        return None

    def somewhere(self, *flags: bool) -> tuple[bool, ...]:
        if jax.process_count() == 1:
            return flags
        return tuple(multihost_utils.process_allgather(np.array(flags)).any(axis=0).tolist())

    def shared_text(self, text: str) -> str:
        return process_ranks().broadcast(text.encode()).decode()
