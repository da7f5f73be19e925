# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallelism you can read: parameters, gradients and optimizer state in shards.

Importing this package loads neither torch nor jax; submodules load when they are first named.
"""

import importlib
import importlib.metadata
from typing import Any

__all__ = ["__version__", "core", "torch", "train", "wrap"]

_SUBMODULES = ("core", "torch", "train", "wrap")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("fullshard")
    if name in _SUBMODULES:
        return importlib.import_module(f"fullshard.{name}")
    raise AttributeError(f"module 'fullshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
