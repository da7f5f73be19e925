# SPDX-License-Identifier: Apache-2.0
"""Sharded parameters, and the rules by which torch operations run on them."""

import fullshard.torch.tensor.rules  # noqa: F401
