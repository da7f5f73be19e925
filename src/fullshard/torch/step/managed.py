# SPDX-License-Identifier: Apache-2.0
"""A unit among its modules: the hooks that watch forward and backward, and tell the tracker."""

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack

from fullshard.core.errors import CommunicationError, UsageError
from fullshard.core.schedule.unit_step import UnitStep
from fullshard.core.strategy import Prefetch
from fullshard.torch.step.arrivals import Arrivals
from fullshard.torch.step.checkpoints import counts_operations, is_early_stop, uncounted
from fullshard.torch.step.structures import (
    WATCHED,
    AttributePlace,
    Swaps,
    attributes_with_gradients,
    map_tensors,
    outputs_with_gradients,
    tensors_with_gradients,
)
from fullshard.torch.unit.buffers import dtype_of
from fullshard.torch.unit.plan import Plan
from fullshard.torch.unit.sites import ParamSites
from fullshard.torch.unit.unit import Unit

_ATTRIBUTE = "_fullshard_unit"
_NONE = -2  # the number of no graph task


class StepWatcher(Protocol):
    """The listener to what happens to units: `fullshard.torch.step.tracker.Tracker`."""

    settings_changed: bool
    """True if schedules are to be made anew when the step has ended."""

    optional: Any
    """Asks other ranks about optional units, if there are some; else None."""

    @property
    def prefetch(self) -> Prefetch:
        """The depth to which units are gathered ahead."""

    @property
    def idle(self) -> bool:
        """True between steps."""

    def forget_if_cut_short(self, beginning: "ManagedUnit | None" = None) -> None:
        """Forget a forward that a KeyboardInterrupt has ended."""

    def set_prefetch(self, prefetch: Prefetch) -> None:
        """Make new schedules."""

    def forward_begins(self, managed: "ManagedUnit") -> None:
        """A unit's forward is about to run."""

    def new_call(self, managed: "ManagedUnit") -> None:
        """The backward of the unit's forward that runs already may come."""

    def forward_ends(self, managed: "ManagedUnit", *, unseen: bool = False) -> None:
        """A unit's forward has run; ``unseen``: its backward may come without notice."""

    # Any: a call, which knows its unit, and so this file.

    def output_has_gradient(self, call: Any) -> None:
        """A gradient has reached an output of a call of a unit."""

    def input_has_gradient(self, call: Any) -> None:
        """The gradient of an input of a call of a unit is there."""

    def gradient_arrives(self, managed: "ManagedUnit", index: int, grad: Tensor) -> None:
        """A parameter has its gradient, or a part of it."""

    def before_end(self, managed: "ManagedUnit", output: Any) -> Any:
        """A unit's forward will end; returns its output, changed if need be."""

    def runs_alone(self, managed: "ManagedUnit") -> bool:
        """True if no other unit's forward runs, which would call all modules of the unit."""


