# SPDX-License-Identifier: Apache-2.0
"""Clipping of gradients by their global norm."""

from collections.abc import Iterable

from torch import Tensor, nn


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale the gradients so that their global norm is at most ``max_norm``.

    Returns the norm before clipping, the same on every rank. Gradients of plain parameters count
    once: every rank is assumed to hold the same. Collective. `torch.nn.utils.clip_grad_norm_` does
    the same.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return nn.utils.clip_grad_norm_(params, max_norm, norm_type)
