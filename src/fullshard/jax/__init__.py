# SPDX-License-Identifier: Apache-2.0
"""fullshard's engine on JAX: sharded train steps for Flax NNX models and pytrees.

`make_train_step` is the engine; `shard`, `replicate`, `gather` and `describe` place arrays for
programs that ``jax.jit`` partitions by itself. Importing this package does not load torch, and
Orbax, which takes seconds, only when a state is saved or restored.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fullshard.jax.analysis import Needs, NeedsTable, compare, memory_analysis, which_needs_less
from fullshard.jax.checkpoint_runs import (
    Loaded,
    StoredAs,
    load_checkpoint,
    save_checkpoint,
    torch_layout,
)
from fullshard.jax.collectives import Communication, communication
from fullshard.jax.mesh import create_mesh, describe_mesh, initialize
from fullshard.jax.options import StepOptions
from fullshard.jax.placement import Placement, Rule, selective, threshold
from fullshard.jax.profiling import Profile, profile
from fullshard.jax.sharding import describe, gather, replicate, shard
from fullshard.jax.state import StateSpec, TrainState
from fullshard.jax.step import TrainStep, make_train_step
from fullshard.jax.torch_names import torch_names
from fullshard.jax.weights import load_weights, save_weights

if TYPE_CHECKING:
    from fullshard.jax.checkpoint import restore_state, save_state

__all__ = [
    "Communication",
    "Loaded",
    "Needs",
    "NeedsTable",
    "Placement",
    "Profile",
    "Rule",
    "StateSpec",
    "StepOptions",
    "StoredAs",
    "TrainState",
    "TrainStep",
    "communication",
    "compare",
    "create_mesh",
    "describe",
    "describe_mesh",
    "gather",
    "initialize",
    "load_checkpoint",
    "load_weights",
    "make_train_step",
    "memory_analysis",
    "profile",
    "replicate",
    "restore_state",
    "save_checkpoint",
    "save_state",
    "save_weights",
    "selective",
    "shard",
    "threshold",
    "torch_layout",
    "torch_names",
    "which_needs_less",
]


def __getattr__(name: str) -> Any:
    if name in ("restore_state", "save_state"):
        return getattr(importlib.import_module("fullshard.jax.checkpoint"), name)
    raise AttributeError(f"module 'fullshard.jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
