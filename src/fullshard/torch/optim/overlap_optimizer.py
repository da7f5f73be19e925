# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps unit by unit, in backward or in the next forward.

[Note: Applied gradients]
A parameter that was stepped in backward has no gradient when the loop clips, unscales or steps.
With ``grad = None`` clipping would find a norm of zero and go on. So until ``optimizer.step()``
its gradient is an object without memory that raises whenever somebody reads it or adds to it.

[Note: Steps put off]
A unit's step can wait until its shard is used: mostly until the next forward gathers it, or until
anyone looks at its parameters, gradients or state (`fullshard.torch.tensor.put_off`). So nobody
sees the difference, and steps run beside the gathers and the computation of the units before. What
is to be done is fixed when the step is put off. A unit's first step is made at once, so that its
state is there.

[Note: Who makes them]
What rests on the device is stepped by the host where it is due, not by a thread: the device has
work under way meanwhile, there is one order, and an error comes up where it happens. Units that
rest on the host are updated by the host itself, which would launch nothing meanwhile. So a thread
does it (`fullshard.torch.optim.host_updates`), each unit when its gradients have arrived, beside
all that the host launches; whoever uses a unit waits for its update.

[Note: Steps beside gathers on a CPU]
There the host waits for a gather before it asks for the next one. So it makes the next step that is
put off when a gather has been started.
"""

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate, chain
from operator import call
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullshard.core.errors import ConfigurationError, NotSupportedError, UsageError
from fullshard.torch.optim.checks import look_at
from fullshard.torch.optim.filled_step import FilledStep
from fullshard.torch.optim.host_updates import HostUpdates
from fullshard.torch.optim.merged_step import MergedStep, is_capturing, taken
from fullshard.torch.state.apart import ELEMENTWISE, is_elementwise
from fullshard.torch.step.managed import ManagedUnit, managed_units
from fullshard.torch.step.tracker import Tracker, tracker_of
from fullshard.torch.tensor.elementwise import count_change
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.tensor.put_off import PutOff
from fullshard.torch.unit.unit import Unit

_ATTRIBUTE = "_fullshard_overlap"
_APPLIED = "_fullshard_applied_gradient"


def overlap_optimizer(
    model: nn.Module, optimizer: Optimizer, *, beside: Literal["backward", "forward"] = "backward"
) -> None:
    """Let ``optimizer`` step each unit below ``model`` beside other work of the step.

    The values are those of ordinary steps, bit by bit, whoever looks at them. Call
    ``optimizer.step()`` as ever, and schedulers after it.

    ``beside="backward"``: a unit is stepped as soon as its gradients are reduced, beside the
    backward of the units before it, and its gradient shards are dropped; so ``optimizer.step()``
    has only to step what is left: plain parameters. Where parameters rest on the host, a thread
    does so, until the next forward wants the unit.
    Accumulate with ``no_sync()`` or ``set_requires_gradient_sync(False)``. Nothing may read
    gradients or add to them between backward and ``optimizer.step()``: clipping,
    `torch.amp.GradScaler` and a second backward that reduces raise `UsageError`; so do
    ``step(closure)`` and ``set_is_last_backward(False)``.

    ``beside="forward"``: ``optimizer.step()`` notes what is to be done, and each unit is stepped
    before its parameters are used next, beside the gathers of the units before it. Clipping,
    closures and `torch.amp.GradScaler` work as ever.

    Not collective by itself; all ranks must call it, between steps. Raises `NotSupportedError` for
    an optimizer that is none of torch's elementwise ones, or ``differentiable``; `UsageError` if it
    has none of the parameters of the units; `ConfigurationError` if it was to step ``beside``
    something else.
    """
    if beside not in ("backward", "forward"):
        raise ConfigurationError(f'beside must be "backward" or "forward", got {beside!r}')
    tracker_of(model)  # refuses a model that has no units
    units = list(managed_units(model))
    look_at(optimizer)
    kind = type(optimizer).__name__
    if not is_elementwise(type(optimizer)):
        names = ", ".join(sorted(each.__name__ for each in ELEMENTWISE))
        raise NotSupportedError(
            f"overlap_optimizer steps one unit at a time, which is known to be right for torch's "
            f"own {names}; {kind} is none of them. Call its step() after backward"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise NotSupportedError(
            f"overlap_optimizer cannot step a {kind} with differentiable=True, which needs the "
            "graph of the whole step. Call its step() after backward"
        )
    mine = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if not any(id(param) in mine for managed in units for param in managed.unit.sharded):
        raise UsageError(
            f"the {kind} has no parameter of the units of {type(model).__name__}; create it from "
            "the sharded model's parameters()"
        )
    overlap: _Overlap | None = optimizer.__dict__.get(_ATTRIBUTE)
    if overlap is None:
        kinds = {"backward": _BesideBackward, "forward": _BesideForward}
        overlap = optimizer.__dict__[_ATTRIBUTE] = kinds[beside](optimizer)
    elif overlap.beside != beside:
        raise ConfigurationError(
            f"this {kind} steps beside {overlap.beside} already, and cannot do so beside {beside}, "
            "too; create another one and load its state"
        )
    for managed in units:
        overlap.watch(managed)


class _Overlap(ABC):
    """The steps of one optimizer, which owns this, unit by unit."""

    beside: str

    def __init__(self, optimizer: Optimizer):
        merged = MergedStep.of(optimizer)
        assert merged is not None
        self._merged = merged
        self._watched: weakref.WeakSet[ManagedUnit] = weakref.WeakSet()
        self._optimizer = weakref.ref(optimizer)
        self._updates = HostUpdates()
        self._in_unit = False  # while a unit is stepped, or its step is put off
        this = weakref.ref(self)  # so that the thread ends with the optimizer

        def prepare(group: dict[str, Any]) -> dict[str, Any]:
            overlap = this()
            return group if overlap is None else overlap.prepare(group)

        merged.prepare = prepare

    def watch(self, managed: ManagedUnit) -> None:
        """Step the unit from now on, for as long as the optimizer exists."""
        if managed not in self._watched:
            self._watched.add(managed)
            self.listen(managed)

    @abstractmethod
    def listen(self, managed: ManagedUnit) -> None:
        """Hear of what happens to a unit that is watched from now on."""

    @abstractmethod
    def prepare(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return what is left of ``group`` for a step of the optimizer that begins now."""

    def put_off(self, managed: ManagedUnit, groups: list[dict[str, Any]]) -> bool:
        """Step ``groups`` of the unit's parameters before it is used. See [Note: Steps put off].

        Returns False if that cannot wait, and nothing was done.
        """
        optimizer, params, unit = self._optimizer(), _params_of(groups), managed.unit
        assert optimizer is not None
        # What was put off before is made here; what was gathered so far is outdated.
        count_change(*(param.local for param in params))
        self._in_unit = True
        try:
            step = FilledStep.of(optimizer, groups, self._merged)
        finally:
            self._in_unit = False
        if step is None:
            return False
        grads = (param.grad for param in params)
        states = chain.from_iterable(optimizer.state.get(param, {}).values() for param in params)
        cut = [each for each in (*grads, *states) if isinstance(each, ShardedParameter)]
        elsewhere = _rests_elsewhere(unit)
        make = partial(self._make_later, managed, step, type(optimizer).__name__, elsewhere)
        begun = self._updates.begin(unit.copies_under_way(), make) if elsewhere else make
        unit.put_off.append(PutOff([*params, *cut], begun))
        return True

    @staticmethod
    def _make_later(
        managed: ManagedUnit, step: FilledStep, optimizer: str, elsewhere: bool
    ) -> None:
        """Make a step that was put off; by a thread for what rests ``elsewhere``."""
        device = managed.unit.device
        try:
            if not elsewhere and is_capturing(device):
                raise UsageError(
                    "a CUDA graph is being captured, and would repeat a step of before whenever it "
                    "is replayed. Call optimizer.state_dict() before, which makes steps put off"
                )
            # Whoever looks may do so in a mode that is not that of steps.
            with torch.inference_mode(False), torch.autocast(device.type, enabled=False):
                step.make()
        except Exception as error:
            error.add_note(
                f"This is the step of unit {managed.unit.name!r} by {optimizer}, "
                "which overlap_optimizer had put off until the unit is used"
            )
            raise

    def step(
        self, managed: ManagedUnit, optimizer: Optimizer, groups: list[dict[str, Any]]
    ) -> None:
        """Step ``groups`` of the unit's parameters."""
        unit = managed.unit
        # In a step that is new to the schedule the unit may be gathered ahead though it is over.
        unit.await_gather()
        if _rests_elsewhere(unit):
            unit.synchronize()  # gradients are still on their way to the host
        optimizer.param_groups, before = groups, optimizer.param_groups
        self._in_unit = True
        try:
            # Without the hooks of users and schedulers: those belong to optimizer.step().
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
        finally:
            self._in_unit = False
            optimizer.param_groups = before
            self._merged.finish()


