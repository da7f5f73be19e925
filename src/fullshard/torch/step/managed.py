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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fullshard.core.errors import CommunicationError, UsageError
from fullshard.core.strategy import Prefetch
from fullshard.torch.step.calls import WATCHED, Call, LiveCalls
from fullshard.torch.step.structures import holds_unknown, map_tensors, tensors_in
from fullshard.torch.unit.buffers import dtype_of
from fullshard.torch.unit.unit import Unit

__all__ = ["ManagedUnit", "StepWatcher", "managed_unit_of", "managed_units", "speaks_for_all"]

_ATTRIBUTE = "_fullshard_unit"


class StepWatcher(Protocol):
    """Who is told what happens to units: `fullshard.torch.step.tracker.Runtime`."""

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

    def enclosing_call(self, managed: "ManagedUnit") -> Call | None:
        """The call of the unit inside whose forward ``managed`` runs now."""

    def backward_begins(self, managed: "ManagedUnit", call: Call) -> None:
        """A gradient has reached the output of a call of the unit."""

    def gradient_arrives(self, managed: "ManagedUnit", index: int, grad: Tensor) -> None:
        """A parameter has its gradient, or a part of it."""

    def inputs_are_done(self, managed: "ManagedUnit", call: Call) -> None:
        """The gradients of the inputs of a call of the unit are there."""


def _none() -> None:
    return None


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

    def call_begins(self, call: Call) -> None:
        """Backward has reached ``call``."""
        self.last_begun = weakref.ref(call)
        self.the_runtime.backward_begins(self, call)

    def call_has_inputs_gradients(self, call: Call) -> None:
        """The gradients of the inputs of ``call`` are there."""
        self.the_runtime.inputs_are_done(self, call)

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
            self._call = self._call or Call(self, runtime.enclosing_call(self), runtime.now)
            inputs = list(tensors_in(changed, _needs_grad))
            if inputs:
                if any(WATCHED in tensor.__dict__ for tensor in inputs):
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
        if not tensor.requires_grad or WATCHED not in tensor.__dict__:
            return tensor
        return views.setdefault(id(tensor), tensor.view_as(tensor))

    return map_tensors(structure, own_view)


def _needs_grad(tensor: Tensor) -> bool:
    return tensor.requires_grad


def managed_unit_of(module: nn.Module) -> ManagedUnit | None:
    """The unit whose hooks are on ``module``, if it is the module of one."""
    return module.__dict__.get(_ATTRIBUTE)


def managed_units(module: nn.Module, *, recurse: bool = True) -> Iterator[ManagedUnit]:
    """The units whose modules are ``module`` (``recurse``: and those below), each once."""
    seen: set[ManagedUnit] = set()
    for each in module.modules() if recurse else (module,):
        managed = managed_unit_of(each)
        if managed is not None and managed not in seen:
            seen.add(managed)
            yield managed


def speaks_for_all(module: nn.Module) -> bool:
    """True on the one rank that writes what is the same on all: of every group and tensor axis."""
    for managed in managed_units(module):
        cuts = [each.ownership.tensor_parallel for each in managed.unit.sharded]
        if not managed.unit.ranks.first or not all(cut.first for cut in cuts if cut is not None):
            return False
    return True
