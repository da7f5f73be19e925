# SPDX-License-Identifier: Apache-2.0
"""Bounds on how far apart rounding alone can drive two runs of the same training."""

import torch

SUMMANDS = 8  # how often a value is rounded, in one update, in an order that may differ


def rounding(updates, dtype=torch.float32):
    """Return the relative difference that rounding explains after this many optimizer updates.

    Two right programs add in different orders, and so does one program on two processors. What
    differs first is a float32 sum: by a few of its roundings, ``d0 = SUMMANDS * 2**-24``.
    Where float32 computes, every update adds as much again: ``d = d0 * (1 + updates)``.

    Where float32 weights are cast to a shorter ``dtype`` with ``eps`` between its numbers, a
    weight that is off by ``d`` lands on another number with a chance of ``d / eps``, and is then
    off by ``eps``. The root of the mean square is ``sqrt(d * eps)``; the next update starts from
    that. So the distance to ``eps`` halves, in powers of ten, with every update, and never exceeds
    it. ``docs/log.md`` has PyTorch against itself, with the last bits of its gradients moved.

    The bound is for values that depend on single weights to first order, such as the norm of all
    gradients. A mean over ``n`` independent values differs by ``1 / sqrt(n)`` of it.
    """
    difference = SUMMANDS * torch.finfo(torch.float32).eps / 2
    if dtype in (torch.float32, torch.float64):
        return difference * (1 + updates) * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
    eps = torch.finfo(dtype).eps
    for _ in range(updates):
        difference = (difference * eps) ** 0.5
    return difference
