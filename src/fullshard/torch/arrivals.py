# SPDX-License-Identifier: Apache-2.0
"""Which gradients of a unit are here in a backward, and which are still to come."""

from contextlib import suppress
from typing import Any

import torch
from torch import nn

__all__ = ["Arrivals"]


class Arrivals:
    """The gradients of a unit's trainable parameters, by their index in the unit.

    [Note: Asking autograd]
    Autograd knows beforehand which nodes a backward will execute, those that accumulate into
    parameters too. So an unused parameter is known to be unused, and need not be waited for. A part
    that reentrant checkpointing recomputes has a backward of its own, a graph task inside the outer
    one: what it delivers does not count for the outer one, which may deliver it again.
    """

    def __init__(self) -> None:
        self._watched: dict[int, nn.Parameter] = {}
        self._here: set[int] = set()
        self._awaited: dict[int, set[int]] = {}  # by graph task

    def watch(self, index: int, param: nn.Parameter) -> None:
        """Count ``param`` among those that may get a gradient."""
        self._watched[index] = param

    def expect(self) -> None:
        """Ask autograd, within a backward, which gradients will come in it."""
        task = torch._C._current_graph_task_id()
        if task in self._awaited:
            return
        self._awaited[task] = set()
        with suppress(RuntimeError):  # torch.autograd.grad() accumulates nothing into parameters
            self._awaited[task].update(
                index
                for index, param in self._watched.items()
                if torch._C._will_engine_execute_node(_accumulator_of(param))
            )

    def note(self, index: int) -> None:
        """A gradient is here."""
        self._here.add(index)
        awaited = self._awaited.get(torch._C._current_graph_task_id())
        if awaited:
            awaited.discard(index)

    @property
    def expected_here(self) -> bool:
        """True if every gradient is here that autograd said will come."""
        return not any(self._awaited.values())

    @property
    def all_here(self) -> bool:
        """True if that holds, and every trainable parameter has delivered at least once."""
        return len(self._here) == len(self._watched) and self.expected_here

    def end_backward(self) -> None:
        """What comes from now on belongs to another backward."""
        self._here.clear()
        self._awaited.clear()


def _accumulator_of(param: nn.Parameter) -> Any:
    """The node that accumulates into ``param``; one in a graph, if it is in one.

    Not to be kept: it runs on the CUDA stream that was current when it was made, and graphs use it
    again as long as it lives, also those that are made on another stream.
    """
    with torch.enable_grad():
        node = param.view_as(param).grad_fn
    assert node is not None
    return node.next_functions[0][0]