class _BesideBackward(_Overlap):
    """Steps in backward; of units that rest on the host by a thread, beside it."""

    beside = "backward"

    def __init__(self, optimizer: Optimizer):
        super().__init__(optimizer)
        self._group_of: dict[int, int] = {}  # by identity of the parameter
        self._counted: list[int] = []  # parameters in each group, when last looked at
        self._stepped: weakref.WeakSet[ManagedUnit] = weakref.WeakSet()  # once, so there is state
        optimizer.register_step_pre_hook(_refuse_closure)

    def listen(self, managed: ManagedUnit) -> None:
        """Hear of the unit's delivered gradients."""
        this, reference = weakref.ref(self), weakref.ref(managed)

        def deliver() -> None:
            overlap, unit = this(), reference()
            if overlap is not None and unit is not None:
                overlap.deliver(unit)

        managed.unit.settings.on_delivered.append(deliver)

    def prepare(self, group: dict[str, Any]) -> dict[str, Any]:
        """Remove applied gradients before a step looks for gradients."""
        for param in group["params"]:
            if type(param.grad) is _AppliedGradient:
                param.grad = None
        return group

    def deliver(self, managed: ManagedUnit) -> None:
        """Step a unit whose gradients are reduced; see [Note: Who makes them]."""
        optimizer = self._optimizer()
        params = [] if optimizer is None else self._to_step(managed, optimizer)
        if optimizer is None or not params:
            return
        by_thread = _rests_elsewhere(managed.unit) and managed in self._stepped
        for part in _halves(params) if by_thread else [params]:
            groups = self._grouped(part, optimizer)
            if not (by_thread and self.put_off(managed, groups)):
                self.step(managed, optimizer, groups)
        self._stepped.add(managed)
        for param in params:
            param.grad = _applied_gradient(param)

    def _to_step(self, managed: ManagedUnit, optimizer: Optimizer) -> list[ShardedParameter]:
        unit, groups = managed.unit, optimizer.param_groups
        counts = [len(group["params"]) for group in groups]
        if counts != self._counted:
            look_at(optimizer)
            self._counted = counts
            self._group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        chosen = [p for p in unit.sharded if p.grad is not None and id(p) in self._group_of]
        tracker = managed.tracker
        if chosen and isinstance(tracker, Tracker) and not tracker.executor.is_last_backward:
            raise UsageError(
                f"unit {unit.name!r}: set_is_last_backward(False) does not go with "
                "overlap_optimizer, which steps in every backward that reduces gradients. "
                "Accumulate within no_sync() or set_requires_gradient_sync(False)"
            )
        return chosen

    def _grouped(
        self, params: Sequence[ShardedParameter], optimizer: Optimizer
    ) -> list[dict[str, Any]]:
        by_group: dict[int, list[ShardedParameter]] = {}
        for param in params:
            by_group.setdefault(self._group_of[id(param)], []).append(param)
        return [_as_now(optimizer.param_groups[i], mine) for i, mine in by_group.items()]


