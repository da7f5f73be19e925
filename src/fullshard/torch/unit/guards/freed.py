# SPDX-License-Identifier: Apache-2.0
"""Full parameters that were freed after forward, told apart from those that are there.

[Note: Versions of what was freed]
Autograd keeps full parameters for backward, and with each the version that it had. A backward that
nobody has announced would read memory that is gone, and not every kernel looks whether there is
any. So parameters that are freed while a graph may need them get another version, and their own one
back when they are gathered: autograd, which compares versions anyway, then raises before it reads.
Those whose unit has others in their place have a version of their own for good.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

FREED_VERSION = 2**20
"""The version of freed parameters; no loop writes so often to a full parameter."""

REPLACED_VERSION = FREED_VERSION + 1
"""The version of parameters that will not be there again: a change of requires_grad made others."""


class Freed:
    """The marks on one unit's full parameters, ``params``."""

    def __init__(self, params: Sequence[Tensor]):
        self._params = tuple(params)
        self._freed = (FREED_VERSION,) * len(params)
        self._there = (0,) * len(params)
        self.marked: bool = False

    def mark(self) -> None:
        """Mark parameters whose memory is gone, if a graph may have them."""
        if not self.marked and torch.is_grad_enabled():
            torch._C._autograd._unsafe_set_version_counter(self._params, self._freed)
            self.marked = True

    def mark_replaced(self) -> None:
        """Mark parameters that others stand for from now on."""
        versions = (REPLACED_VERSION,) * len(self._params)
        torch._C._autograd._unsafe_set_version_counter(self._params, versions)

    def unmark(self) -> None:
        """Take the marks away: the memory is back."""
        if self.marked:
            torch._C._autograd._unsafe_set_version_counter(self._params, self._there)
            self.marked = False
