# SPDX-License-Identifier: Apache-2.0
"""From hooks to ops: watches forward and backward, asks the schedule, moves the units.

[Note: When a unit's backward is over]
A unit's parameters may be freed when nothing in its backward will read them again, and its
gradients reduced when none is still to come. Neither can be seen from gradients alone (frozen
weights deliver none, and the input's gradient may need a weight after that weight's own gradient is
out) nor from the inputs alone (they may need no gradient). So a call of a unit is over when the
gradients of all inputs that need one are there, and the unit is over when all its calls are, or
when every trainable parameter has delivered and no call waits for an input. Autograd runs gradient
accumulation before anything else that is ready, except between leaves; so a unit whose inputs are
done while gradients are missing is settled at the next event: what has not come by then was not
used, and counts as zero.

[Note: One order on all ranks]
Ranks must issue their collectives in the same order, even if one of them did not use a unit.
Autograd runs the backward of later forwards first; so when a unit's backward begins, a unit whose
forward began after that unit's was over, and whose backward has not begun, was not used. It is then
gathered and reduced with zeros like everybody else does; so are unused units inside a unit when
that unit's backward ends.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook

from fullshard.core.errors import UsageError
from fullshard.core.schedule import Event, Moment, OpKind, Scheduler, UnitPolicy
from fullshard.core.strategy import Prefetch
from fullshard.torch.modules import clean_name, tensors_in
from fullshard.torch.recorder import TraceRecorder
from fullshard.torch.unit import Unit

__all__ = ["ManagedUnit", "Runtime", "managed_unit_of"]

_ATTRIBUTE = "_fullshard_unit"

_ACTIONS: dict[OpKind, Callable[[Unit], None]] = {
    OpKind.GATHER: Unit.gather,
    OpKind.AWAIT_GATHER: Unit.await_gather,
    OpKind.FREE: Unit.free,
    OpKind.REDUCE: Unit.reduce,
    OpKind.AWAIT_REDUCE: Unit.await_reduce,
}


class _Call:
    """One forward of a unit whose backward may come; lives as long as its autograd graph."""

    def __init__(self, managed: "ManagedUnit", parent: "_Call | None"):
        self.managed = managed
        self.parent = parent  # the call inside which this one was made
        self.begun = False
        self.watched = 0  # modules whose inputs need gradients
        self._to_come = 0

    def watch_inputs(self, tensors: Sequence[Tensor]) -> None:
        self.watched += 1
        if len(tensors) == 1:
            tensors[0].register_hook(self._on_input_gradients)  # type: ignore[no-untyped-call]
        else:
            register_multi_grad_hook(tensors, self._on_input_gradients)

    def watch_outputs(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            # One unit's output is the next one's input. Hooks of a tensor run before those of the
            # node that made it, so that the next unit is over before this one begins.
            node = tensor.grad_fn
            if node is None:
                tensor.register_hook(self._on_output_gradient)  # type: ignore[no-untyped-call]
            else:
                node.register_prehook(self._on_output_gradient)

    def _on_output_gradient(self, _grads: object) -> None:
        if not self.begun:
            self.begin()

    def begin(self) -> None:
        parent = self.parent
        if parent is not None and not parent.begun and parent in parent.managed.calls:
            parent.begin()  # the output may be the parent's too, whose hook then comes second
        self.begun = True
        self._to_come = self.watched
        self.managed.the_runtime.backward_begins(self)

    def _on_input_gradients(self, _grads: object) -> None:
        self._to_come -= 1
        if self.begun and self._to_come == 0:
            self.begun = False
            self.managed.the_runtime.call_is_over(self)


class ManagedUnit:
    """A unit with its place among the modules and in the step; owns the modules' hooks."""

    def __init__(self, unit: Unit, modules: Sequence[nn.Module], reshard: bool | None):
        self.unit = unit
        self.reshard_after_forward = reshard
        self.number = -1
        self.runtime: Runtime | None = None
        self.open_in_forward = 0
        self.open_in_backward = False
        self.begun_in_backward = False
        # When this step's forwards of the unit began and ended, in events.
        self.first_begin = self.last_begin = self.last_end = 0
        self.calls: weakref.WeakSet[_Call] = weakref.WeakSet()
        self._modules_to_run = len(modules)
        self._modules_run = 0
        self._call: _Call | None = None
        self_reference = weakref.ref(self)

        def deliver(index: int, grad: Tensor) -> None:
            managed = self_reference()
            if managed is not None:
                managed.the_runtime.gradient_arrives(managed, index, grad)

        unit.on_gradient = deliver
        for module in modules:
            module.__dict__[_ATTRIBUTE] = self
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after_forward)

    @property
    def the_runtime(self) -> "Runtime":
        """The runtime that manages this unit; there is one from the first forward on."""
        assert self.runtime is not None
        return self.runtime

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        runtime = self.runtime or Runtime.adopt(module)
        if self._modules_run == 0:
            self._call = None
            runtime.forward_begins(self)
        if torch.is_grad_enabled():
            self._call = self._call or _Call(self, runtime.enclosing_call(self))
            inputs = list(tensors_in((args, kwargs), _needs_grad))
            if inputs:
                self._call.watch_inputs(inputs)
        self._modules_run += 1

    def _after_forward(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._call is not None:
            outputs = list(tensors_in(output, _needs_grad))
            if outputs:
                self._call.watch_outputs(outputs)
                self.calls.add(self._call)
        if self._modules_run == self._modules_to_run:
            self._modules_run = 0
            self._call = None
            self.the_runtime.forward_ends(self)

    def set_reshard_after_forward(self, reshard: bool) -> None:
        """Choose if full parameters are dropped after forward; between steps only."""
        if self.runtime is not None and not self.runtime.idle:
            raise UsageError("reshard_after_forward can only be changed between steps")
        self.reshard_after_forward = reshard
        if self.runtime is not None:
            self.runtime.set_prefetch(self.runtime.prefetch)

    def forget_step(self) -> None:
        """Back to the state between steps, whatever happened; full gradients are dropped."""
        self.open_in_forward = 0
        self.open_in_backward = self.begun_in_backward = False
        self.calls = weakref.WeakSet()
        self._modules_run = 0
        self._call = None
        self.unit.drop_gradients()
        self.unit.show_sharded()

    @property
    def current_call(self) -> _Call | None:
        """The call that is running forward now, if its backward may come."""
        return self._call


def _needs_grad(tensor: Tensor) -> bool:
    return tensor.requires_grad


def managed_unit_of(module: nn.Module) -> ManagedUnit | None:
    """The unit whose hooks are on ``module``, if it is the module of one."""
    return module.__dict__.get(_ATTRIBUTE)


class Runtime:
    """Runs the units below one root module.

    What moves units is collective: all ranks must run the same modules in the same order.
    """

    def __init__(self, units: Sequence[ManagedUnit], prefetch: Prefetch):
        self._references = [weakref.ref(managed) for managed in units]
        self._running: list[ManagedUnit] = []  # units whose forward is running, outermost first
        self._events = 0
        self._in_backward = False
        # Run forward and not reduced yet, by their latest forward (a dict for its order).
        self._due: dict[ManagedUnit, None] = {}
        self._unsettled: list[ManagedUnit] = []
        self._late: list[ManagedUnit] = []
        self._reducing: list[Unit] = []
        self.recorder: TraceRecorder | None = None
        for number, managed in enumerate(units):
            managed.number = number
            managed.runtime = self
        self.set_prefetch(prefetch)

    @classmethod
    def adopt(cls, root: nn.Module) -> "Runtime":
        """Make ``root`` the root of all units below it; they must be between steps."""
        found: dict[ManagedUnit, str] = {}
        for path, module in root.named_modules():
            managed = managed_unit_of(module)
            if managed is not None and managed not in found:
                found[managed] = clean_name(path)
        if not found:
            raise UsageError(f"{type(root).__name__} holds no sharded unit; shard it first")
        prefetch = Prefetch()
        for managed, path in found.items():
            if managed.runtime is not None:
                prefetch = managed.runtime.prefetch
                if not managed.runtime.idle:
                    raise UsageError(
                        f"unit {managed.unit.name!r} is in the middle of a step of its own; finish "
                        "its backward before it becomes part of a larger model"
                    )
            managed.unit.rename(path)
        return cls(list(found), prefetch)

    @property
    def units(self) -> Iterator[ManagedUnit]:
        """The units that still exist, the root's first."""
        for reference in self._references:
            managed = reference()
            if managed is not None:
                yield managed

    @property
    def idle(self) -> bool:
        """True between steps: nothing is gathered ahead, kept or under way."""
        return self._training.idle and self._evaluation.idle

    def set_prefetch(self, prefetch: Prefetch) -> None:
        """Change how far ahead units are gathered; between steps only."""
        policies, evaluation = {}, {}
        for managed in self.units:
            unit, reshard = managed.unit, managed.reshard_after_forward
            gathered = not unit.resident and bool(unit.params)
            policies[managed.number] = UnitPolicy(
                gathered=gathered,
                reduced=unit.trainable,
                # The root's parameters are needed again as soon as its forward is over.
                reshard_after_forward=managed.number > 0 if reshard is None else reshard,
            )
            evaluation[managed.number] = UnitPolicy(gathered=gathered, reduced=False)
        self.prefetch = prefetch
        self._training = Scheduler(policies, prefetch)
        self._evaluation = Scheduler(evaluation, prefetch)
        self._active = self._training

    # ---- forward --------------------------------------------------------------------------------

    def forward_begins(self, managed: ManagedUnit) -> None:
        """A unit's forward is about to run: gather it."""
        if not self._running or managed.number == 0:
            self._begin_at_the_top()
        self._running.append(managed)
        managed.open_in_forward += 1
        self._do(Moment.FORWARD_BEGIN, managed)
        managed.unit.show_full()
        if self._active is self._training and not self._in_backward:
            self._events += 1
            managed.last_begin = self._events
            if managed not in self._due:
                managed.first_begin = self._events
            self._due.pop(managed, None)
            self._due[managed] = None

    def enclosing_call(self, managed: ManagedUnit) -> _Call | None:
        """The call of the unit inside whose forward ``managed`` runs now."""
        outer = [other for other in self._running if other is not managed]
        return outer[-1].current_call if outer else None

    def _begin_at_the_top(self) -> None:
        in_autograd = torch._C._current_graph_task_id() != -1  # recomputation runs forward there
        if self._running or (self._in_backward and not in_autograd):
            self._recover()
        self._activate(self._training if torch.is_grad_enabled() else self._evaluation)
        if not self._active.idle and any(managed.unit.stale for managed in self.units):
            self._finish_step()  # kept from a forward before the optimizer's step

    def _activate(self, scheduler: Scheduler) -> None:
        """Go on with another schedule; what the present one holds gathered is freed first."""
        if scheduler is not self._active:
            self._finish_step()
            self._active = scheduler

    def forward_ends(self, managed: ManagedUnit) -> None:
        """A unit's forward has run: free it if the strategy says so."""
        self._running.remove(managed)
        managed.open_in_forward -= 1
        self._do(Moment.FORWARD_END, managed)
        if not managed.open_in_forward and not managed.open_in_backward:
            managed.unit.show_sharded()
        if self._active is self._evaluation:
            if not self._running:
                self._finish_step()
        elif not self._in_backward:
            self._events += 1
            managed.last_end = self._events

    def _recover(self) -> None:
        """After an exception in mid-step: forget the step, gradients not delivered included."""
        for managed in self.units:
            managed.forget_step()
        self._finish_step()
        self._running.clear()
        self._in_backward = False
        self._due.clear()
        self._unsettled.clear()
        self._late.clear()

    # ---- backward -------------------------------------------------------------------------------

    def backward_begins(self, call: _Call) -> None:
        """A gradient has reached a unit's output: gather it again."""
        if not self._in_backward:
            self._in_backward = True
            self._activate(self._training)
            Variable._execution_engine.queue_callback(self._backward_ends)
        self._settle()
        managed = call.managed
        managed.calls.add(call)
        if not managed.open_in_backward:
            if not managed.begun_in_backward:
                self._pass_over(after=managed.last_end)
            self._begin(managed)

    def _begin(self, managed: ManagedUnit) -> None:
        managed.open_in_backward = managed.begun_in_backward = True
        self._do(Moment.BACKWARD_BEGIN, managed)
        managed.unit.show_full()

    def _pass_over(self, after: int) -> None:
        """Do for unused units what other ranks may do. See [Note: One order on all ranks]."""
        later = takewhile(lambda m: m.last_begin > after, reversed(self._due))
        unused = [m for m in later if not m.begun_in_backward]
        for managed in sorted(unused, key=lambda m: -m.last_end):
            if managed in self._due and not managed.begun_in_backward:
                self._begin(managed)
                self._end(managed)

    def gradient_arrives(self, managed: ManagedUnit, index: int, grad: Tensor) -> None:
        """A parameter has its gradient."""
        unit = managed.unit
        held = unit.transient_bytes if self.recorder else 0
        unit.deliver(index, grad)
        if self.recorder and unit.transient_bytes != held:
            self.recorder.note("fill", unit, self._live_bytes)
        if managed not in self._due:
            if managed not in self._late:
                self._late.append(managed)
        elif unit.gradients_complete and not any(call.watched for call in managed.calls):
            self._end(managed)

    def call_is_over(self, call: _Call) -> None:
        """The gradients of a call's inputs are there. [Note: When a unit's backward is over]"""
        managed = call.managed
        managed.calls.discard(call)
        if any(other.begun for other in managed.calls):
            return
        if managed.unit.gradients_complete and not managed.calls:
            self._end(managed)
            return
        managed.open_in_backward = False
        self._do(Moment.BACKWARD_PAUSE, managed)
        managed.unit.show_sharded()
        if not managed.calls:
            self._unsettled.append(managed)

    def _settle(self) -> None:
        while self._unsettled:
            self._end(self._unsettled[0])

    def _end(self, managed: ManagedUnit) -> None:
        """A unit's backward is over: free and reduce it."""
        if managed in self._due:
            self._pass_over(after=managed.first_begin)
        self._due.pop(managed, None)
        if managed in self._unsettled:
            self._unsettled.remove(managed)
        for call in [call for call in managed.calls if call.begun]:
            call.begun = False
            managed.calls.discard(call)
        managed.open_in_backward = False
        self._do(Moment.BACKWARD_END, managed)
        managed.unit.show_sharded()

    def _backward_ends(self) -> None:
        """Autograd has nothing left to do: reduce what is still due, free everything."""
        self._settle()
        for managed in sorted(self._due, key=lambda m: -m.first_begin):
            if managed in self._due:
                if not managed.begun_in_backward:
                    self._begin(managed)
                self._end(managed)
        for managed in [*self._late, *(m for m in self.units if m.open_in_backward)]:
            self._end(managed)
        self._late.clear()
        for managed in self.units:
            managed.begun_in_backward = False
        self._finish_step()
        self._in_backward = False

    # ---- carrying ops out -----------------------------------------------------------------------

    def _finish_step(self) -> None:
        if not self._active.idle:
            self._do(Moment.STEP_END, None)

    def _do(self, moment: Moment, managed: ManagedUnit | None) -> None:
        event = Event(moment, managed.number if managed else -1)
        for kind, number in self._active.on(event):
            owner = self._references[number]()
            if owner is None:
                continue
            if kind is OpKind.AWAIT_REDUCE and not owner.unit.reducing:
                continue  # it completed by itself and was taken then
            _ACTIONS[kind](owner.unit)
            if kind is OpKind.REDUCE:
                self._reducing.append(owner.unit)
            if self.recorder:
                self.recorder.note(kind.value, owner.unit, self._live_bytes)
        if self._reducing:
            self._take_completed_reduces()

    def _take_completed_reduces(self) -> None:
        # A reduce that is there already gives its memory back now, not when the schedule asks.
        for unit in list(self._reducing):
            if unit.reduce_completed:
                unit.await_reduce()
                if self.recorder:
                    self.recorder.note(OpKind.AWAIT_REDUCE.value, unit, self._live_bytes)
        self._reducing = [unit for unit in self._reducing if unit.reducing]

    def _live_bytes(self) -> int:
        return sum(managed.unit.transient_bytes for managed in self.units)
