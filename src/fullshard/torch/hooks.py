# SPDX-License-Identifier: Apache-2.0
"""The hooks of a unit's modules: they watch forward and backward, and tell the runtime.

[Note: When a unit's backward is over]
A unit's parameters may be freed when nothing in its backward will read them again, and its
gradients reduced when none is still to come. Neither can be seen from gradients alone (frozen
weights deliver none, and the input's gradient may need a weight after that weight's own gradient is
out) nor from the inputs alone (a branch that starts from a constant leads to no input). So a unit's
backward is over when

- the gradients of all inputs that need one are there, for each of its calls;
- every parameter has delivered that autograd says will get a gradient (without an input to wait
  for, every trainable one: a recomputed part is not in the graph until it is run);
- units that began after it in forward are over too: a path to their parameters may lead through it.

What is not over when autograd has finished is over then.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fullshard.core.errors import CommunicationError, UsageError
from fullshard.core.strategy import Prefetch
from fullshard.torch.buffers import dtype_of
from fullshard.torch.modules import holds_unknown, map_tensors, tensors_in
from fullshard.torch.unit import Unit

__all__ = ["Call", "LiveCalls", "ManagedUnit", "StepWatcher", "managed_unit_of"]

_ATTRIBUTE = "_fullshard_unit"
_WATCHED = "_fullshard_watched"


class StepWatcher(Protocol):
    """Who is told what happens to units: `fullshard.torch.runtime.Runtime`."""

    @property
    def prefetch(self) -> Prefetch:
        """How far ahead units are gathered."""

    @property
    def idle(self) -> bool:
        """True between steps."""

    @property
    def now(self) -> tuple[int, int]:
        """Which forward of the root is the latest, and the time within the step, in events."""

    def set_prefetch(self, prefetch: Prefetch) -> None:
        """Make new schedules."""

    def forward_begins(self, managed: "ManagedUnit") -> None:
        """A unit's forward is about to run."""

    def forward_ends(self, managed: "ManagedUnit", *, unseen: bool = False) -> None:
        """A unit's forward has run; ``unseen``: its backward may come without notice."""

    def enclosing_call(self, managed: "ManagedUnit") -> "Call | None":
        """The call of the unit inside whose forward ``managed`` runs now."""

    def backward_begins(self, call: "Call") -> None:
        """A gradient has reached the output of a call."""

    def gradient_arrives(self, managed: "ManagedUnit", index: int, grad: Tensor) -> None:
        """A parameter has its gradient, or a part of it."""

    def inputs_are_done(self, call: "Call") -> None:
        """The gradients of a call's inputs are there."""


class Call:
    """One forward of a unit whose backward may come; lives as long as its autograd graph."""

    def __init__(self, managed: "ManagedUnit", runtime: "StepWatcher"):
        self.managed = managed
        self.parent = runtime.enclosing_call(managed)  # inside which this one was made
        self.made_in, self.began_at = runtime.now  # which forward of the root, and when
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
            setattr(tensor, _WATCHED, True)
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
        self.managed.last_begun = weakref.ref(self)
        self.managed.the_runtime.backward_begins(self)

    def _on_input_gradient(self, _grad: object) -> None:
        self._to_come -= 1
        if self.begun and self._to_come == 0:
            self.end()
            self.managed.the_runtime.inputs_are_done(self)


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


def _none() -> None:
    return None


def _weakly(
    method: "weakref.WeakMethod[Callable[[object], None]]",
) -> Callable[[object], None]:
    def call(value: object) -> None:
        target = method()
        if target is not None:
            target(value)

    return call


