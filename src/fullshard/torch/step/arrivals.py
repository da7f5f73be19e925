# SPDX-License-Identifier: Apache-2.0
"""The hooks that take gradients from autograd, and the question which are still to come."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.core.errors import UsageError

_graph_task = torch._C._current_graph_task_id


class Arrivals:
    """The trainable parameters of a unit by their index in it, whose gradients are taken.

    Every gradient that autograd accumulates goes to the tracker of ``managed``, the unit, which
    they do not keep; but straight to the unit while it takes those of the graph task.

    [Note: Asking autograd]
    Autograd knows which nodes a backward will execute, including those that accumulate into
    parameters. So it can tell that a parameter is unused, and nobody needs to wait for it.
    Reentrant checkpointing runs the backward of a recomputed part as a graph task of its own inside
    the outer one: its gradients do not count for the outer task, which may deliver them again.
    While the inner task runs, autograd cannot be asked about the outer one, which counts as
    incomplete.
    """

    def __init__(self, managed: Callable[[], Any]):
        self._managed = managed
        self.watched: dict[int, nn.Parameter] = {}

    def begin_anew(self) -> None:
        """Forget all parameters: the unit makes others."""
        self.watched.clear()

    def watch(self, index: int, param: nn.Parameter) -> None:
        """Take the gradients of ``param``, the full parameter with this index, from now on."""
        self.watched[index] = param
        reference = self._managed

        def take(param: Tensor) -> None:
            grad, param.grad = param.grad, None
            managed = reference()
            if grad is None or managed is None:
                return
            if managed.takes_of == _graph_task() and not grad.requires_grad:
                managed.came.append(index)
                managed.unit.gradients.full.put(index, grad)
                return
            tracker = managed.tracker
            if tracker is None:
                raise UsageError(
                    "a sharded parameter got a gradient before the first forward of its root; call "
                    "the root module first, so that all ranks know the order of units"
                )
            grad = grad.detach() if grad.requires_grad else grad
            tracker.gradient_arrives(managed, index, grad)

        param.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def absent(self) -> set[int]:
        """The indices of parameters that get no gradient in the backward that runs now."""
        absent = set(self.watched)
        with suppress(RuntimeError):  # torch.autograd.grad() accumulates nothing into them
            absent -= {
                index
                for index, param in self.watched.items()
                if torch._C._will_engine_execute_node(_accumulator_of(param))
            }
        return absent


def _accumulator_of(param: nn.Parameter) -> Any:
    """The node that accumulates into ``param``; one in a graph, if it is in one.

    Not to be kept: it runs on the CUDA stream that was current when it was made, and graphs use it
    again as long as it lives, also those that are made on another stream.
    """
    with torch.enable_grad():
        node = param.view_as(param).grad_fn
    assert node is not None
    return node.next_functions[0][0]
