# SPDX-License-Identifier: Apache-2.0
"""What a sharded parameter is and does."""

from fullshard.torch.tensor import rules as rules

__all__: list[str] = []
