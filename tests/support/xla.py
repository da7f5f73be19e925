# SPDX-License-Identifier: Apache-2.0
"""How XLA compiles in tests: quickly. Programs are small, so their time is that of compiling them.

Measured in CPU seconds of one step of a two-layer GPT: 2.9 with the level alone, 0.7 without the
emitters that write fusions by way of MLIR, 0.5 with one module for LLVM instead of 32. None of
these changes a program's collectives or more than half a percent of its temporary memory.
"""

import importlib.metadata

__all__ = ["flags"]

_QUICK = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
# From 0.12 on there are no other emitters, and XLA ends a process that has an unknown flag.
if importlib.metadata.version("jaxlib") < "0.12":
    _QUICK.append("--xla_cpu_use_fusion_emitters=false")


def flags(devices):
    """Return ``XLA_FLAGS`` for so many simulated devices."""
    return " ".join((f"--xla_force_host_platform_device_count={devices}", *_QUICK))
