# SPDX-License-Identifier: Apache-2.0
"""Bounds on how far apart rounding alone can drive two runs of the same training."""

import torch

SUMMANDS = 8  # how often a value is rounded, in one update, in an order that may differ


def rounding(updates, dtype=torch.float32, weights=torch.float32):
    """Return the relative difference that rounding explains after this many optimizer updates.

    Two right programs add in different orders, and so does one program on two processors. What
    differs first is a sum in the dtype of the ``weights``: by a few of its roundings, each half an
    ``eps`` of that dtype (the distance of its numbers from 1). Where ``dtype``, in which the model
    computes, is as exact, every update adds as much again: ``d = d0 * (1 + updates)``.

    Where weights are cast to a shorter ``dtype``, a weight that is off by ``d`` lands on another
    number with a chance of ``d / eps``, and is then off by ``eps``. The root of the mean square is
    ``sqrt(d * eps)``; the next update starts from that. So the distance to ``eps`` halves, in
    powers of ten, with every update, and never exceeds it. ``docs/log.md`` has PyTorch against
    itself, with the last bits of its gradients moved.

    The bound is for values that depend on single weights to first order, such as the norm of all
    gradients. A mean over ``n`` independent values differs by ``1 / sqrt(n)`` of it.
    """
    difference = SUMMANDS * torch.finfo(weights).eps / 2
    eps = torch.finfo(dtype).eps
    if eps <= torch.finfo(weights).eps:
        return difference * (1 + updates)
    for _ in range(updates):
        difference = (difference * eps) ** 0.5
    return difference


def rounding_by_adam(updates, numel, learning_rate):
    """Return the difference that float32's rounding explains in an element of a parameter.

    Adam moves elements by about the learning rate, however small their gradients are. Rounding errs
    by a share of a tensor's typical gradient, of which the smallest of ``numel`` is one part in
    ``numel``: its share is so much larger.
    """
    return learning_rate * numel * sum(rounding(update) for update in range(updates))
