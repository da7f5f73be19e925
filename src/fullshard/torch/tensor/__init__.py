# SPDX-License-Identifier: Apache-2.0
"""Sharded parameters, and the rules by which torch operations run on them."""

from fullshard.torch.tensor import rules as rules

__all__: list[str] = []
