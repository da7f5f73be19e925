# SPDX-License-Identifier: Apache-2.0
"""XLA's flags that let collectives run beside computation."""

import os
from collections.abc import MutableMapping
from typing import Any

import jax

from fullshard.core.errors import ConfigurationError, UsageError

__all__ = ["overlap_flags"]

_FLAGS = {
    "gpu": (
        "--xla_gpu_enable_latency_hiding_scheduler=true",
        "--xla_gpu_enable_pipelined_all_gather=true",
        "--xla_gpu_enable_pipelined_reduce_scatter=true",
        "--xla_gpu_enable_pipelined_all_reduce=true",
        "--xla_gpu_enable_while_loop_double_buffering=true",
        "--xla_gpu_all_gather_combine_threshold_bytes=134217728",
        "--xla_gpu_reduce_scatter_combine_threshold_bytes=134217728",
    ),
    "tpu": (
        "--xla_tpu_enable_async_collective_fusion=true",
        "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
        "--xla_tpu_overlap_compute_collective_tc=true",
        "--xla_enable_async_all_gather=true",
    ),
    "cpu": (),
}
_VARIABLE = {"gpu": "XLA_FLAGS", "tpu": "LIBTPU_INIT_ARGS", "cpu": "XLA_FLAGS"}


def overlap_flags(
    platform: str, *, apply: bool = False, environ: MutableMapping[str, str] | None = None
) -> str:
    """The flags for ``platform`` ("gpu", "tpu" or "cpu"), as one line to be printed or exported.

    Gathers of the next layer and reductions of the last then run while a layer computes, at the
    cost of one more layer in memory. A CPU has none: its collectives run in turn. With ``apply``
    they are added to the variable that XLA reads, unless it has a value for the flag already; to be
    called before JAX looks for devices.

    Raises:
        ConfigurationError: for another platform.
        UsageError: with ``apply``, if JAX has looked for devices already.
    """
    if platform not in _FLAGS:
        raise ConfigurationError(f"platform={platform!r} is none of {', '.join(_FLAGS)}")
    line = " ".join(_FLAGS[platform])
    if apply:
        if environ is None and _has_devices():
            raise UsageError("JAX has looked for devices already: call overlap_flags before that")
        target = os.environ if environ is None else environ
        variable = _VARIABLE[platform]
        there = target.get(variable, "")
        new = [flag for flag in _FLAGS[platform] if flag.partition("=")[0] not in there]
        target[variable] = " ".join((*there.split(), *new))
    return line


def _has_devices() -> bool:
    """Whether JAX has looked for devices; asked without making it do so.

    This setting can be given until then, and not later.
    """
    config: Any = jax.config
    before = config.jax_num_cpu_devices
    try:
        config.update("jax_num_cpu_devices", max(before, 1) + 1)
        config.update("jax_num_cpu_devices", before)
    except RuntimeError:
        return True
    return False
