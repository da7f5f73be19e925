# SPDX-License-Identifier: Apache-2.0
"""The parts of forward that backward finds: policies of `jax.checkpoint`.

[Note: What backward keeps]
Gathered weights must not wait for backward. What stands in no scan and in no `jax.checkpoint` of
the user's is put, run by run, under a policy that keeps what was computed and nothing that was only
moved: collectives, reshapes, casts. One checkpoint around everything would overrule the user's: its
policy would decide inside of them, too.
"""

from collections.abc import Callable
from typing import Any

import jax

__all__ = ["OF_ROLLED", "keep_computed"]

_NAMES = """
all_gather broadcast_in_dim concatenate convert_element_type copy dynamic_slice reshape
sharding_constraint slice squeeze transpose
"""
_MOVES = frozenset(_NAMES.split())


def keep_computed(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy of `jax.checkpoint`; see [Note: What backward keeps]."""
    return primitive.name not in _MOVES


def _keep_matmuls(primitive: Any, *_: Any, **params: Any) -> bool:
    """Keep products with weights: of matrices without batch dims, and convolutions."""
    if primitive.name == "conv_general_dilated":
        return True
    return primitive.name == "dot_general" and not any(params["dimension_numbers"][1])


OF_ROLLED: dict[str, Callable[..., bool] | None] = {
    "block": jax.checkpoint_policies.nothing_saveable,
    "matmuls": _keep_matmuls,
    "none": None,
}
"""Of layers that were rolled up, by the option ``remat``."""
