# SPDX-License-Identifier: Apache-2.0
"""From settings to what a run works with: data, a mesh, and a compiled step with its state."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from fullshard.core.presets import transformer
from fullshard.jax import StoredAs, create_mesh, load_weights, make_train_step, torch_names
from fullshard.train.config import Config
from fullshard.train.data import load
from fullshard.train.jax.models import NnxDigitNet, NnxGPT
from fullshard.train.jax.optimizer import adamw
from fullshard.train.jax.run import JaxRun, loss_of
from fullshard.train.jax.world import DeviceWorld

__all__ = ["build_model", "prepare"]


def prepare(config: Config, devices: list[jax.Device]) -> JaxRun:
    """Load the data, and make model and optimizer sharded over ``devices``.

    With several processes all of them must call. Raises `ConfigurationError` for data or weights
    that cannot be read.
    """
    data = load(config)
    replicas = len(devices) if config.shard.strategy == "NO_SHARD" else 1
    mesh = create_mesh(fsdp=len(devices) // replicas, data=replicas, devices=devices)
    make, names = build_model(config)
    step = make_train_step(
        make,
        adamw(config.optim, config.train.steps),
        loss_of,
        mesh,
        # SHARD_GRAD_OP keeps full parameters from forward to backward, like all else.
        remat=config.shard.strategy != "SHARD_GRAD_OP",
        at_most_unsharded=1.0,  # any number of devices will do; the table of memory tells
    )
    state = step.init()
    if config.train.initial_weights:
        state = load_weights(config.train.initial_weights, state, names)
    return JaxRun(config, DeviceWorld(mesh), data, step, names, state)


def build_model(config: Config) -> tuple[Callable[[], nnx.Module], Mapping[str, StoredAs]]:
    """Return what makes the plain model, and the names of its arrays in the torch model.

    Parameters have the dtype asked for; nothing is computed yet. The torch model is that of
    `fullshard.train.torch.models`, whose files this one reads.
    """
    dtype, seed = jnp.dtype(config.train.dtype), config.train.seed
    shape = transformer(config.model.preset) if config.model.name == "gpt" else None

    def make() -> nnx.Module:
        if shape is None:
            return NnxDigitNet(dtype, rngs=nnx.Rngs(seed, dropout=seed + 1))
        return NnxGPT(shape, dtype, rngs=nnx.Rngs(seed))

    tied = {"output.weight": "embedding.weight"} if shape is not None and shape.tied else {}
    return make, torch_names(nnx.eval_shape(make), tied)
