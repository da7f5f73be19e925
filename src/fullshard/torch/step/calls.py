# SPDX-License-Identifier: Apache-2.0
"""One forward of a unit, with hooks on its inputs and outputs in autograd's graph."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fullshard.core.schedule.unit_step import UnitCall
from fullshard.torch.step.managed import ManagedUnit
from fullshard.torch.step.structures import WATCHED

__all__ = ["WatchedCall"]


class WatchedCall(UnitCall):
    """A call that hears of its gradients; its hooks keep it alive as long as its autograd graph."""

    managed: ManagedUnit
    version: int  # of the unit's shards, which backward must find as they were
    first_node: int  # the number that autograd gives the first node made inside it
    # What gradients of optional units count, if that depends on how many ranks used them; in the
    # root's calls.
    weights: dict[ManagedUnit, float] | None = None
    # In a checkpoint, a tensor whose node has saved something: to read that is to recompute. Weak,
    # since a checkpoint keeps the inputs that it recomputes from, whose hooks keep the call.
    saved: "weakref.ref[Tensor] | None" = None

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
        self.await_backward()
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
            if base is not None and base is not node and base._sequence_nr() >= self.first_node:
                base.register_prehook(self._on_output_gradient)

    def save_for_recomputation(self, outputs: Sequence[Tensor]) -> None:
        """Let the checkpoint that runs save a tensor, by which `recompute` makes it recompute.

        It lives as long as the graph behind the ``outputs`` of the call.
        """
        lead = torch.zeros((), requires_grad=True)
        saved: Tensor = _Saved.apply(lead)  # type: ignore[no-untyped-call]
        self.saved = weakref.ref(saved)
        for tensor in outputs:
            node: Any = tensor.grad_fn
            if node is not None:
                # The tensor, not its node: in torch 2.11 a node in Python does not keep itself.
                node.metadata.setdefault(_Saved, []).append(saved)

    def recompute(self) -> None:
        """Recompute now what lies in the same checkpoint, in the backward that runs."""
        saved = None if self.saved is None else self.saved()
        if saved is not None:
            _ = saved.grad_fn.saved_tensors  # type: ignore[union-attr]

    def watch_inside(self, tensors: Sequence[Tensor]) -> None:
        """Hear of gradients of those ``tensors`` too that this forward has made."""
        made_here = [tensor for tensor in tensors if self._has_made(tensor)]
        if made_here:
            self.watch_outputs(made_here)

    def _has_made(self, tensor: Tensor) -> bool:
        node = tensor.grad_fn
        return node is not None and node._sequence_nr() >= self.first_node

    # The tracker that runs the unit now: another root may take it over between steps.

    def _on_output_gradient(self, _grads: object) -> None:
        tracker = self.managed.tracker
        if tracker is not None and not self.begun:
            tracker.output_has_gradient(self)

    def _on_input_gradient(self, _grad: object) -> None:
        tracker = self.managed.tracker
        if tracker is not None:
            tracker.input_has_gradient(self)


class _Saved(torch.autograd.Function):
    """A node that saves its input."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return tensor.clone()

    @staticmethod
    def backward(_ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> Tensor:
        return grads[0]


def _weakly(
    method: "weakref.WeakMethod[Callable[[object], None]]",
) -> Callable[[object], None]:
    def call(value: object) -> None:
        target = method()
        if target is not None:
            target(value)

    return call
