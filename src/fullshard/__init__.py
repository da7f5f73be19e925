# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallelism you can read: parameters, gradients and optimizer state in shards.

Importing this package loads neither torch nor jax. Its submodules load when they are first named:
`fullshard.torch` and `fullshard.jax` are the two engines, and each looks at its own models
(`fullshard.torch.inspection`, `fullshard.jax`). The four calls for scripts come from
`fullshard.distributed`.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for checkers and editors; at run time names load when they are used
    from fullshard import core, distributed, doctor, jax, launchers, report, testing, torch, train
    from fullshard import wrap as wrap
    from fullshard.distributed import cleanup, get_device, initialize_distributed_training, log
    from fullshard.torch.inspection import communication as communication
    from fullshard.torch.inspection import describe as describe
    from fullshard.torch.inspection import memory_of_rank as memory_of_rank
    from fullshard.torch.inspection import memory_of_ranks as memory_of_ranks
    from fullshard.torch.inspection import memory_summary as memory_summary

    __version__: str

__all__ = [
    "__version__", "cleanup", "core", "distributed", "doctor", "get_device",
    "initialize_distributed_training", "jax", "launchers", "log", "report", "testing", "torch",
    "train", "wrap",
]  # fmt: skip

_HOMES = {
    **dict.fromkeys(
        ["cleanup", "get_device", "initialize_distributed_training", "log"], "distributed"
    ),
    # Where scripts of earlier versions take them from; their place is fullshard.torch.inspection.
    **dict.fromkeys(
        ["communication", "describe", "memory_of_rank", "memory_of_ranks", "memory_summary"],
        "torch.inspection",
    ),
}


if not TYPE_CHECKING:  # a checker that sees it takes every name for right

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return importlib.metadata.version("fullshard")
        if name in _HOMES:
            return getattr(importlib.import_module(f"fullshard.{_HOMES[name]}"), name)
        if name in __all__:
            return importlib.import_module(f"fullshard.{name}")
        raise AttributeError(f"module 'fullshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_HOMES})
