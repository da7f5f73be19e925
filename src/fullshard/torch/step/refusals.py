# SPDX-License-Identifier: Apache-2.0
"""Backwards that would give wrong gradients, refused where they begin."""

import torch

from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.torch.step.calls import WatchedCall

__all__ = ["check_backward"]


def check_backward(call: WatchedCall, *, failed: bool) -> None:
    """Refuse a backward that reaches ``call`` of a unit too late or in a way that is not known.

    Raises:
        UsageError: the backward before this one ``failed``, or the unit's parameters have been
            changed since the forward.
        NotSupportedError: ``create_graph=True``, and the unit's parameters will be freed.
    """
    unit = call.managed.unit
    if failed:
        raise UsageError(
            f"backward has reached unit {unit.name!r} again after a backward that failed: units "
            "that had delivered their gradients then would deliver them twice. Call zero_grad() "
            "and run forward again"
        )
    if call.version != unit.full.at_rest._version:
        raise UsageError(
            f"the parameters of unit {unit.name!r} have been changed between its forward and this "
            "backward, as by an optimizer's step: gradients would be neither those of the old nor "
            "of the new values. Run forward again after each step"
        )
    # Autograd computes with gradients on if it is to make a graph of the backward.
    if torch.is_grad_enabled() and not unit.resident and call.managed.reshard_after_backward:
        raise NotSupportedError(
            f"backward with create_graph=True (a gradient penalty, forces, hvp) goes through unit "
            f"{unit.name!r}, whose parameters are freed after backward, while the second backward "
            "needs them. Call fullshard.torch.keep_for_double_backward(model) before the first "
            "forward, which keeps all parameters full from forward to the optimizer's step"
        )