class ManagedUnit:
    """A unit with its place among the modules and in the step; owns the modules' hooks."""

    def __init__(
        self,
        unit: Unit,
        modules: Sequence[nn.Module],
        reshard: bool | None,
        adopt: Callable[[nn.Module], StepWatcher],
    ):
        self.unit = unit
        self.requires_gradient_sync = True
        self.held_back = False  # full gradients of earlier micro-batches wait for a reduce
        # What `change` may change; the units of lists are gathered when this one begins.
        self.reshard_after_forward = reshard
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.prefetch_forward: list[ManagedUnit] | None = None
        self.prefetch_backward: list[ManagedUnit] | None = None
        self.summoned = False  # modules show full parameters that are not the unit's own
        # Set if a path to somebody else's parameters leads through the unit: nobody tells when it
        # has been gone, so the unit stays full until autograd has finished.
        self.ends_with_backward = False
        self.number = -1
        self.runtime: StepWatcher | None = None
        self._adopt = adopt  # makes a runtime, with the module that runs first as its root
        self.open_in_forward = 0
        self.open_in_backward = False
        self.begun_in_backward = False
        self.counts = False  # the forward that runs now is one whose backward is waited for
        self.began_at = 0  # when the earliest call began whose backward is open
        # When this step's forwards of the unit began and ended, in events.
        self.first_begin = self.last_begin = self.last_end = 0
        self.calls = LiveCalls()
        self.last_begun: Callable[[], Call | None] = _none  # the call that backward reached last
        self._modules_to_run = len(modules)
        self._modules_run = 0
        self._unseen = False  # the output is of a class that tensors cannot be found in
        self._inside_itself = 0  # how deep a module has called itself
        self._call: Call | None = None
        self._handled_outside = 0
        self_reference = weakref.ref(self)

        def deliver(index: int, grad: Tensor) -> None:
            managed = self_reference()
            if managed is not None and managed.runtime is not None:
                managed.runtime.gradient_arrives(managed, index, grad)

        unit.on_gradient = deliver
        for module in modules:
            module.__dict__[_ATTRIBUTE] = self
            # What they do is not for graphs: a compiled module's forward is one without them.
            before = torch.compiler.disable(self._before_forward)  # type: ignore[no-untyped-call]
            after = torch.compiler.disable(self._after_forward)  # type: ignore[no-untyped-call]
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            # Also after an exception: checkpointing ends a recomputation early by raising one.
            module.register_forward_hook(after, always_call=True)

    @property
    def awaits_inputs(self) -> bool:
        """True if it is sure, without a look at all calls, that gradients of inputs will come."""
        call = self.last_begun()
        return call is not None and call.begun and call.watched > 0

    @property
    def the_runtime(self) -> StepWatcher:
        """The runtime that manages this unit; there is one from the first forward on."""
        assert self.runtime is not None
        return self.runtime

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._modules_run == self._modules_to_run:
            self._inside_itself += 1
            return None
        self._handled_outside = id(sys.exception())  # forward may run in an except clause
        runtime = self.runtime or self._adopt(module)
        if self._modules_run == 0:
            self._call = None
            runtime.forward_begins(self)
        changed = given = (args, kwargs)
        convert = self._input_conversion
        if convert is not None:
            changed = map_tensors(changed, convert)
        if torch.is_grad_enabled():
            self._call = self._call or Call(self, runtime)
            inputs = list(tensors_in(changed, _needs_grad))
            if inputs:
                if any(_WATCHED in tensor.__dict__ for tensor in inputs):
                    changed = _with_own_views(changed)
                    inputs = list(tensors_in(changed, _needs_grad))
                self._call.watch_inputs(inputs)
        self._modules_run += 1
        return None if changed is given else changed

    @property
    def _input_conversion(self) -> Callable[[Tensor], Tensor] | None:
        """What inputs go through: a cast, and for the root the way to the device."""
        precision, is_root = self.unit.plan.precision, self.number == 0
        device = self.unit.device if is_root and self.unit.device.type == "cuda" else None
        casts = precision.cast_inputs or (is_root and precision.cast_root_inputs)
        dtype = dtype_of(precision.compute) if casts and precision.compute else None
        if device is None and dtype is None:
            return None

        def convert(tensor: Tensor) -> Tensor:
            to = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            return tensor.to(device or tensor.device, to, non_blocking=True)

        return convert

    def _after_forward(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        failure = sys.exception()
        if isinstance(failure, CommunicationError) and id(failure) != self._handled_outside:
            # Nothing can be sent any more: the next forward forgets this step.
            self.unit.show_sharded()
            return None
        if self._inside_itself:
            self._inside_itself -= 1
            return None
        given, wanted = output, self.unit.plan.precision.output
        if wanted is not None:
            dtype = dtype_of(wanted)
            output = map_tensors(output, lambda t: t.to(dtype) if t.is_floating_point() else t)
        if self._call is not None:
            outputs = list(tensors_in(output, _needs_grad))
            self._unseen = self.unit.trainable and holds_unknown(output)
            if outputs:
                self._call.watch_outputs(outputs)
                self.calls.add(self._call)
        if self._modules_run == self._modules_to_run:
            self.end_forward()
        return None if output is given else output

    def run(self, module: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call another method of ``module`` as if it were its forward."""
        changed = self._before_forward(module, args, kwargs)
        output = None
        if changed is not None:
            args, kwargs = changed
        try:
            output = method(*args, **kwargs)
        finally:
            cast = self._after_forward(module, args, output)
        return output if cast is None else cast

    def end_forward(self) -> None:
        """The unit's modules have run, or those of them that will."""
        unseen, self._unseen = self._unseen, False
        self._modules_run = 0
        self._call = None
        self.the_runtime.forward_ends(self, unseen=unseen)

    def change(self, setting: str, value: Any) -> None:
        """Set one of the unit's settings, by its attribute's name; between steps only."""
        if getattr(self, setting) == value:
            return
        if self.runtime is not None and not self.runtime.idle:
            raise UsageError(f"{setting} can only be changed between steps")
        setattr(self, setting, value)
        if self.runtime is not None:
            self.runtime.set_prefetch(self.runtime.prefetch)

    def forget_step(self) -> None:
        """Back to the state between steps, whatever happened; full gradients are dropped."""
        self.open_in_forward = 0
        self.open_in_backward = self.begun_in_backward = False
        self.held_back = False
        self.calls = LiveCalls()
        self._modules_run = self._inside_itself = 0
        self._call = None
        self.unit.drop_gradients()
        self.unit.show_sharded()

    @property
    def current_call(self) -> Call | None:
        """The call that is running forward now, if its backward may come."""
        return self._call


def _with_own_views(structure: Any) -> Any:
    """``structure`` with a view in place of each tensor that another unit watches.

    The gradient of an input that several units share is complete only when all of them are over,
    and each would stay full until then. A view's gradient is that of its own unit alone.
    """
    views: dict[int, Tensor] = {}  # what was one tensor stays one

    def own_view(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad or _WATCHED not in tensor.__dict__:
            return tensor
        return views.setdefault(id(tensor), tensor.view_as(tensor))

    return map_tensors(structure, own_view)


def _needs_grad(tensor: Tensor) -> bool:
    return tensor.requires_grad


def managed_unit_of(module: nn.Module) -> ManagedUnit | None:
    """The unit whose hooks are on ``module``, if it is the module of one."""
    return module.__dict__.get(_ATTRIBUTE)
