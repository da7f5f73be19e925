# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of any pytree of arrays, in the format that `fullshard.torch` reads and writes, too.

A leaf is called by its path, as ``params.blocks.0.kernel``, and stored as ``state/<path>`` unless
``names`` says otherwise. `torch_layout` makes names under which a state is, array for array, what
the torch engine stores of the same model and AdamW.
"""

from fullshard.jax.checkpoint_runs.leaves import StoredAs
from fullshard.jax.checkpoint_runs.loading import Loaded, load_checkpoint
from fullshard.jax.checkpoint_runs.saving import save_checkpoint
from fullshard.jax.checkpoint_runs.torch_layout import torch_layout

__all__ = ["Loaded", "StoredAs", "load_checkpoint", "save_checkpoint", "torch_layout"]