class _BesideForward(_Overlap):
    """Steps that ``optimizer.step()`` puts off until units are used."""

    beside = "forward"

    def __init__(self, optimizer: Optimizer):
        super().__init__(optimizer)
        self._order: list[weakref.ref[ManagedUnit]] = []  # of units, as the model has them
        self._queue: deque[weakref.ref[ManagedUnit]] = deque()  # whose steps are put off
        self.has_stepped = False  # so there is state
        optimizer.register_step_post_hook(_has_stepped)

    def listen(self, managed: ManagedUnit) -> None:
        """Hear of the unit's gathers; see [Note: Steps beside gathers on a CPU]."""
        self._order.append(weakref.ref(managed))
        if managed.unit.device.type == "cpu":
            this = weakref.ref(self)

            def step_next() -> None:
                if (overlap := this()) is not None:
                    overlap.step_next()

            managed.unit.on_gather.append(step_next)

    def step_next(self) -> None:
        """Make the step that comes next of those put off."""
        while self._queue:
            managed = self._queue.popleft()()
            if managed is not None and any(each.waits for each in managed.unit.put_off):
                managed.unit.catch_up()
                return

    def prepare(self, group: dict[str, Any]) -> dict[str, Any]:
        """Put off the steps of units; others, and first ones, are left.

        All are left with what `torch.amp.GradScaler` gives a fused optimizer for one step, and
        while steps are compiled or captured.
        """
        optimizer = self._optimizer()
        scaled = any(hasattr(optimizer, name) for name in ("grad_scale", "found_inf"))
        at_once = scaled or not self.has_stepped or torch.compiler.is_compiling()
        params = group["params"]
        if self._in_unit or at_once or not params or is_capturing(params[0].device):
            return group
        with_grads = {id(param) for param in params if param.grad is not None}
        taken: set[int] = set()
        for managed in filter(
            None, map(call, reversed(self._order))
        ):  # threads take the last first
            mine = [param for param in managed.unit.sharded if id(param) in with_grads]
            resident = managed.unit.resident
            if mine and not resident and self.put_off(managed, [_as_now(group, mine)]):
                if managed.unit.device.type == "cpu":
                    self._queue.appendleft(weakref.ref(managed))
                taken.update(map(id, mine))
        return {**group, "params": [param for param in params if id(param) not in taken]}


