# SPDX-License-Identifier: Apache-2.0
"""One forward of a unit, with hooks on its inputs and outputs in autograd's graph."""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.core.schedule.unit_step import UnitCall
from fullshard.torch.step.managed import ManagedUnit
from fullshard.torch.step.structures import WATCHED, hook_outputs


class WatchedCall(UnitCall):
    """A call that hears of its gradients; its hooks keep it alive as long as its autograd graph."""

    managed: ManagedUnit
    watched: int
    version: int  # of the unit's shards, which backward must find as they were
    first_node: int  # the number that autograd gives the first node made inside it
    # What gradients of optional units count, if that depends on how many ranks used them; in the
    # root's calls.
    weights: dict[ManagedUnit, float] | None = None
    # Tensors whose nodes checkpoints have saved: to read those is to recompute. Weak, since a
    # checkpoint keeps the inputs that it recomputes from, whose hooks keep the call.
    saved: "Sequence[weakref.ref[Tensor]]" = ()

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
        hook_outputs(tensors, self.first_node, self._on_output_gradient)

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


def _weakly(
    method: "weakref.WeakMethod[Callable[[object], None]]",
) -> Callable[[object], None]:
    def call(value: object) -> None:
        target = method()
        if target is not None:
            target(value)

    return call


def check_backward(call: WatchedCall, *, failed: bool) -> None:
    """Refuse a backward that reaches ``call`` of a unit too late or in a way that is not known.

    Raises:
        UsageError: the backward before this one ``failed``, or the unit's parameters have been
            changed since the forward.
        NotSupportedError: ``create_graph=True``, and the unit's parameters will be freed.
    """
    unit = call.managed.unit
    if failed:
        raise UsageError(
            f"backward has reached unit {unit.name!r} again after a backward that failed: units "
            "that had delivered their gradients then would deliver them twice. Call zero_grad() "
            "and run forward again"
        )
    if call.version != unit.full.at_rest._version:
        raise UsageError(
            f"the parameters of unit {unit.name!r} have been changed between its forward and this "
            "backward, as by an optimizer's step: gradients would be neither those of the old nor "
            "of the new values. Run forward again after each step"
        )
    # Autograd computes with gradients on if it is to make a graph of the backward.
    if torch.is_grad_enabled() and not unit.resident and call.managed.reshard_after_backward:
        raise NotSupportedError(
            f"backward with create_graph=True (a gradient penalty, forces, hvp) goes through unit "
            f"{unit.name!r}, whose parameters are freed after backward, while the second backward "
            "needs them. Call fullshard.torch.keep_for_double_backward(model) before the first "
            "forward, which keeps all parameters full from forward to the optimizer's step"
        )
