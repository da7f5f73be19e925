# SPDX-License-Identifier: Apache-2.0
"""From events to ops: hears what happens, asks the schedule, moves the units.

[Note: One order on all ranks]
Ranks must issue their collectives in the same order, even if one of them did not use a unit.
Autograd runs the backward of later forwards first; so when a unit's backward begins, a unit whose
forward began after that unit's was over, and whose backward has not begun, was not used. It is then
gathered and reduced with zeros like everybody else does; so are unused units inside a unit when
that unit's backward ends.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from fullshard.core.errors import UsageError
from fullshard.core.schedule import Moment
from fullshard.core.strategy import Prefetch
from fullshard.torch.step.calls import Call
from fullshard.torch.step.executor import Execution
from fullshard.torch.step.managed import ManagedUnit, managed_unit_of
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.changes import check_initialised, follow_requires_grad
from fullshard.torch.unit.sites import clean_name
from fullshard.torch.unit.unit import owner_of

__all__ = ["Runtime", "runtime_of"]


class Runtime:
    """Runs the units below one root module.

    What moves units is collective: all ranks must run the same modules in the same order.
    """

    def __init__(self, units: Sequence[ManagedUnit], prefetch: Prefetch):
        self._running: list[ManagedUnit] = []  # units whose forward is running, outermost first
        self._events = 0
        self._forwards = 0  # of the root
        self._recomputed = 0  # the one that recomputations in this backward belong to
        self._reached: set[int] = set()  # forwards of the root whose backward has begun in this one
        self._in_backward = False
        # Run forward and not reduced yet, by their latest forward (a dict for its order).
        self._due: dict[ManagedUnit, None] = {}
        # Run backward without being due: an earlier one ended them.
        self._late: list[ManagedUnit] = []
        self._open: list[ManagedUnit] = []  # whose backward has begun and is not over
        self.wait_before_gather: Any = None  # an event of a stream that writes to the shards
        self.unresolved: list[str] = []  # tied parameters of which a unit owns but one use
        for number, managed in enumerate(units):
            managed.number = number
            managed.runtime = self
        self.execution = Execution(units, prefetch)

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
        runtime = cls(list(found), prefetch)
        runtime.unresolved = _used_outside_their_unit(root)
        owners = {id(param): managed for managed in found for param in managed.unit.sharded}
        for module in root.modules():
            managed = managed_unit_of(module)
            if managed is not None:
                managed.ends_with_backward |= _leads_to_others(module, owners)
        return runtime

    @property
    def idle(self) -> bool:
        """True between steps: nothing is gathered ahead, kept or under way."""
        return self.execution.idle

    @property
    def now(self) -> tuple[int, int]:
        """Which forward of the root is the latest, and the time within the step, in events."""
        return self._recomputed or self._forwards, self._events

    @property
    def prefetch(self) -> Prefetch:
        """How far ahead units are gathered."""
        return self.execution.prefetch

    def set_prefetch(self, prefetch: Prefetch) -> None:
        """Change how far ahead units are gathered; between steps only."""
        self.execution.set_prefetch(prefetch)

    # ---- forward --------------------------------------------------------------------------------

    def forward_begins(self, managed: ManagedUnit) -> None:
        """A unit's forward is about to run: gather it."""
        if managed.summoned:
            raise UsageError(
                f"unit {managed.unit.name!r} cannot run forward within summon_full_params, which "
                "shows its parameters to you; leave the context first"
            )
        if not self._running or managed.number == 0:
            self._begin_at_the_top()
        self._running.append(managed)
        managed.open_in_forward += 1
        self.execution.do(Moment.FORWARD_BEGIN, managed)
        self.execution.make_sure_of(managed)
        managed.unit.show_full()
        # Reentrant checkpointing runs a unit with gradients for the first time in backward.
        managed.counts = torch.is_grad_enabled() and not (
            self._in_backward and managed in self._due
        )
        if managed.counts:
            self._events += 1
            managed.last_begin = self._events
            if managed not in self._due:
                managed.first_begin = self._events
            self._due.pop(managed, None)
            self._due[managed] = None

    def enclosing_call(self, managed: ManagedUnit) -> Call | None:
        """The call of the unit inside whose forward ``managed`` runs now."""
        outer = [other for other in self._running if other is not managed]
        return outer[-1].current_call if outer else None

    def _begin_at_the_top(self) -> None:
        in_autograd = torch._C._current_graph_task_id() != -1
        if self._in_backward and in_autograd:
            return  # recomputation: it belongs to the step whose backward is running
        self._forwards += 1
        if self._running or self._in_backward:
            self.recover()
        self.execution.go_on(training=torch.is_grad_enabled())
        execution = self.execution
        if execution.is_endless() or (not execution.idle and execution.is_stale()):
            execution.finish_step()  # forwards without backward, or an optimizer's step since
        if execution.idle:
            self._between_steps()

    def _between_steps(self) -> None:
        """Take up what has changed since the last step."""
        if self.unresolved:
            raise UsageError(
                f"{', '.join(self.unresolved)}: used here, but tied to parameters that units have "
                "which do not contain this use, so it would not be trained; shard the nearest "
                "module that contains all uses, too, before the first forward"
            )
        changed = False
        for managed in self.execution.units:
            if managed.unit.unchecked:
                check_initialised(managed.unit)
            changed |= follow_requires_grad(managed.unit)
        if changed:
            self.set_prefetch(self.prefetch)
            self.execution.go_on(training=torch.is_grad_enabled())
        if self.wait_before_gather is not None:
            self.wait_before_gather.wait()

    def forward_ends(self, managed: ManagedUnit, *, unseen: bool = False) -> None:
        """A unit's forward has run: free it if the strategy says so.

        Not if its backward may come ``unseen``, since nobody would gather it again: it then stays
        full until the step ends.
        """
        while self._running[-1] is not managed:
            self._running[-1].end_forward()  # of its modules not all were called
        self._running.pop()
        managed.open_in_forward -= 1
        if not unseen:
            self.execution.do(Moment.FORWARD_END, managed)
        if not managed.open_in_forward and not managed.open_in_backward:
            managed.unit.show_sharded()
        if self.execution.evaluating:
            if not self._running:
                self.execution.finish_step()
        elif managed.counts or not self._in_backward:
            self._events += 1
            managed.last_end = self._events
            if not managed.calls:
                self._due.pop(managed, None)  # no output leads back to it

    def recover(self) -> None:
        """After an exception in mid-step: forget the step, gradients not delivered included."""
        for managed in self.execution.units:
            managed.forget_step()
        self.execution.finish_step()
        self._running.clear()
        self._in_backward = False
        self._due.clear()
        self._late.clear()
        self._open.clear()
        self._reached.clear()
        self._recomputed = 0

    # ---- backward -------------------------------------------------------------------------------

    def backward_begins(self, managed: ManagedUnit, call: Call) -> None:
        """A gradient has reached a unit's output: gather it again."""
        if not self._in_backward:
            self._enter_backward()
        managed.calls.add(call)
        self._reached.add(call.made_in)
        self._recomputed = call.made_in
        managed.unit.gradients.arrivals.expect()
        if managed.open_in_backward:
            managed.began_at = min(managed.began_at, call.began_at)
        else:
            managed.began_at = call.began_at
            if not managed.begun_in_backward:
                self._pass_over(after=managed.last_end)
            self._begin(managed)

    def _enter_backward(self) -> None:
        self._in_backward = True
        self.execution.go_on(training=True)
        Variable._execution_engine.queue_callback(self._backward_ends)

    def _begin(self, managed: ManagedUnit) -> None:
        managed.open_in_backward = managed.begun_in_backward = True
        self._open.append(managed)
        if managed not in self._due and managed not in self._late:
            self._late.append(managed)
        self.execution.do(Moment.BACKWARD_BEGIN, managed)
        if managed.unshard_in_backward:
            self.execution.make_sure_of(managed)
        managed.unit.show_full()

    def _pass_over(self, after: int) -> None:
        """Do for unused units what other ranks may do. See [Note: One order on all ranks]."""
        unused = [m for m in self._due_after(after) if not m.begun_in_backward]
        for managed in sorted(unused, key=lambda m: -m.last_end):
            if managed in self._due and not managed.begun_in_backward:
                self._begin(managed)
                self._end(managed, unused=True)

    def _due_after(self, begin: int) -> list[ManagedUnit]:
        """The units that are due and whose latest forward began after ``begin``, latest first."""
        found: list[ManagedUnit] = []
        for managed in reversed(self._due):
            if managed.last_begin <= begin:
                break
            found.append(managed)
        return found

    def gradient_arrives(self, managed: ManagedUnit, index: int, grad: Tensor) -> None:
        """A parameter has its gradient."""
        if not self._in_backward:
            self._enter_backward()
        unit, recorder = managed.unit, self.execution.recorder
        held = unit.transient_bytes if recorder else 0
        unit.deliver(index, grad)
        if recorder and unit.transient_bytes != held:
            recorder.note("fill", unit, self.execution.live_bytes)
        if managed not in self._due and managed not in self._late:
            self._late.append(managed)
        if not managed.awaits_inputs:
            self._end_what_is_over(managed)

    def inputs_are_done(self, managed: ManagedUnit, call: Call) -> None:
        """The gradients of a call's inputs are there."""
        managed.calls.discard(call)
        self._end_what_is_over(managed)

    def _end_what_is_over(self, managed: ManagedUnit) -> None:
        """End ``managed`` if it is over, and then the units that waited only for it."""
        if not self._is_over(managed):
            return
        self._end(managed)
        for other in sorted(self._open, key=self._turn) if self._open else ():
            if self._is_over(other):
                self._end_what_is_over(other)
                return

    def _turn(self, managed: ManagedUnit) -> tuple[bool, int]:
        """Sorts open units: those that are due come first, the latest forward before others."""
        if managed in self._due:
            return False, -managed.last_begin
        return True, -managed.began_at

    def _is_over(self, managed: ManagedUnit) -> bool:
        """See [Note: When a unit's backward is over] in `fullshard.torch.step.managed`."""
        if managed.ends_with_backward or not managed.open_in_backward:
            return False
        arrivals, calls = managed.unit.gradients.arrivals, self._calls_of(managed)
        for call in calls:
            if call.watched:
                return False
        if not (arrivals.all_here if calls else arrivals.expected_here):
            return False
        if managed in self._due:
            for later in self._due_after(managed.first_begin):
                if later is not managed and (later.open_in_backward or self._calls_of(later)):
                    return False
            return True
        return not any(self._began_later(m, managed) for m in self.execution.units)

    def _calls_of(self, managed: ManagedUnit) -> list[Call]:
        """Those calls that belong to forwards of the root whose backward this is."""
        return [call for call in managed.calls.alive() if call.made_in in self._reached]

    def _began_later(self, other: ManagedUnit, managed: ManagedUnit) -> bool:
        """True if ``other`` is not over, and what is left of it began after ``managed``."""
        if other.open_in_backward and other.began_at > managed.began_at:
            return True
        return any(call.began_at > managed.began_at for call in self._calls_of(other))

    def _end(self, managed: ManagedUnit, *, unused: bool = False) -> None:
        """A unit's backward is over, or has been passed over: free and reduce it."""
        if managed in self._due and not unused:
            self._pass_over(after=managed.first_begin)
        self._due.pop(managed, None)
        for call in [call for call in managed.calls.alive() if call.begun]:
            call.end()
            managed.calls.discard(call)
        if managed.open_in_backward:
            managed.open_in_backward = False
            self._open.remove(managed)
        if managed in self._late:
            self._late.remove(managed)
        managed.unit.gradients.arrivals.end_backward()
        managed.held_back = managed.unit.trainable and not managed.requires_gradient_sync
        self.execution.do(Moment.BACKWARD_END, managed)
        managed.unit.show_sharded()

    def _backward_ends(self) -> None:
        """Autograd has nothing left to do: reduce what is still due, free everything."""
        for managed in sorted(self._due, key=lambda m: -m.first_begin):
            if managed in self._due:
                if not managed.begun_in_backward:
                    self._begin(managed)
                self._end(managed)
        still_open = [managed for managed in self.execution.units if managed.open_in_backward]
        for managed in dict.fromkeys([*self._late, *still_open]):  # a copy: ending changes it
            self._end(managed)
        self._late.clear()
        self._reached.clear()
        self._recomputed = 0
        for managed in self.execution.units:
            managed.begun_in_backward = False
            if managed.held_back and managed.requires_gradient_sync:
                self._end(managed)  # this micro-batch did not use it, earlier ones did
        self.execution.finish_step()
        self._in_backward = False


def _used_outside_their_unit(root: nn.Module) -> list[str]:
    return [
        repr(clean_name(name))
        for name, param in root.named_parameters()
        if owner_of(param) is not None
    ]


def _leads_to_others(module: nn.Module, owners: Mapping[int, ManagedUnit]) -> bool:
    """True if a path through ``module`` may lead to parameters that no unit below it has.

    These are trainable ones of no unit, and those that are tied and so belong to a unit around it.
    """
    below = {managed_unit_of(each) for each in module.modules()}
    return any(
        owners.get(id(param)) not in below
        if isinstance(param, ShardedParameter)
        else param.requires_grad
        for param in module.parameters()
    )


def runtime_of(root: nn.Module) -> Runtime:
    """The runtime of ``root``, made with it as the root if it has none yet."""
    managed = managed_unit_of(root)
    if managed is not None and isinstance(managed.runtime, Runtime):
        return managed.runtime
    return Runtime.adopt(root)
