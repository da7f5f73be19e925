# SPDX-License-Identifier: Apache-2.0
"""The learning rate over the steps of a run."""

import math

from fullshard.train.config import OptimConfig

__all__ = ["learning_rate"]


def learning_rate(optim: OptimConfig, steps: int, step: int) -> float:
    """The rate of ``step`` (from 0): linear warm-up to ``lr``, then a cosine to its final share."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    progress = (step - optim.warmup_steps) / max(1, steps - 1 - optim.warmup_steps)
    wave = (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return optim.lr * (optim.final_lr_share + (1 - optim.final_lr_share) * wave)
