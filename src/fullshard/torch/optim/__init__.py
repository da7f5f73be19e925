# SPDX-License-Identifier: Apache-2.0
"""Optimizers over sharded parameters."""

from fullshard.torch.optim.clipping import clip_grad_norm_
from fullshard.torch.optim.exchange import exchange_matrices
from fullshard.torch.optim.grad_scaler import ShardedGradScaler
from fullshard.torch.optim.overlap_optimizer import overlap_optimizer

__all__ = ["ShardedGradScaler", "clip_grad_norm_", "exchange_matrices", "overlap_optimizer"]
