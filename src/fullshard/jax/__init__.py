# SPDX-License-Identifier: Apache-2.0
"""fullshard's engine on JAX: sharded train steps for Flax NNX models and pytrees.

`make_train_step` is the engine; `shard`, `replicate`, `gather` and `describe` place arrays for
programs that ``jax.jit`` partitions by itself. Importing this package does not load torch.
"""

from fullshard.jax.mesh import create_mesh, describe_mesh, initialize
from fullshard.jax.options import StepOptions
from fullshard.jax.placement import Placement, Rule, selective, threshold
from fullshard.jax.sharding import describe, gather, replicate, shard
from fullshard.jax.state import StateSpec, TrainState
from fullshard.jax.step import TrainStep, make_train_step

__all__ = [
    "Placement",
    "Rule",
    "StateSpec",
    "StepOptions",
    "TrainState",
    "TrainStep",
    "create_mesh",
    "describe",
    "describe_mesh",
    "gather",
    "initialize",
    "make_train_step",
    "replicate",
    "selective",
    "shard",
    "threshold",
]
