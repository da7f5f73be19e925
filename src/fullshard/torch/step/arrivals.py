# SPDX-License-Identifier: Apache-2.0
"""The hooks that take gradients from autograd, and the count of those still to come."""

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fullshard.core.errors import UsageError

__all__ = ["Arrivals", "GradientReceiver", "ReceivingUnit"]


class GradientReceiver(Protocol):
    """The receiver of gradients: `fullshard.torch.step.tracker.Tracker`."""

    def gradient_arrives(self, managed: Any, index: int, grad: Tensor) -> None:
        """Take the gradient of a unit's parameter, or a further part of it."""


class ReceivingUnit(Protocol):
    """A unit as its gradients know it: `fullshard.torch.step.managed.ManagedUnit`."""

    @property
    def tracker(self) -> GradientReceiver | None:
        """The tracker that runs the unit now; another root may take it over between steps."""


class Arrivals:
    """The gradients of a unit's trainable parameters, by their index in the unit.

    Every gradient that autograd accumulates is counted, and handed at once to the tracker that runs
    the unit.

    [Note: Asking autograd]
    Autograd knows which nodes a backward will execute, including those that accumulate into
    parameters. So it can tell that a parameter is unused, and nobody needs to wait for it. Each
    node executes once, so there is no need to ask once every parameter has delivered. Reentrant
    checkpointing runs the backward of a recomputed part as a graph task of its own inside the outer
    one: its gradients do not count for the outer task, which may deliver them again. While the
    inner task runs, autograd cannot be asked about the outer one, which counts as incomplete.
    """

    def __init__(self) -> None:
        self._unit: Callable[[], ReceivingUnit | None] = lambda: None
        self.begin_anew()

    def belong_to(self, unit: ReceivingUnit) -> None:
        """Take the gradients of ``unit``."""
        self._unit = weakref.ref(unit)

    def begin_anew(self) -> None:
        """Forget all parameters: the unit makes others."""
        self._watched: dict[int, nn.Parameter] = {}
        self._here: set[int] = set()
        self._came: dict[int, set[int]] = {}  # by graph task
        self._absent: dict[int, set[int]] = {}  # what will not come, where that was asked

    def watch(self, index: int, param: nn.Parameter) -> None:
        """Take the gradients of ``param``, the full parameter with this index, from now on."""
        self._watched[index] = param
        # Weak, so that a model which is deleted gives its memory back without the garbage collector
        reference = weakref.ref(self)

        def take(param: Tensor) -> None:
            grad, param.grad = param.grad, None
            arrivals = reference()
            if arrivals is not None and grad is not None:
                arrivals._take(index, grad.detach() if grad.requires_grad else grad)

        param.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def expect(self) -> None:
        """Begin to wait for the gradients of the backward that runs now."""
        self._came.setdefault(torch._C._current_graph_task_id(), set())

    def _take(self, index: int, grad: Tensor) -> None:
        self._here.add(index)
        came = self._came.get(torch._C._current_graph_task_id())
        if came is not None:
            came.add(index)
        unit = self._unit()
        if unit is not None:
            if unit.tracker is None:
                raise UsageError(
                    "a sharded parameter got a gradient before the first forward of its root; call "
                    "the root module first, so that all ranks know the order of units"
                )
            unit.tracker.gradient_arrives(unit, index, grad)

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
        """Forget what has arrived: later gradients belong to another backward."""
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
