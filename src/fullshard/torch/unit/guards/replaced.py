# SPDX-License-Identifier: Apache-2.0
"""The record of original parameters that sharded ones have replaced."""

import itertools
from typing import Any
from weakref import ref

from torch import Tensor

from fullshard.core.errors import UsageError
from fullshard.torch.tensor.parameter import ShardedParameter

__all__ = [
    "Successor",
    "last_replacement",
    "mark_replaced",
    "name_of_replacement",
    "put_back",
    "take_over_hooks",
]

_MARK = "_fullshard_replaced_as"
_GUARD = "_fullshard_guard"  # the hook that stops gradients of what was replaced

_replacements = itertools.count(1)
_last_replacement = 0

Successor = tuple["ref[Any]", Tensor]
"""A parameter that was replaced, and what has taken its place."""


def mark_replaced(original: Tensor, name: str) -> None:
    """Note on ``original`` that a sharded parameter has taken its place under ``name``.

    Optimizers that still hold it are refused when they step.
    """
    global _last_replacement
    setattr(original, _MARK, name)
    _last_replacement = next(_replacements)
    if original.is_leaf and original.requires_grad and not isinstance(original, ShardedParameter):

        def refuse(_grad: Tensor) -> None:
            raise UsageError(
                f"a gradient has come to the parameter that was sharded as {name!r}, which nothing "
                "trains any more: forward has used a reference to it that was taken before "
                "sharding (a list of weights, a closure, an alias). Use the module's attribute, "
                "which is full in forward, or an nn.ParameterList"
            )

        setattr(original, _GUARD, original.register_hook(refuse))  # type: ignore[no-untyped-call]


def put_back(original: Tensor) -> None:
    """Let ``original`` be a parameter as others again."""
    guard = original.__dict__.pop(_GUARD, None)
    if guard is not None:
        guard.remove()


def take_over_hooks(original: Tensor, sharded: Tensor) -> None:
    """Let the hooks that users have registered for the gradient of ``original`` get the sharded."""
    if original.is_meta and isinstance(original, ShardedParameter):
        return
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(original, kind, None)
        if hooks and sharded.requires_grad:
            setattr(sharded, kind, hooks)
            setattr(original, kind, None)


def last_replacement() -> int:
    """Return the number of the latest replacement in this process; it only grows."""
    return _last_replacement


def name_of_replacement(param: Tensor | None) -> str | None:
    """Return the name given to `mark_replaced`, or None for a parameter never replaced."""
    return getattr(param, _MARK, None)
