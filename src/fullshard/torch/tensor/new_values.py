# SPDX-License-Identifier: Apache-2.0
"""Rules for operations that make memory for new values beside sharded ones."""

import math
from typing import Any

from torch._ops import OpOverload

from fullshard.torch.tensor.elementwise import need_whole, on_spans
from fullshard.torch.tensor.ownership import Ownership
from fullshard.torch.tensor.parameter import Args, Kwargs, Rule, ShardedParameter

__all__ = ["empty_like", "new_values"]


def new_values(func: OpOverload) -> Rule:
    """Make a plain tensor for ``new_empty(size)`` and its kin, which name their own size.

    A DTensor makes DTensors: of its own size one that is cut alike.
    """

    def rule(args: Args, kwargs: Kwargs) -> Any:
        value, size, *others = args
        owner: Ownership = value.ownership
        if owner.placed is None:
            return func(value.local, size, *others, **kwargs)
        if tuple(size) != owner.shape:
            need_whole(func, owner)
        local = func(value.local, [value.local.numel()], *others, **kwargs)
        return ShardedParameter.value(local, owner)

    return rule


def empty_like(func: OpOverload) -> Rule:
    """Make memory like that of a value, filled with NaN if that was on the meta device.

    ``to_empty`` of a module inside a unit comes here, and the unit learns of it later: it must find
    what nobody initialises. See [Note: Memory that nobody has written].
    """
    make = on_spans(func, drop=("memory_format",))

    def rule(args: Args, kwargs: Kwargs) -> Any:
        made = make(args, kwargs)
        if args[0].is_meta and not made.is_meta and made.is_floating_point():
            made.local.fill_(math.nan)
        return made

    return rule
