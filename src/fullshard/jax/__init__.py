# SPDX-License-Identifier: Apache-2.0
"""fullshard's engine on JAX: sharded train steps for Flax NNX models and pytrees."""

from fullshard.checkpoint import Loaded
from fullshard.jax.analysis import (
    Needs,
    NeedsTable,
    StepTraffic,
    communication,
    compare,
    memory_analysis,
    overlap_flags,
)
from fullshard.jax.checkpoint import StoredAs, load_checkpoint, save_checkpoint
from fullshard.jax.layers import gathered, scan_layers
from fullshard.jax.mesh import create_mesh, describe_mesh, initialize
from fullshard.jax.placing import batch_sharding, describe, global_batch, shard, shardings
from fullshard.jax.program import StepOptions
from fullshard.jax.rule import Placement, Rule, selective, threshold
from fullshard.jax.state import TrainState
from fullshard.jax.step import TrainStep, generate, make_train_step
from fullshard.jax.vocabulary import cross_entropy, embed
from fullshard.jax.weights import load_weights, save_weights, torch_layout, torch_names

__all__ = [
    "Loaded", "Needs", "NeedsTable", "Placement", "Rule", "StepOptions",
    "StepTraffic", "StoredAs", "TrainState", "TrainStep", "batch_sharding", "communication",
    "compare", "create_mesh", "cross_entropy", "describe", "describe_mesh", "embed", "gathered",
    "generate", "global_batch", "initialize", "load_checkpoint", "load_weights",
    "make_train_step", "memory_analysis", "overlap_flags", "save_checkpoint", "save_weights",
    "scan_layers", "selective", "shard", "shardings", "threshold", "torch_layout", "torch_names",
]  # fmt: skip
