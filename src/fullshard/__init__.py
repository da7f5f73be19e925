# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallelism you can read: parameters, gradients and optimizer state in shards.

Importing this package loads neither torch nor jax: submodules load when they are first named, and
so do the functions for scripts, which live in `fullshard.distributed` (join the ranks, log, leave)
and in `fullshard.torch` (look at memory, shards and traffic).
"""

import importlib
import importlib.metadata
from typing import Any

__all__ = [
    "__version__",
    "cleanup",
    "communication",
    "core",
    "describe",
    "distributed",
    "get_device",
    "initialize_distributed_training",
    "log",
    "memory_of_rank",
    "memory_of_ranks",
    "memory_summary",
    "torch",
    "train",
    "wrap",
]

_SUBMODULES = ("core", "distributed", "torch", "train", "wrap")
_HOMES = {
    "cleanup": "distributed",
    "communication": "torch.inspection",
    "describe": "torch.inspection",
    "get_device": "distributed",
    "initialize_distributed_training": "distributed",
    "log": "distributed",
    "memory_of_rank": "torch.inspection",
    "memory_of_ranks": "torch.inspection",
    "memory_summary": "torch.inspection",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("fullshard")
    if name in _SUBMODULES:
        return importlib.import_module(f"fullshard.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"fullshard.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fullshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
