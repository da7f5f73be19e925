# SPDX-License-Identifier: Apache-2.0
"""From one command to a run: devices of one process or of several, a mesh, a compiled step."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress

import jax
import jax.numpy as jnp
from flax import nnx

from fullshard.core.errors import ConfigurationError
from fullshard.core.presets import transformer
from fullshard.jax import (
    StoredAs,
    create_mesh,
    initialize,
    load_weights,
    make_train_step,
    torch_names,
)
from fullshard.launchers import check_nproc, launcher_environment
from fullshard.train.config import Config
from fullshard.train.data import load
from fullshard.train.fits import check_run
from fullshard.train.jax.models import NnxDigitNet, NnxGPT
from fullshard.train.jax.optimizer import adamw
from fullshard.train.jax.run import DeviceWorld, JaxRun, device_stats, loss_of
from fullshard.train.loop import train

_SIMULATED = 2  # devices without an accelerator, unless somebody says


def launch(config: Config, nproc: int | None = None) -> int:
    """Train as ``config`` says; returns the exit status.

    Under a launcher (torchrun, Open MPI, SLURM) its processes are joined, each with its devices;
    else this process takes ``nproc`` devices, by default all accelerators or, without any, two
    simulated devices. To be called before JAX has looked for devices.

    Raises:
        ConfigurationError: for more devices than there are, a batch they cannot share, or data that
            are not there.
    """
    if nproc is not None:
        check_nproc(nproc)
    if launcher_environment(os.environ, local_only=nproc is not None) is not None:
        initialize()
        devices = jax.devices()
    else:
        devices = _local_devices(nproc)
    gpu_bytes = device_stats().get("bytes_limit")
    check_run(config, len(devices), len(jax.local_devices()), gpu_bytes)
    train(prepare(config, devices))
    return 0


def _local_devices(nproc: int | None) -> list[jax.Device]:
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with suppress(RuntimeError):  # JAX has its devices already: take those
            jax.config.update("jax_num_cpu_devices", nproc or _SIMULATED)
    devices = jax.devices()
    if nproc is not None and nproc > len(devices):
        raise ConfigurationError(
            f"--nproc {nproc} devices are asked for, but JAX has {len(devices)} "
            f"({devices[0].platform})"
        )
    return devices[:nproc]


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
