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
    Autograd knows which nodes a backward will execute, those that accumulate into parameters too.
    So an unused parameter is known to be unused, and need not be waited for. Each of them executes
    once, so nobody has to be asked where every parameter has delivered. A part that reentrant
    checkpointing recomputes has a backward of its own, a graph task inside the outer one: what it
    delivers does not count for the outer one, which may deliver it again. While it runs the outer
    one cannot be asked, and is taken to be not complete.
    """

    def __init__(self) -> None:
        self._watched: dict[int, nn.Parameter] = {}
        self._here: set[int] = set()
        self._came: dict[int, set[int]] = {}  # by graph task
        self._absent: dict[int, set[int]] = {}  # what will not come, where that was asked

    def watch(self, index: int, param: nn.Parameter) -> None:
        """Count ``param`` among those that may get a gradient."""
        self._watched[index] = param

    def expect(self) -> None:
        """Within a backward: wait for what will come in it."""
        self._came.setdefault(torch._C._current_graph_task_id(), set())

    def note(self, index: int) -> None:
        """A gradient is here."""
        self._here.add(index)
        came = self._came.get(torch._C._current_graph_task_id())
        if came is not None:
            came.add(index)

    @property
    def expected_here(self) -> bool:
        """True if every gradient is here that autograd says will come."""
        for task, came in self._came.items():
            missing = len(self._watched) - len(came)
            if missing and missing != len(self._absent_in(task) - came):
                return False
        return True

    @property
    def all_here(self) -> bool:
        """True if that holds, and every trainable parameter has delivered at least once."""
        return len(self._here) == len(self._watched) and self.expected_here

    def end_backward(self) -> None:
        """What comes from now on belongs to another backward."""
        self._here.clear()
        self._came.clear()
        self._absent.clear()

    def _absent_in(self, task: int) -> set[int]:
        if task not in self._absent:
            if task != torch._C._current_graph_task_id():
                return set()
            absent = self._absent[task] = set(self._watched)
            with suppress(RuntimeError):  # torch.autograd.grad() accumulates nothing into them
                absent -= {
                    index
                    for index, param in self._watched.items()
                    if torch._C._will_engine_execute_node(_accumulator_of(param))
                }
        return self._absent[task]


def _accumulator_of(param: nn.Parameter) -> Any:
    """The node that accumulates into ``param``; one in a graph, if it is in one.

    Not to be kept: it runs on the CUDA stream that was current when it was made, and graphs use it
    again as long as it lives, also those that are made on another stream.
    """
    with torch.enable_grad():
        node = param.view_as(param).grad_fn
    assert node is not None
    return node.next_functions[0][0]
