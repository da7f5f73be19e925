# SPDX-License-Identifier: Apache-2.0
"""From one command to devices: one process for all of them, or one of several that were started."""

import os
from contextlib import suppress

import jax

from fullshard.core.errors import ConfigurationError
from fullshard.jax import initialize
from fullshard.launchers import check_nproc, launcher_environment
from fullshard.train.config import Config
from fullshard.train.fits import check_run
from fullshard.train.jax.setup import prepare
from fullshard.train.jax.world import device_stats
from fullshard.train.loop import train

__all__ = ["launch"]

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
