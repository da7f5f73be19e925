# SPDX-License-Identifier: Apache-2.0
"""The tracker: follows every forward and backward of the units below one root module.

Hooks tell it what happens, a `fullshard.core.schedule.step.StepMachine` which events that makes,
and the executor carries out the ops that the schedule asks for then.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from fullshard.core.errors import UsageError
from fullshard.core.schedule import Event, Moment
from fullshard.core.schedule.step import StepMachine
from fullshard.core.strategy import Prefetch
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.step import paths
from fullshard.torch.step.calls import WatchedCall, check_backward
from fullshard.torch.step.checkpoints import is_recomputation
from fullshard.torch.step.executor import Executor
from fullshard.torch.step.managed import ManagedUnit, managed_unit_of, managed_units
from fullshard.torch.step.optional import OptionalUnits, optional_units, reachable
from fullshard.torch.step.profiling import UnitMarks
from fullshard.torch.step.structures import map_tensors, tensors_with_gradients
from fullshard.torch.step.usage import settle_usage
from fullshard.torch.unit.changes import check_initialised, follow_requires_grad, take_over
from fullshard.torch.unit.guards.lent import refuse_transform
from fullshard.torch.unit.guards.replicas import check_replicas
from fullshard.torch.unit.guards.sources import check_sources
from fullshard.torch.unit.sites import clean_name
from fullshard.torch.unit.unit import Unit

# Members of an Enum are slow to look up.
_BACKWARD_BEGIN, _BACKWARD_END = Moment.BACKWARD_BEGIN, Moment.BACKWARD_END
_STEP_END = Moment.STEP_END
_graph_task = torch._C._current_graph_task_id
_forwards = count(1)
_roots_in_backward: "dict[int, list[Tracker]]" = {}
"""Those with optional parts, by graph task, as backward has come to them."""


class Tracker:
    """Runs the units below one root module.

    Forward and backward are collective: all ranks must run the same modules in the same order.
    """

    def __init__(self, units: Sequence[ManagedUnit], prefetch: Prefetch):
        self._machine = StepMachine([managed.step for managed in units])
        self._running = self._machine.running
        # From the first event of a backward until all is carried out that its end asks for.
        self._in_backward = False
        self._ending: Callable[[], Callable[[], None] | None] = lambda: None
        self._taking: dict[ManagedUnit, None] = {}
        self._marks = UnitMarks()
        self.wait_before_gather: Any = None  # an event of a stream that writes to the shards
        # in the middle of a step: schedules are made anew after it
        self.settings_changed: bool = False
        self.unchecked: bool = True  # no step has begun for which replicas were compared
        self.unresolved: list[str] = []  # tied parameters of which a unit owns but one use
        for number, managed in enumerate(units):
            managed.number = number
            managed.tracker = self
        self.structure: Callable[[], paths.Structure | None] = lambda: None
        self.executor: Executor = Executor(units, prefetch)
        self.optional: OptionalUnits | None = None
        self._thread = 0  # that runs, or ran last, a forward from the top
        self._forward_at = 0  # of all forwards of roots, the number of this one's latest
        self._backward = -1  # the graph task for which `_roots_in_backward` has this one

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
        check_sources([managed.unit for managed in found])
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
                managed.step.ends_with_backward |= paths.leads_to_others(module, owners)
        self.optional = optional_units(root, self._machine, self.executor)

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
        self.forget_if_cut_short()
        return self.executor.idle

    @property
    def prefetch(self) -> Prefetch:
        """The depth to which units are gathered ahead."""
        return self.executor.prefetch

    def set_prefetch(self, prefetch: Prefetch) -> None:
        """Change how far ahead units are gathered; between steps only."""
        structure = self.structure()
        if structure is not None and structure.root is not None:
            self.optional = optional_units(structure.root, self._machine, self.executor)
        self.executor.set_prefetch(prefetch)

    # ---- forward --------------------------------------------------------------------------------

    def forward_begins(self, managed: ManagedUnit) -> None:
        """A unit's forward is about to run: gather it."""
        unit, step, executor = managed.unit, managed.step, self.executor
        if torch._C._functorch.peek_interpreter_stack() is not None:
            refuse_transform(unit.name)
        if self.unchecked and not self._running:
            self._before_first_step()
        if unit.on_meta:
            take_over(unit)
        unit.check_shown()
        if not self._running or managed.number == 0:
            self._begin_at_the_top()
        with_grad = torch.is_grad_enabled()
        if self.optional is not None:
            task = _graph_task()
            recomputing = self._in_backward and task != -1
            if recomputing and not self._running:
                self._carry_out(self._machine.runs_again(step, task))
            self.optional.before(managed, recomputing=recomputing)
        again = with_grad and self._in_backward and is_recomputation()
        may_come = with_grad or (step.partial and not executor.evaluating)
        awaited = may_come and not again
        executor.do(self._machine.forward_begins(step, with_grad=awaited))
        unit.begin_forward()
        if executor.profiled:
            self._marks.begin("forward", unit)
        for recorder in executor.recorders:
            recorder.begins("forward", unit)
        if with_grad and not again:
            self.new_call(managed)

    def new_call(self, managed: ManagedUnit) -> None:
        """The backward of the unit's forward that runs already may come."""
        if self._in_backward and is_recomputation():
            return
        call = self._machine.new_call(managed.step, WatchedCall)
        call.managed, call.version = managed, managed.unit.full.at_rest._version
        call.first_node = torch._C._autograd._get_sequence_nr()

    def _begin_at_the_top(self) -> None:
        in_autograd = _graph_task() != -1
        if self._in_backward and in_autograd:
            return  # recomputation: it belongs to the step whose backward is running
        self._machine.root_begins()
        self._thread = get_ident()
        self._forward_at = next(_forwards)
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
        self.executor.note_shards()

    def _between_steps(self, training: bool) -> None:
        """Adopt the changes that users have made since the last step."""
        if self.unresolved:
            raise UsageError(
                f"{', '.join(self.unresolved)}: used here, but tied to parameters that units have "
                "which do not contain this use, so it would not be trained; shard the nearest "
                "module that contains all uses, too, before the first forward"
            )
        changed, self.settings_changed = self.settings_changed, False
        for managed in self.executor.units:
            if managed.unit.unchecked:
                check_initialised(managed.unit)
            # A forward without gradients asks nobody what is trained. Libraries run a reference's
            # adapter so, with another frozen meanwhile whose backward is still to come.
            if training and managed.unit.shards.toggled:
                managed.unit.check_shown()
                changed |= follow_requires_grad(managed.unit)
        if changed:
            self.set_prefetch(self.prefetch)
            self.executor.go_on(training=training)
        if self.unchecked:
            units = [managed.unit for managed in self.executor.units]
            check_replicas(units)
            models: dict[Comm, str] = {}
            for unit in units:
                if unit.ranks.gather not in models:
                    models[unit.ranks.gather] = unit.ranks.add_model()
                unit.belong_to(models[unit.ranks.gather])
            self.unchecked = False
        if self.wait_before_gather is not None:
            self.wait_before_gather.wait()

    def forward_ends(self, managed: ManagedUnit, *, unseen: bool = False) -> None:
        """A unit's forward has run: free it if the strategy says so.

        Not if its backward may come ``unseen``, since nobody would gather it again: it then stays
        full until the step ends.
        """
        unit, step, executor = managed.unit, managed.step, self.executor
        while self._running[-1] is not step:
            inner = executor.references[self._running[-1].number]()
            assert inner is not None
            inner.end_forward()  # of its modules not all were called
        event = self._machine.forward_ends(step, training=not executor.evaluating)
        if self._marks.open:
            self._marks.end("forward", unit)
        for recorder in executor.recorders:
            recorder.ends("forward", unit)
        if not step.running:
            unit.end_forward(show_sharded=not step.phase.open)
        if not unseen:
            executor.do(event)
        if executor.evaluating and not self._running:
            executor.finish_step()

    def before_end(self, managed: ManagedUnit, output: Any) -> Any:
        """A unit's forward will end: take part in what other ranks still run inside it.

        Returns the ``output``, or one that backward can begin at if on other ranks it will.
        """
        assert self.optional is not None
        self.optional.before_end(managed)
        if managed.number or self._in_backward or self.executor.evaluating:
            return output
        if not self.optional.settle(self.executor.units) or tensors_with_gradients(output):
            return output
        return map_tensors(output, reachable())

    def runs_alone(self, managed: ManagedUnit) -> bool:
        """True if no other unit's forward runs: its modules are called by themselves then."""
        return len(self._running) == 1 and self._running[0] is managed.step

    def recover(self) -> None:
        """Forget a step that an exception has cut short, with the gradients not delivered yet."""
        self._taking.clear()
        for managed in self.executor.units:
            managed.forget_step()
        self.executor.finish_step()
        self._machine.forget()
        _roots_in_backward.pop(self._backward, None)
        self._in_backward = False
        self._marks.forget()
        for recorder in self.executor.recorders:
            recorder.forget()

    def forget_if_cut_short(self, beginning: ManagedUnit | None = None) -> None:
        """Forget a forward that is over without a word: torch tells hooks of no KeyboardInterrupt.

        So it is if its outermost module is on the stack of its thread no more, but for a call of
        ``beginning`` that begins now.
        """
        if not self._running or self._thread != get_ident():
            return
        outermost = self.executor.references[self._running[0].number]()
        if outermost is not None and outermost.calls_on_stack() == int(outermost is beginning):
            self.recover()

    # ---- backward -------------------------------------------------------------------------------

    def output_has_gradient(self, call: WatchedCall) -> None:
        """A gradient has reached an output of a call: gather its unit again."""
        task = _graph_task()
        for begun in self._machine.begun_by(call, task):
            failed = self._in_backward and self._ending() is None
            changed = begun.version != begun.managed.unit.full.at_rest._version
            if failed or changed or torch.is_grad_enabled():
                check_backward(begun, failed=failed)
            if not self._in_backward:
                self._enter_backward()
            if begun.weights is not None and self.optional is not None:
                self.optional.weigh(begun.weights)
            self._carry_out(self._machine.call_begins(begun, task))
            if begun.watched and self.optional is None and not self.executor.fill_recorders:
                self._taking[begun.managed] = None
                begun.managed.take_gradients(task)
            if begun.recomputed is not None and self.optional is not None:
                self.optional.recompute(begun)

    def _enter_backward(self) -> None:
        if _roots_in_backward or self.optional is not None:
            self._take_turns()
        self._in_backward = True
        for recorder in self.executor.recorders:
            recorder.begins("backward", None)
        self.executor.go_on(training=True)

        # Autograd runs it at the end of the backward, and forgets it if that fails.
        ending = partial(self._backward_ends)
        self._ending = weakref.ref(ending)
        Variable._execution_engine.queue_callback(ending)

    def _take_turns(self) -> None:
        """End roots with optional parts whose forward came later: autograd is done with them.

        Ranks that left out their first units would else come to those when autograd has ended.
        """
        task = _graph_task()
        for other in _roots_in_backward.get(task, ()):
            if other._forward_at > self._forward_at:
                other._end_rest(task)
        if self.optional is not None:
            self.optional.begin_backward()
            self._backward = task
            _roots_in_backward.setdefault(task, []).append(self)

    def _end_rest(self, task: int) -> None:
        if self._machine.may_be_over:
            self._carry_out(self._machine.rest_is_over(task))

    def gradient_arrives(self, managed: ManagedUnit, index: int, grad: Tensor) -> None:
        """A parameter has its gradient."""
        if not self._in_backward:
            self._enter_backward()
        if self.optional is not None:
            grad = self.optional.weighed(managed, grad)
        if self.executor.fill_recorders:
            self._deliver_in_sight(managed.unit, index, grad)
        else:
            managed.unit.deliver(index, grad)
        events = self._machine.gradient_arrives(managed.step, index, _graph_task())
        if events:
            self._carry_out(events)

    def _deliver_in_sight(self, unit: Unit, index: int, grad: Tensor) -> None:
        before = unit.transient_bytes
        unit.deliver(index, grad)
        if unit.transient_bytes != before:
            for recorder in self.executor.fill_recorders:
                recorder.note("fill", unit, now := recorder.mark(), now)

    def input_has_gradient(self, call: WatchedCall) -> None:
        """The gradient of an input of a call is there."""
        if self._taking.pop(call.managed, self) is None:
            call.managed.note_gradients()
        events = self._machine.input_arrives(call, _graph_task())
        if events:
            self._carry_out(events)

    def _backward_ends(self) -> None:
        """Autograd has nothing left to do: reduce what is still due, free everything."""
        task = _graph_task()
        for managed in self._taking:
            managed.note_gradients()
        self._taking.clear()
        for root in _roots_in_backward.pop(self._backward, ()):
            root._end_rest(task)  # before ranks ask what this one has used
        self._carry_out(self._machine.backward_ends(task))
        self._in_backward = False
        if self.executor.is_last_backward:  # else reduces may be in flight
            settle_usage(self.executor.units)
        for recorder in self.executor.recorders:
            recorder.ends("backward", None)

    def reduce_what_waits(self) -> None:
        """Reduce gradients that backwards without communication have left. Collective.

        Of units that reduce now. Raises `UsageError` in the middle of a forward or backward.
        """
        if self._running or self._in_backward:
            raise UsageError(
                "gradients can be synchronized between backwards, not in the middle of one, nor of "
                "a forward"
            )
        self.executor.go_on(training=True)
        self._backward_ends()

    def _carry_out(self, events: Sequence[Event]) -> None:
        executor = self.executor
        for event in events:
            moment, number = event
            if moment is _STEP_END:
                executor.finish_step()
                return
            managed = executor.references[number]()
            if managed is None:
                continue
            unit = managed.unit
            if moment is _BACKWARD_END:
                for recorder in executor.recorders:
                    recorder.ends("backward", unit)
                executor.do(event)
                unit.show_sharded()
                if self._marks.open:
                    self._marks.end("backward", unit)
            elif moment is _BACKWARD_BEGIN:
                if executor.profiled:
                    self._marks.begin("backward", unit)
                executor.do(event)
                if managed.unshard_in_backward:
                    unit.use()
                for recorder in executor.recorders:
                    recorder.begins("backward", unit)
            else:
                assert self.optional is not None
                self.optional.follow_recomputation(managed, moment)


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