class ManagedUnit:
    """A unit with its place among the modules and in the step; owns the modules' hooks."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        params: Sequence[ParamSites],
        plan: Plan,
        adopt: Callable[[nn.Module], StepWatcher],
    ):
        arrivals = Arrivals(weakref.ref(self))
        self.step: UnitStep = UnitStep(arrivals.watched, arrivals.absent)
        self.unit: Unit = Unit(type(modules[0]).__name__, params, plan, arrivals)
        # What `change` may change; the units of lists are gathered when this one begins.
        self.reshard_after_forward: bool | None = plan.reshard_after_forward
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.prefetch_forward: list[ManagedUnit] | None = None
        self.prefetch_backward: list[ManagedUnit] | None = None
        # How often this rank runs it in a forward of the unit around, if it has said so.
        self.declared_runs: float = math.inf
        self.mean_over: str = "ranks"  # what the gradient of an optional unit is: or "users"
        self.summoned = False  # modules show full parameters that are not the unit's own
        self.parts: list[ManagedUnit] = []  # on a mesh of their own, which it was sharded with
        self.number = -1
        self.tracker: StepWatcher | None = None
        self._adopt = adopt  # makes a tracker, with the module that runs first as its root
        # See `take_gradients`: a graph task, and the parameters whose gradients have come.
        self.takes_of: int = _NONE
        self.came: list[int] = []
        self._modules_to_run = len(modules)
        self._modules_run = 0
        self._unseen = False  # the output is of a class that tensors cannot be found in
        self._inside_itself = 0  # how deep a module has called itself
        self._handled_outside = 0
        # Attributes in which a module's first forward has left tensors, as auxiliary losses are.
        self._features: dict[int, list[AttributePlace]] = {}  # by the module's id
        self._swapped: list[
            Swaps | None
        ] = []  # in the arguments of forwards that run, innermost last
        for module in modules:
            module.__dict__[_ATTRIBUTE] = self
            # What they do is not for graphs: a compiled module's forward is one without them.
            before = torch.compiler.disable(self._before_forward)  # type: ignore[no-untyped-call]
            after = torch.compiler.disable(self._after_forward)  # type: ignore[no-untyped-call]
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            # Also after an exception: checkpointing ends a recomputation early by raising one.
            module.register_forward_hook(after, always_call=True)

    @property
    def runs_forward(self) -> bool:
        """True while one of the unit's modules runs forward."""
        if self._modules_run and self.tracker is not None:
            self.tracker.forget_if_cut_short()
        return self._modules_run > 0

    @property
    def in_step(self) -> bool:
        """True in the middle of a step, of this unit or of others below the same root."""
        return self.tracker is not None and not self.tracker.idle

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if _len_torch_dispatch_stack() and counts_operations():
            with uncounted():
                return self._before_forward(module, args, kwargs)
        inside = self._modules_run == self._modules_to_run
        if inside and self.tracker is not None:
            self.tracker.forget_if_cut_short(self)
            inside = self._modules_run == self._modules_to_run
        if inside or self.summoned:
            if not inside:
                self._check_runs_as_shown()
            self._inside_itself += 1
            return None
        self._handled_outside = id(sys.exception())  # forward may run in an except clause
        tracker = self.tracker or self._adopt(module)
        if self._modules_run == 0:
            tracker.forward_begins(self)
        changed = given = (args, kwargs)
        self._swapped.append(None)
        convert = self._input_conversion
        if convert is not None:
            changed = self._swap(changed, convert)
        if torch.is_grad_enabled():
            if self.step.call is None:
                tracker.new_call(self)
            call = self.step.call  # None in what a checkpoint runs again
            args, kwargs = changed
            alone = args[0] if len(args) == 1 and not kwargs else changed  # as most are
            inputs = tensors_with_gradients(alone) if call is not None else ()
            if inputs:
                if any(WATCHED in tensor.__dict__ for tensor in inputs):
                    changed = self._swap(changed, _own_views())
                    inputs = tensors_with_gradients(changed)
                call.watch_inputs(inputs)
        self._modules_run += 1
        return None if changed is given else changed

    def _check_runs_as_shown(self) -> None:
        """Raise unless forward may compute with what `summon_full_params` shows, as a plain one."""
        shown = zip(self.unit.params, self.unit.sharded, strict=True)
        if torch.is_grad_enabled() or any(each.shown is sharded for each, sharded in shown):
            raise UsageError(
                f"unit {self.unit.name!r} cannot run forward within summon_full_params with "
                "gradients, or on a rank that does not see its parameters: run it under "
                "torch.no_grad(), or leave the context first"
            )

    def _swap(self, given: tuple[Any, Any], change: Callable[[Tensor], Tensor]) -> Any:
        """``given`` (args, kwargs) with tensors replaced until the forward ends; or itself."""
        args, kwargs = given
        swaps = self._swapped[-1] = self._swapped[-1] or Swaps()
        new_args = swaps.swap(args, change)
        # The dict of keyword arguments is the call's own.
        new_kwargs = {key: swaps.swap(value, change) for key, value in kwargs.items()}
        if new_args is args and all(new_kwargs[key] is kwargs[key] for key in kwargs):
            return given
        return new_args, new_kwargs

    @property
    def _input_conversion(self) -> Callable[[Tensor], Tensor] | None:
        """The conversion of inputs: a cast, and for the root a copy to the device; or None."""
        precision, is_root = self.unit.plan.precision, self.number == 0
        if not is_root and precision.compute is None:
            return None
        on_host = self.unit.device.type in ("cpu", "meta")
        device = self.unit.device if is_root and not on_host else None
        casts = precision.cast_inputs or (is_root and precision.cast_root_inputs)
        dtype = dtype_of(precision.compute) if casts and precision.compute else None
        if device is None and dtype is None:
            return None

        def convert(tensor: Tensor) -> Tensor:
            to = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            return tensor.to(device or tensor.device, to, non_blocking=True)

        return convert

    def _after_forward(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if _len_torch_dispatch_stack() and counts_operations():
            with uncounted():
                return self._after_forward(_module, _args, output)
        failure = sys.exception()
        if self._swapped and not self._inside_itself:
            swaps = self._swapped.pop()
            if swaps is not None:
                swaps.undo()
        if isinstance(failure, CommunicationError) and id(failure) != self._handled_outside:
            # Nothing can be sent any more: the next forward forgets this step.
            self.unit.show_sharded()
            return None
        if self._inside_itself:
            self._inside_itself -= 1
            return None
        unit, given = self.unit, output
        wanted = unit.plan.precision.output
        tracker, ends = self.tracker, False
        if tracker is not None and self._modules_run:  # not if the pre-hook has raised
            ends = self._modules_run == self._modules_to_run or tracker.runs_alone(self)
        if tracker is not None and ends and tracker.optional is not None:
            ours = failure is None or id(failure) == self._handled_outside or is_early_stop(failure)
            output = tracker.before_end(self, output) if ours else output
        # A weight, or a view of one, would be read after its memory has gone.
        if type(output) is not Tensor:
            output = map_tensors(output, self._apart_from_parameters)
        elif (
            output.layout is torch.strided and output.untyped_storage()._cdata in unit.full.storages
        ):
            output = output.clone()
        if wanted is not None:
            dtype = dtype_of(wanted)
            output = map_tensors(output, lambda t: t.to(dtype) if t.is_floating_point() else t)
        call, outputs = self.step.call, []
        if call is not None:
            if isinstance(output, Tensor):  # as most are
                outputs, hidden = ([output] if output.requires_grad else []), False
            else:
                outputs, hidden = outputs_with_gradients(output)
            if any(WATCHED in tensor.__dict__ for tensor in outputs):  # an input that comes out
                output = map_tensors(output, _own_views())
                outputs = tensors_with_gradients(output)
            self._unseen = hidden and unit.trainable
            if outputs:
                call.watch_outputs(outputs)
            self._watch_features(_module)
        if ends and tracker is not None:
            self.end_forward()
            if failure is None and tracker.optional is not None and torch.is_grad_enabled():
                # Last, since it may end a recomputation by an exception.
                tracker.optional.save_for_recomputation(self, call, outputs)
        return None if output is given else output

    def _apart_from_parameters(self, output: Tensor) -> Tensor:
        plain = type(output) in (Tensor, nn.Parameter) and output.layout is torch.strided
        shared = plain and output.untyped_storage()._cdata in self.unit.full.storages
        return output.clone() if shared else output

    def _watch_features(self, module: nn.Module) -> None:
        features = self._features.get(id(module))
        if features is None:
            features = attributes_with_gradients(
                module, leave_out=lambda each: managed_unit_of(each) is not None
            )
            self._features[id(module)] = features
        for attributes, name in features:
            self.step.call.watch_inside(tensors_with_gradients(attributes.get(name)))

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

    def calls_on_stack(self) -> int:
        """Count the calls that this thread is in of the unit's module.

        Of several modules it cannot be known which is still to run: -1.
        """
        calls = 0
        frame: FrameType | None = sys._getframe()
        while frame is not None and self._modules_to_run == 1:
            if frame.f_code in (nn.Module._call_impl.__code__, ManagedUnit.run.__code__):
                called = frame.f_locals["self"]
                calls += called is self or managed_unit_of(called) is self
            frame = frame.f_back
        return calls if self._modules_to_run == 1 else -1

    def end_forward(self) -> None:
        """End the unit's forward: its modules have run, or those of them that will."""
        unseen, self._unseen = self._unseen, False
        self._modules_run = 0
        assert self.tracker is not None
        self.tracker.forward_ends(self, unseen=unseen)

    @property
    def optional(self) -> bool:
        """True if ranks may leave the unit out of a forward."""
        return self.step.optional

    @optional.setter
    def optional(self, optional: bool) -> None:
        self.step.optional = optional

    def change(self, setting: str, value: Any) -> None:
        """Set one of the unit's settings, by its attribute's name, while it is in no step.

        In the middle of a step of others it counts from the next step on.
        """
        if getattr(self, setting) == value:
            return
        in_step = self.in_step
        if in_step and (self.step.running or self.step.phase.open):
            raise UsageError(
                f"{setting} of unit {self.unit.name!r} cannot be changed while the unit is in "
                "forward or backward; change it before or after"
            )
        setattr(self, setting, value)
        if self.tracker is not None and not in_step:
            self.tracker.set_prefetch(self.tracker.prefetch)
        elif self.tracker is not None:
            self.tracker.settings_changed = True

    def take_gradients(self, task: int) -> None:
        """Take those of graph task ``task`` without a word: nothing follows from their arrival.

        That is so while a call waits for the gradient of an input anyway.
        """
        if self.came:  # in another graph task
            self.note_gradients()
        if not self.unit.cuts:
            self.takes_of = task

    def note_gradients(self) -> None:
        """Note what has come without a word, and take no more so."""
        task, self.takes_of = self.takes_of, _NONE
        if self.came:
            self.unit.fill()
            self.step.take(self.came, task)
            self.came.clear()

    def forget_step(self) -> None:
        """Return to the state between steps, whatever happened; drop full gradients."""
        self.takes_of = _NONE
        self.came.clear()
        self.step.forget()
        self._modules_run = self._inside_itself = 0
        self._swapped.clear()
        self.unit.drop_gradients()
        self.unit.hide_full()


def _own_views() -> Callable[[Tensor], Tensor]:
    """A function that replaces each tensor that is watched as an input by a view of it.

    The gradient of an input that several units share is complete only when all of them are over,
    and each would stay full until then. A view's gradient is that of its own unit alone. So is the
    gradient of an output; that of an input that comes out as it went in is told as the input's.
    """
    views: dict[int, Tensor] = {}  # what was one tensor stays one

    def own_view(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad or WATCHED not in tensor.__dict__:
            return tensor
        return views.setdefault(id(tensor), tensor.view_as(tensor))

    return own_view


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


def paths_of_modules(
    root: nn.Module, prefix: str = ""
) -> Iterator[tuple[str, nn.Module, tuple[ManagedUnit, ...]]]:
    """Yield each path below ``root``, its module, and the units on it, outermost first.

    A module that is shared comes once for each path; a wrapper and what it wraps have the same.
    """
    around: dict[str, tuple[ManagedUnit, ...]] = {}
    for path, module in root.named_modules(prefix=prefix, remove_duplicate=False):
        outer = around.get(path, around.get(path.rpartition(".")[0], ()))
        managed = managed_unit_of(module)
        around[path] = outer if managed is None else (*outer, managed)
        yield path, module, around[path]


def speaks_for_all(module: nn.Module) -> bool:
    """True on the one rank that writes what is the same on all: of every group and tensor axis."""
    for managed in managed_units(module):
        cuts = [each.ownership.tensor_parallel for each in managed.unit.sharded]
        if not managed.unit.ranks.first or not all(cut.first for cut in cuts if cut is not None):
            return False
    return True
