# SPDX-License-Identifier: Apache-2.0
"""The steps of optimizers, by the communicator that ranks share their parameters over.

A gather that is still under way when an optimizer steps, because of a forward without a backward or
a gather that users have started, would read shards while they are written to. It is awaited first.
In backward nobody waits: optimizers that step there change parameters that are not gathered.
"""

from collections.abc import Iterable
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch

from fullshard.torch.comm.protocol import Comm


class Gathered(Protocol):
    """The full parameters of a unit."""

    def wait(self) -> None:
        """Wait until what was gathered is there."""


# By communicator, of which ranks that are threads have one each.
_steps: "WeakKeyDictionary[Comm, int]" = WeakKeyDictionary()
_gathered: "WeakKeyDictionary[Comm, WeakSet[Gathered]]" = WeakKeyDictionary()


def await_before_steps(comm: Comm, gathered: Gathered) -> None:
    """Wait for ``gathered`` before optimizers step on parameters that ``comm`` shares."""
    _gathered.setdefault(comm, WeakSet()).add(gathered)


def count_step(comms: Iterable[Comm]) -> None:
    """An optimizer steps now on parameters that ``comms`` share."""
    in_backward = torch._C._current_graph_task_id() != -1
    for comm in comms:
        _steps[comm] = _steps.get(comm, 0) + 1
        for gathered in () if in_backward else _gathered.get(comm, ()):
            gathered.wait()


def take_steps(comm: Comm) -> int:
    """The steps since this was asked last."""
    return _steps.pop(comm, 0)
