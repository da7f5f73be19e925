# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of models and optimizers on torch: saved and loaded on any number of ranks."""

from fullshard.checkpoint import Background, Keep, RunFolder, Saving
from fullshard.checkpoint.session import Loaded
from fullshard.torch.checkpoint.loading import load_checkpoint
from fullshard.torch.checkpoint.saving import save_checkpoint

__all__ = [
    "Background", "Keep", "Loaded", "RunFolder", "Saving", "load_checkpoint", "save_checkpoint",
]  # fmt: skip
