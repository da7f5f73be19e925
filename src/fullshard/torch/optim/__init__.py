# SPDX-License-Identifier: Apache-2.0
"""Optimizers over sharded parameters."""

from fullshard.torch.optim.exchange import exchange_matrices
from fullshard.torch.optim.grad_scaler import ShardedGradScaler
from fullshard.torch.optim.overlap_optimizer import overlap_optimizer

__all__ = ["ShardedGradScaler", "exchange_matrices", "overlap_optimizer"]
