# SPDX-License-Identifier: Apache-2.0
"""One forward of a unit whose backward may come, and the calls of a unit that are alive."""

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["WATCHED", "Call", "CalledUnit", "LiveCalls"]

WATCHED = "_fullshard_watched"
"""The attribute that marks a tensor of which some call awaits the gradient."""


class CalledUnit(Protocol):
    """A unit as its calls know it: `fullshard.torch.step.managed.ManagedUnit`."""

    calls: "LiveCalls"

    def call_begins(self, call: "Call") -> None:
        """Backward has reached ``call``."""

    def call_has_inputs_gradients(self, call: "Call") -> None:
        """The gradients of the inputs of ``call`` are there."""


class Call:
    """One forward of a unit whose backward may come; lives as long as its autograd graph."""

    def __init__(self, managed: CalledUnit, parent: "Call | None", now: tuple[int, int]):
        self.managed = managed
        self.parent = parent  # inside which this one was made
        self.made_in, self.began_at = now  # which forward of the root, and when
        self.begun = False
        self.watched = 0  # inputs that need gradients
        self._to_come = 0
        self._first_node = torch._C._autograd._get_sequence_nr()
        self._over_in = -1  # the backward (autograd's graph task) that has been over already

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
        """Hear when the first gradient of ``tensors`` is there."""
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
        if parent is not None and not parent.begun and parent in parent.managed.calls:
            parent.begin()  # the output may be the parent's too, whose hook then comes second
        self.begun = True
        self._to_come = self.watched
        self.managed.call_begins(self)

    def _on_input_gradient(self, _grad: object) -> None:
        self._to_come -= 1
        if self.begun and self._to_come == 0:
            self.end()
            self.managed.call_has_inputs_gradients(self)


class LiveCalls:
    """The calls of a unit whose autograd graphs exist; keeps none of them alive."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Call]] = {}

    def add(self, call: Call) -> None:
        """Take ``call`` up."""
        self._references[id(call)] = weakref.ref(call)

    def discard(self, call: Call) -> None:
        """Forget ``call``."""
        self._references.pop(id(call), None)

    def __bool__(self) -> bool:
        return bool(self.alive())

    def __contains__(self, call: Call) -> bool:
        return id(call) in self._references and self._references[id(call)]() is call

    def alive(self) -> list[Call]:
        """The calls, in the order in which they were taken up."""
        if not self._references:
            return []
        # Not a WeakSet: its guards take longer than all else that happens in an event.
        calls = [reference() for reference in self._references.values()]
        if None in calls:
            self._references = {id(call): weakref.ref(call) for call in calls if call is not None}
        return [call for call in calls if call is not None]


def _weakly(
    method: "weakref.WeakMethod[Callable[[object], None]]",
) -> Callable[[object], None]:
    def call(value: object) -> None:
        target = method()
        if target is not None:
            target(value)

    return call
