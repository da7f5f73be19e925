# SPDX-License-Identifier: Apache-2.0
"""XLA's flags that let collectives run beside computation."""

import os
from collections.abc import MutableMapping

from jax._src import xla_bridge  # no public call asks without looking for devices

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


def overlap_flags(
    platform: str, *, apply: bool = False, environ: MutableMapping[str, str] | None = None
) -> str:
    """The flags for ``platform`` ("gpu", "tpu" or "cpu"), as one line to be printed or exported.

    Gathers of the next layer and reductions of the last then run while a layer computes, at the
    cost of one more layer in memory. A CPU has none. With ``apply`` they are added to the variable
    that XLA reads, unless it has a value for the flag already; before JAX looks for devices.

    Raises:
        ConfigurationError: for another platform.
        UsageError: with ``apply``, if JAX has looked for devices already.
    """
    if platform not in _FLAGS:
        raise ConfigurationError(f"platform={platform!r} is none of {', '.join(_FLAGS)}")
    if apply:
        if environ is None and xla_bridge.backends_are_initialized():
            raise UsageError("JAX has looked for devices already: call overlap_flags before that")
        target = os.environ if environ is None else environ
        variable = "LIBTPU_INIT_ARGS" if platform == "tpu" else "XLA_FLAGS"
        there = target.get(variable, "")
        new = [flag for flag in _FLAGS[platform] if flag.partition("=")[0] not in there]
        target[variable] = " ".join((*there.split(), *new))
    return " ".join(_FLAGS[platform])
