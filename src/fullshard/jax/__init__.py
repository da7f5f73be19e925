# SPDX-License-Identifier: Apache-2.0
"""fullshard's engine on JAX: sharded train steps for Flax NNX models and pytrees."""

from fullshard.checkpoint import Loaded
from fullshard.jax.analysis.flags import overlap_flags
from fullshard.jax.analysis.hlo import StepTraffic
from fullshard.jax.analysis.needs import (
    Needs,
    NeedsTable,
    communication,
    compare,
    memory_analysis,
    which_needs_less,
)
from fullshard.jax.analysis.profiling import Profile, profile
from fullshard.jax.arrays.mesh import create_mesh, describe_mesh, initialize
from fullshard.jax.arrays.placing import (
    batch_sharding,
    describe,
    gather,
    global_batch,
    replicate,
    shard,
    shardings,
)
from fullshard.jax.arrays.rule import Placement, Rule, selective, threshold
from fullshard.jax.compute.gathered import gathered, scan_layers
from fullshard.jax.compute.vocabulary import cross_entropy, embed
from fullshard.jax.files.checkpoint import load_checkpoint, save_checkpoint
from fullshard.jax.files.leaves import StoredAs
from fullshard.jax.files.torch_names import torch_layout, torch_names
from fullshard.jax.files.weights import load_weights, save_weights
from fullshard.jax.training.generation import generate
from fullshard.jax.training.options import StepOptions
from fullshard.jax.training.state import StateSpec, TrainState
from fullshard.jax.training.step import TrainStep, make_train_step

__all__ = [
    "Loaded", "Needs", "NeedsTable", "Placement", "Profile", "Rule", "StateSpec", "StepOptions",
    "StepTraffic", "StoredAs", "TrainState", "TrainStep", "batch_sharding", "communication",
    "compare", "create_mesh", "cross_entropy", "describe", "describe_mesh", "embed", "gather",
    "gathered", "generate", "global_batch", "initialize", "load_checkpoint", "load_weights",
    "make_train_step", "memory_analysis", "overlap_flags", "profile", "replicate",
    "save_checkpoint", "save_weights", "scan_layers", "selective", "shard", "shardings",
    "threshold", "torch_layout", "torch_names", "which_needs_less",
]  # fmt: skip
