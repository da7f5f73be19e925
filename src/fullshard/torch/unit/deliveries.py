# SPDX-License-Identifier: Apache-2.0
"""Gradients on their way into a unit's buffer, which take the way in groups."""

import torch
from torch import Tensor

__all__ = ["Deliveries"]


class Deliveries:
    """Copies gradients into views of a buffer, small ones together by one call.

    Those that wait hold at most ``most_bytes``; larger ones are copied at once, and with 0 all are.
    """

    def __init__(self, most_bytes: int):
        self._most_bytes = most_bytes
        self._views: list[Tensor] = []
        self._grads: list[Tensor] = []
        self.bytes = 0

    def put(self, view: Tensor, grad: Tensor) -> None:
        """Copy ``grad``, which nobody else may change, to ``view``: now, or at the next `flush`."""
        size = grad.numel() * grad.element_size()
        if size >= self._most_bytes:
            view.copy_(grad)
            return
        if self.bytes + size > self._most_bytes:
            self.flush()
        self._views.append(view)
        self._grads.append(grad)
        self.bytes += size

    def flush(self) -> None:
        """Copy what waits."""
        if self._views:
            torch._foreach_copy_(self._views, self._grads)
            self.clear()

    def clear(self) -> None:
        """Forget what waits."""
        self._views, self._grads, self.bytes = [], [], 0