def _has_stepped(optimizer: Optimizer, *_: Any) -> None:
    optimizer.__dict__[_ATTRIBUTE].has_stepped = True


def _halves(params: Sequence[ShardedParameter]) -> list[Sequence[ShardedParameter]]:
    """Cut ``params`` where as much lies before as behind, behind one that no run takes further."""
    ends = list(accumulate(param.span.numel for param in params))
    places = [i for i, param in enumerate(params) if taken(param) == param.span.numel]
    cut = min(places, key=lambda i: abs(2 * ends[i] - ends[-1]), default=-1) + 1
    return list(filter(None, (params[:cut], params[cut:])))


def _params_of(groups: Iterable[dict[str, Any]]) -> list[ShardedParameter]:
    return [param for group in groups for param in group["params"]]


def _as_now(group: dict[str, Any], params: list[ShardedParameter]) -> dict[str, Any]:
    """Return a group of ``params`` with the settings of ``group``, whatever becomes of these."""
    settings = {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()
    }
    return {**settings, "params": params}


def _rests_elsewhere(unit: Unit) -> bool:
    return unit.plan.resting_device != unit.device


class _AppliedGradient(torch.Tensor):
    """A gradient that has been applied; see [Note: Applied gradients]."""

    parameter: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        """Raise `UsageError`."""
        operands = [*args, *(each for arg in args if isinstance(arg, list) for each in arg)]
        name = next((each.parameter for each in operands if type(each) is cls), "of a parameter")
        raise UsageError(
            f"{func}: the gradient of {name!r} has been used in backward and dropped, as "
            "overlap_optimizer was asked to. Until optimizer.step() nothing can read it or add to "
            "it: clipping, GradScaler, and a second backward that reduces do not go with it. "
            "Accumulate within no_sync() or set_requires_gradient_sync(False)"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<gradient of {self.parameter!r}, used in backward and dropped>"


def _applied_gradient(param: ShardedParameter) -> Tensor:
    known: _AppliedGradient | None = param.__dict__.get(_APPLIED)
    if known is None or (known.dtype, known.device) != (param.dtype, param.device):
        known = torch.Tensor._make_wrapper_subclass(
            _AppliedGradient, param.shape, dtype=param.dtype, device=param.device, storage_size=0
        )
        param.__dict__[_APPLIED] = known
    known.parameter = param.ownership.name
    return known


def _refuse_closure(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is not None:
        raise UsageError(
            f"step(closure) of {type(optimizer).__name__}: with overlap_optimizer parameters are "
            "stepped in backward. Call the closure yourself, then step() without it"
        )
