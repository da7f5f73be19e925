# SPDX-License-Identifier: Apache-2.0
"""The tracker: follows every forward and backward of the units below one root module.

Hooks tell it what happens; it tells the executor, which asks the schedule for ops.

[Note: One order on all ranks]
All ranks must issue their collectives in one order, even if one of them did not use a unit.
Autograd runs the backward of later forwards first; so when a unit's backward begins, a unit whose
forward began after that unit's was over, and whose backward has not begun, was not used. It is then
gathered and reduced with zeros, as the ranks that used it do; so are unused units inside a unit
when that unit's backward ends.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from fullshard.core.errors import UsageError
from fullshard.core.schedule import Moment
from fullshard.core.strategy import Prefetch
from fullshard.torch.step import paths
from fullshard.torch.step.calls import Call
from fullshard.torch.step.executor import Executor
from fullshard.torch.step.managed import ManagedUnit, managed_unit_of, managed_units
from fullshard.torch.step.profiling import UnitMarks, profiler_runs
from fullshard.torch.step.refusals import Ending, check_backward
from fullshard.torch.step.unit_step import Phase
from fullshard.torch.step.usage import settle_usage
from fullshard.torch.unit.changes import check_initialised, follow_requires_grad, take_over
from fullshard.torch.unit.guards.lent import refuse_transforms
from fullshard.torch.unit.guards.replicas import check_replicas
from fullshard.torch.unit.sites import clean_name

__all__ = ["Tracker", "ensure_tracker", "tracker_of"]


class Tracker:
    """Runs the units below one root module.

    Forward and backward are collective: all ranks must run the same modules in the same order.
    """

    def __init__(self, units: Sequence[ManagedUnit], prefetch: Prefetch):
        self._running: list[ManagedUnit] = []  # units whose forward is running, outermost first
        self._events = 0
        self._forwards = 0  # of the root
        self._recomputed = 0  # the one that recomputations in this backward belong to
        self._reached: set[int] = set()  # forwards of the root whose backward has begun in this one
        self._in_backward = False
        self._ending: Callable[[], Ending | None] = lambda: None
        # Units that are due, or were, with a call to come, by their latest forward; and those that
        # backward has reached or given a gradient, by when that was (dicts for their order).
        self._due: dict[ManagedUnit, None] = {}
        self._active: dict[ManagedUnit, None] = {}
        self._marks = UnitMarks()
        self.wait_before_gather: Any = None  # an event of a stream that writes to the shards
        self.unchecked = True  # no step has begun for which replicas were compared
        self.unresolved: list[str] = []  # tied parameters of which a unit owns but one use
        for number, managed in enumerate(units):
            managed.number = number
            managed.tracker = self
        self.structure: Callable[[], paths.Structure | None] = lambda: None
        self.executor = Executor(units, prefetch)

    @classmethod
    def adopt(cls, root: nn.Module) -> "Tracker":
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
            if managed.tracker is not None:
                prefetch = managed.tracker.prefetch
                if not managed.tracker.idle:
                    raise UsageError(
                        f"unit {managed.unit.name!r} is in the middle of a step of its own; finish "
                        "its backward before it becomes part of a larger model"
                    )
            managed.unit.rename(path)
        tracker = cls(list(found), prefetch)
        tracker.structure = weakref.ref(paths.Structure(root, tracker._running))
        tracker._look_at_uses(root)
        return tracker

    def _look_at_uses(self, root: nn.Module) -> None:
        """Look where modules below ``root`` use the parameters of units."""
        units = self.executor.units
        owners = {id(param): managed for managed in units for param in managed.unit.sharded}
        self.unresolved = paths.used_outside_their_unit(root, owners)
        paths.follow_holders(root, owners)
        for module in root.modules():
            managed = managed_unit_of(module)
            if managed is not None:
                managed.ends_with_backward |= paths.leads_to_others(module, owners)

    def _before_first_step(self) -> None:
        """Take up what users have tied since the model was sharded."""
        structure = self.structure()
        root = None if structure is None else structure.root
        if root is not None and paths.make_ties(root):
            for managed in self.executor.units:
                name = managed.unit.name
                managed.unit.rename("" if name == "(root)" else name)
            self._look_at_uses(root)
            self.set_prefetch(self.prefetch)

    @property
    def idle(self) -> bool:
        """True between steps: nothing is gathered ahead, kept or in flight."""
        return self.executor.idle

    @property
    def prefetch(self) -> Prefetch:
        """The depth to which units are gathered ahead."""
        return self.executor.prefetch

    def set_prefetch(self, prefetch: Prefetch) -> None:
        """Change how far ahead units are gathered; between steps only."""
        self.executor.set_prefetch(prefetch)

    # ---- forward --------------------------------------------------------------------------------

    def forward_begins(self, managed: ManagedUnit) -> Call | None:
        """A unit's forward is about to run: gather it."""
        if managed.summoned:
            raise UsageError(
                f"unit {managed.unit.name!r} cannot run forward within summon_full_params, which "
                "shows its parameters to you; leave the context first"
            )
        refuse_transforms(managed.unit.name)
        if self.unchecked and not self._running:
            self._before_first_step()
        if managed.unit.on_meta:
            take_over(managed.unit)
        managed.unit.check_shown()
        if not self._running or managed.number == 0:
            self._begin_at_the_top()
        self._running.append(managed)
        unit, step = managed.unit, managed.step
        step.running += 1
        self.executor.do(Moment.FORWARD_BEGIN, managed)
        unit.begin_forward()
        # Reentrant checkpointing runs a unit with gradients for the first time in backward.
        step.counts = torch.is_grad_enabled() and not (self._in_backward and step.phase.due)
        if step.counts:
            self._events += 1
            step.run_forward(self._events)
            self._due.pop(managed, None)
            self._due[managed] = None
        if profiler_runs():
            self._marks.begin("forward", unit)
        return self.new_call(managed) if torch.is_grad_enabled() else None

    def new_call(self, managed: ManagedUnit) -> Call:
        """The unit's forward that runs already, as a call whose backward may come."""
        outer = [other for other in self._running if other is not managed]
        made_in = self._recomputed or self._forwards
        call = Call(managed, outer[-1].call if outer else None, (made_in, self._events))
        call.version = managed.unit.full.at_rest._version
        return call

    def _begin_at_the_top(self) -> None:
        in_autograd = torch._C._current_graph_task_id() != -1
        if self._in_backward and in_autograd:
            return  # recomputation: it belongs to the step whose backward is running
        self._forwards += 1
        if self._running or self._in_backward:
            self.recover()
        structure = self.structure()
        if structure is not None:
            structure.check()
        training = torch.is_grad_enabled()
        if self.executor.begin(training=training):
            if torch.is_inference_mode_enabled():  # what is made now is for training, too
                with torch.inference_mode(False):
                    self._between_steps(training)
            else:
                self._between_steps(training)

    def _between_steps(self, training: bool) -> None:
        """Adopt the changes that users have made since the last step."""
        if self.unresolved:
            raise UsageError(
                f"{', '.join(self.unresolved)}: used here, but tied to parameters that units have "
                "which do not contain this use, so it would not be trained; shard the nearest "
                "module that contains all uses, too, before the first forward"
            )
        changed = False
        for managed in self.executor.units:
            if managed.unit.unchecked:
                check_initialised(managed.unit)
            if managed.unit.shards.toggled:
                managed.unit.check_shown()
                changed |= follow_requires_grad(managed.unit)
        if changed:
            self.set_prefetch(self.prefetch)
            self.executor.go_on(training=training)
        if self.unchecked:
            check_replicas([managed.unit for managed in self.executor.units])
            self.unchecked = False
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
        step = managed.step
        step.running -= 1
        if self._marks.open:
            self._marks.end("forward", managed.unit)
        if not step.running:
            managed.unit.end_forward(show_sharded=not step.phase.open)
        if not unseen:
            self.executor.do(Moment.FORWARD_END, managed)
        if self.executor.evaluating:
            if not self._running:
                self.executor.finish_step()
        elif step.counts or not self._in_backward:
            self._events += 1
            step.last_end = self._events
            if not (managed.call is not None and managed.call.leads_back) and not step.calls():
                self._lose_outputs(managed)

    def runs_alone(self, managed: ManagedUnit) -> bool:
        """True if no other unit's forward runs: its modules are called by themselves then."""
        return len(self._running) == 1 and self._running[0] is managed

    def _lose_outputs(self, managed: ManagedUnit) -> None:
        """No output of the unit leads back to it: do not wait for its backward."""
        managed.step.move("lose its outputs")
        self._due.pop(managed, None)

    def recover(self) -> None:
        """Forget a step that an exception has cut short, with the gradients not delivered yet."""
        for managed in self.executor.units:
            managed.forget_step()
        self.executor.finish_step()
        self._in_backward = False
        for noted in (self._running, self._due, self._active, self._reached):
            noted.clear()
        self._recomputed = 0
        self._marks.forget()

    # ---- backward -------------------------------------------------------------------------------

    def backward_begins(self, managed: ManagedUnit, call: Call) -> None:
        """A gradient has reached a unit's output: gather it again."""
        failed = self._in_backward and self._ending() is None
        changed = call.version != managed.unit.full.at_rest._version
        if failed or changed or torch.is_grad_enabled():
            check_backward(managed, call, failed=failed)
        if not self._in_backward:
            self._enter_backward()
        self._reached.add(call.made_in)
        self._recomputed = call.made_in
        if managed.step.reach(call):
            if not managed.step.begun:
                self._pass_over(after=managed.step.last_end)
            self._begin(managed)

    def _enter_backward(self) -> None:
        self._in_backward = True
        self.executor.go_on(training=True)
        ending = Ending(self._backward_ends)
        self._ending = ending.reference()
        Variable._execution_engine.queue_callback(ending)

    def _begin(self, managed: ManagedUnit) -> None:
        unit = managed.unit
        managed.step.begin_backward()
        self._active[managed] = None
        if profiler_runs():
            self._marks.begin("backward", unit)
        self.executor.do(Moment.BACKWARD_BEGIN, managed)
        if managed.unshard_in_backward:
            unit.use()

    def _pass_over(self, after: int) -> None:
        """Gather and reduce unused units as others may. See [Note: One order on all ranks]."""
        unused = [m for m in self._due_after(after) if not m.step.begun]
        for managed in sorted(unused, key=lambda m: -m.step.last_end):
            if managed.step.phase.due and not managed.step.begun:
                self._begin(managed)
                self._end(managed, unused=True)

    def _due_after(self, begin: int) -> list[ManagedUnit]:
        """The units that are due and whose latest forward began after ``begin``, latest first."""
        found: list[ManagedUnit] = []
        for managed in reversed(self._due):
            if managed.step.last_begin <= begin:
                break
            found.append(managed)
        return found

    def gradient_arrives(self, managed: ManagedUnit, index: int, grad: Tensor) -> None:
        """A parameter has its gradient."""
        if not self._in_backward:
            self._enter_backward()
        unit, recorder = managed.unit, self.executor.recorder
        held = unit.transient_bytes if recorder else 0
        unit.deliver(index, grad)
        if recorder and unit.transient_bytes != held:
            recorder.note("fill", unit, self.executor.live_bytes)
        step = managed.step
        if step.phase is Phase.AT_REST:
            step.move("take a gradient")
            self._active[managed] = None
        call = step.last_begun()
        if call is not None and call.begun and call.watched:
            return  # it is not over: gradients of inputs will come
        if step.phase.open:
            self._end_what_is_over(managed)

    def inputs_are_done(self, managed: ManagedUnit, call: Call) -> None:
        """The gradients of a call's inputs are there."""
        managed.step.forget_call(call)
        self._end_what_is_over(managed)

    def _end_what_is_over(self, managed: ManagedUnit) -> None:
        """End the backward of ``managed`` if it is over, then of the units that waited for it."""
        if not self._is_over(managed):
            return
        self._end(managed)
        still_open = [other for other in self._active if other.step.phase.open]
        for other in sorted(still_open, key=_turn):
            if self._is_over(other):
                self._end_what_is_over(other)
                return

    def _is_over(self, managed: ManagedUnit) -> bool:
        """See [Note: When a unit's backward is over] in `fullshard.torch.step.managed`."""
        step = managed.step
        if managed.ends_with_backward or not step.phase.open:
            return False
        if not step.has_all_gradients(self._reached):
            return False
        if step.phase.due:
            for later in self._due_after(step.first_begin):
                if later is not managed and (
                    later.step.phase.open or later.step.calls(self._reached)
                ):
                    return False
            return True
        return not any(self._began_later(m, managed) for m in self.executor.units)

    def _began_later(self, other: ManagedUnit, managed: ManagedUnit) -> bool:
        """True if ``other`` is not over, and what is left of it began after ``managed``."""
        if other.step.phase.open and other.step.began_at > managed.step.began_at:
            return True
        calls = other.step.calls(self._reached)
        return any(call.began_at > managed.step.began_at for call in calls)

    def _end(self, managed: ManagedUnit, *, unused: bool = False) -> None:
        """A unit's backward is over, or has been passed over: free and reduce it."""
        step = managed.step
        if step.phase.due and not unused:
            self._pass_over(after=step.first_begin)
        if step.end_backward(self._reached):  # else units around it wait for an earlier call
            self._due.pop(managed, None)
        self._active.pop(managed, None)
        step.held_back = managed.unit.trainable and not managed.requires_gradient_sync
        self.executor.do(Moment.BACKWARD_END, managed)
        managed.unit.show_sharded()
        if self._marks.open:
            self._marks.end("backward", managed.unit)

    def _backward_ends(self) -> None:
        """Autograd has nothing left to do: reduce what is still due, free everything."""
        for managed in sorted(self._due, key=lambda m: -m.step.first_begin):
            if managed.step.phase.due:
                if not managed.step.begun:
                    self._begin(managed)
                self._end(managed)
        for managed in list(self._active):
            self._end(managed)
        self._due.clear()
        self._reached.clear()
        self._recomputed = 0
        for managed in self.executor.units:
            managed.step.begun = False
            if managed.step.held_back and managed.requires_gradient_sync:
                self._end(managed)  # this micro-batch did not use it, earlier ones did
        self.executor.finish_step()
        self._in_backward = False
        if self.executor.is_last_backward:  # else reduces may be in flight
            settle_usage(self.executor.units)


def _turn(managed: ManagedUnit) -> tuple[bool, int]:
    """Sorts open units: those that are due come first, the latest forward before others."""
    step = managed.step
    return (False, -step.last_begin) if step.phase.due else (True, -step.began_at)


def tracker_of(module: nn.Module) -> Tracker | None:
    """Return what tracks the steps of the units of ``module`` and below; nothing is changed.

    None before the first step of these units, and if parts of ``module`` have steps of their own.

    Raises:
        UsageError: if ``module`` holds no unit.
    """
    found = {managed.tracker for managed in managed_units(module)}
    if not found:
        raise UsageError(f"{type(module).__name__} holds no sharded unit; shard it first")
    tracker = found.pop() if len(found) == 1 else None
    return tracker if isinstance(tracker, Tracker) else None


def ensure_tracker(root: nn.Module) -> Tracker:
    """Return `tracker_of` ``root``, or make ``root`` the root of its units if they have none."""
    return tracker_of(root) or Tracker.adopt(root)
