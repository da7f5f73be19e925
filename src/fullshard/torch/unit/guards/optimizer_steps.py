# SPDX-License-Identifier: Apache-2.0
"""How often optimizers have stepped on parameters that the ranks of a communicator share."""

from collections.abc import Iterable
from weakref import WeakKeyDictionary

from fullshard.torch.comm.protocol import Comm

__all__ = ["count_step", "take_steps"]

# By communicator, of which ranks that are threads have one each.
_steps: "WeakKeyDictionary[Comm, int]" = WeakKeyDictionary()


def count_step(comms: Iterable[Comm]) -> None:
    """An optimizer steps now on parameters that ``comms`` share."""
    for comm in comms:
        _steps[comm] = _steps.get(comm, 0) + 1


def take_steps(comm: Comm) -> int:
    """The steps since this was asked last."""
    return _steps.pop(comm, 0)
