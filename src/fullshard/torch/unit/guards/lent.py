# SPDX-License-Identifier: Apache-2.0
"""Values that others have put in the place of a unit's parameters: lent for a call, or refused."""

import sys
from traceback import walk_stack
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.torch.tensor.parameter import ShardedParameter

_LENDERS = ("functional_call", "_functional_call")


def check_lent(ours: ShardedParameter, shown: Any, *, missing: bool) -> None:
    """Raise `UsageError` unless ``shown``, in the place of ``ours``, is a full tensor on loan.

    On loan is what `torch.func.functional_call` shows for the time of a call.
    """
    name = ours.ownership.name
    if not _is_lending():
        if isinstance(shown, ShardedParameter) and isinstance(shown, nn.Parameter):
            raise UsageError(
                f"parameter {name!r} was tied to {shown.ownership.name!r} after it was sharded, "
                "and cannot become one with it now: tie parameters before sharding, or after it "
                "and before the first forward, below one sharded module that contains all uses"
            )
        what = "was deleted" if missing else f"was replaced by {_described(shown)}"
        raise UsageError(
            f"parameter {name!r} {what} after it was sharded: that would not be trained with the "
            "model. Replace parameters, apply parametrizations and prune before sharding; to give "
            f"{name!r} other values, write into it (param.copy_(values) under torch.no_grad(), "
            "load_state_dict)"
        )
    if isinstance(shown, (ShardedParameter, DTensor)) or not isinstance(shown, Tensor):
        raise UsageError(
            f"functional_call got {_described(shown)} for parameter {name!r}, which forward needs "
            "in full; give it param.full_tensor(), or full values of your own"
        )
    if tuple(shown.shape) != tuple(ours.shape):
        raise UsageError(
            f"functional_call got a tensor of shape {tuple(shown.shape)} for parameter {name!r} of "
            f"shape {tuple(ours.shape)}"
        )


def refuse_transform(name: str) -> NoReturn:
    """Raise `NotSupportedError` for the unit ``name`` inside a transform of `torch.func`."""
    raise NotSupportedError(
        f"unit {name!r} cannot run inside torch.func.grad, vjp, jvp or vmap: gathers and "
        "reduces would be traced as part of the function. Call torch.func.functional_call with "
        "full tensors and torch.autograd.grad over these, or loss.backward()"
    )


def _is_lending() -> bool:
    return any(
        frame.f_code.co_name in _LENDERS and "torch" in str(frame.f_globals.get("__name__"))
        for frame, _ in walk_stack(sys._getframe(2))
    )


def _described(value: Any) -> str:
    if isinstance(value, ShardedParameter):
        return f"one rank's span of {value.ownership.name!r}"
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    return repr(value)
