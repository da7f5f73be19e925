# SPDX-License-Identifier: Apache-2.0
"""The record of original parameters that sharded ones have replaced."""

import itertools
from typing import Any
from weakref import ref

from torch import Tensor

__all__ = ["Successor", "last_replacement", "mark_replaced", "name_of_replacement"]

_MARK = "_fullshard_replaced_as"

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


def last_replacement() -> int:
    """Return the number of the latest replacement in this process; it only grows."""
    return _last_replacement


def name_of_replacement(param: Tensor | None) -> str | None:
    """Return the name given to `mark_replaced`, or None for a parameter never replaced."""
    return getattr(param, _MARK, None)
