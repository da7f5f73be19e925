# SPDX-License-Identifier: Apache-2.0
"""One forward of a unit whose backward may come."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["WATCHED", "Call", "CallRecord", "CallWatcher", "CalledUnit"]

WATCHED = "_fullshard_watched"
"""The attribute that marks a tensor of which some call awaits the gradient."""


class CallWatcher(Protocol):
    """The listener to the backward of calls: `fullshard.torch.step.tracker.Tracker`."""

    # Any: the tracker knows what kind of unit calls; this file need not.

    def backward_begins(self, managed: Any, call: "Call") -> None:
        """A gradient has reached the output of ``call``."""

    def inputs_are_done(self, managed: Any, call: "Call") -> None:
        """The gradients of the inputs of ``call`` are there."""


class CalledUnit(Protocol):
    """A unit as its calls know it: `fullshard.torch.step.managed.ManagedUnit`."""

    @property
    def tracker(self) -> CallWatcher | None:
        """The tracker that runs the unit now; another root may take it over between steps."""

    @property
    def step(self) -> "CallRecord":
        """The unit's record of the step."""


class CallRecord(Protocol):
    """Where the calls of a unit are kept: `fullshard.torch.step.unit_step.UnitStep`."""

    def add_call(self, call: "Call") -> None:
        """Await the backward of ``call``."""

    def awaits(self, call: "Call") -> bool:
        """True if the backward of ``call`` is awaited."""


class Call:
    """One forward of a unit whose backward may come; lives as long as its autograd graph."""

    def __init__(self, managed: CalledUnit, parent: "Call | None", now: tuple[int, int]):
        self.managed = managed
        self.parent = parent  # inside which this one was made
        self.made_in, self.began_at = now  # which forward of the root, and when
        self.version = 0  # of the unit's shards, which backward must find as they were
        self.begun = False
        self.watched = 0  # inputs that need gradients
        self.leads_back = False  # some output needs gradients
        self._to_come = 0
        self._first_node = torch._C._autograd._get_sequence_nr()
        self._over_in = -1  # the backward (autograd's graph task) that has been over already

    @property
    def _watcher(self) -> CallWatcher:
        tracker = self.managed.tracker
        assert tracker is not None
        return tracker

    def end(self) -> None:
        """Backward has left this call."""
        self.begun = False
        self._over_in = torch._C._current_graph_task_id()

    def watch_inputs(self, tensors: Sequence[Tensor]) -> None:
        """Hear when the gradients of ``tensors``, inputs of the unit, are there."""
        # Not register_multi_grad_hook: it holds the nodes that hold it, and so keeps every graph.
        # An input that gets no gradient is not waited for beyond the end of backward.
        self.watched += len(tensors)
        for tensor in tensors:
            setattr(tensor, WATCHED, True)
            if not tensor.is_leaf:
                tensor.register_hook(self._on_input_gradient)  # type: ignore[no-untyped-call]
                continue
            # A leaf outlives the graph: its hook must neither keep the call nor stay behind.
            hook = _weakly(weakref.WeakMethod(self._on_input_gradient))
            handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            weakref.finalize(self, handle.remove)

    def watch_outputs(self, tensors: Sequence[Tensor]) -> None:
        """Hear when the first gradient of ``tensors``, outputs of the unit, is there."""
        self.leads_back = True
        self.managed.step.add_call(self)
        for tensor in tensors:
            # One unit's output is the next one's input. Hooks of a tensor run before those of the
            # node that made it, so that the next unit is over before this one begins.
            node = tensor.grad_fn
            if node is None:
                tensor.register_hook(self._on_output_gradient)  # type: ignore[no-untyped-call]
                continue
            node.register_prehook(self._on_output_gradient)
            # An in-place change of a view puts other nodes in the place of the view's own. A base
            # from before the call is an input, whose gradient comes when the call is over.
            base = tensor._base.grad_fn if tensor._is_view() else None  # type: ignore[union-attr]
            if base is not None and base is not node and base._sequence_nr() >= self._first_node:
                base.register_prehook(self._on_output_gradient)

    def _on_output_gradient(self, _grads: object) -> None:
        if not self.begun and torch._C._current_graph_task_id() != self._over_in:
            self.begin()

    def begin(self) -> None:
        """Backward has reached this call, and so the calls around it."""
        parent = self.parent
        if parent is not None and not parent.begun and parent.managed.step.awaits(parent):
            parent.begin()  # the output may be the parent's too, whose hook then comes second
        self.begun = True
        self._to_come = self.watched
        self._watcher.backward_begins(self.managed, self)

    def _on_input_gradient(self, _grad: object) -> None:
        self._to_come -= 1
        if self.begun and self._to_come == 0:
            self.end()
            self._watcher.inputs_are_done(self.managed, self)


def _weakly(
    method: "weakref.WeakMethod[Callable[[object], None]]",
) -> Callable[[object], None]:
    def call(value: object) -> None:
        target = method()
        if target is not None:
            target(value)

    return call
