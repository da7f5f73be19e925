# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps in backward: each unit steps as soon as its gradients are reduced.

[Note: Applied gradients]
A parameter that was stepped in backward has no gradient when the loop clips, unscales or steps.
With ``grad = None`` clipping would find a norm of zero and go on. So until ``optimizer.step()``
its gradient is an object without memory that raises whenever somebody reads it or adds to it.

[Note: Units that rest on the host]
Their gradients are copied there, and a host that waited for each copy at once would launch nothing
meanwhile. So such a unit is stepped when the one behind it is reduced, whose backward the device
has under way while the host waits and steps. The last is stepped when backward ends.
"""

import weakref
from collections import deque
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.torch.optim.checks import look_at
from fullshard.torch.optim.merged_step import MergedStep
from fullshard.torch.state.apart import ELEMENTWISE
from fullshard.torch.step.managed import ManagedUnit, managed_units
from fullshard.torch.step.tracker import Tracker, tracker_of
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.unit import Unit

__all__ = ["overlap_optimizer"]

_ATTRIBUTE = "_fullshard_overlap"
_APPLIED = "_fullshard_applied_gradient"


def overlap_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Let ``optimizer`` step each unit below ``model`` as soon as its gradients are reduced.

    From now on a unit's parameters change in the backward that reduces their gradients, beside the
    backward of the units before it, and their gradient shards are dropped at once (where parameters
    rest on the host, when the next unit's are reduced); so
    ``optimizer.step()`` has only to step what is left: plain parameters. Call it as ever, and
    schedulers after it. The values are those of ordinary steps, bit by bit. Accumulate with
    ``no_sync()`` or ``set_requires_gradient_sync(False)``.

    Not collective by itself; all ranks must call it, between steps. Nothing may read gradients or
    add to them between backward and ``optimizer.step()``: clipping, `torch.amp.GradScaler` and a
    second backward that reduces raise `UsageError`; so do ``step(closure)`` and
    ``set_is_last_backward(False)``. Raises `NotSupportedError` for an optimizer that is none of
    torch's elementwise ones, or ``differentiable``; `UsageError` if it has none of the parameters
    of the units.
    """
    tracker_of(model)  # refuses a model that has no units
    units = list(managed_units(model))
    look_at(optimizer)
    kind = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE:
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
    overlap = optimizer.__dict__.get(_ATTRIBUTE)
    if overlap is None:
        overlap = optimizer.__dict__[_ATTRIBUTE] = _Overlap(optimizer)
    for managed in units:
        overlap.watch(managed)


class _Overlap:
    """The steps in backward of one optimizer, which owns this."""

    def __init__(self, optimizer: Optimizer):
        merged = MergedStep.of(optimizer)
        assert merged is not None
        self._merged = merged
        self._watched: weakref.WeakSet[ManagedUnit] = weakref.WeakSet()
        self._optimizer = weakref.ref(optimizer)
        self._group_of: dict[int, int] = {}  # by identity of the parameter
        self._counted: list[int] = []  # parameters in each group, when last looked at
        self._waiting: deque[weakref.ref[ManagedUnit]] = deque()  # for their copies to the host
        merged.prepare = _drop_applied
        optimizer.register_step_pre_hook(_refuse_closure)

    def watch(self, managed: ManagedUnit) -> None:
        """Listen for delivered gradients of the unit, for as long as the optimizer exists."""
        if managed in self._watched:
            return
        self._watched.add(managed)
        this, reference = weakref.ref(self), weakref.ref(managed)

        def step() -> None:
            overlap, unit = this(), reference()
            if overlap is not None and unit is not None:
                overlap.deliver(unit)

        managed.unit.settings.on_delivered.append(step)

    def deliver(self, managed: ManagedUnit) -> None:
        """Step a unit whose gradients are reduced; see [Note: Units that rest on the host]."""
        if not _rests_elsewhere(managed.unit):
            self.step(managed)
            return
        self._waiting.append(weakref.ref(managed))
        in_backward = torch._C._current_graph_task_id() >= 0
        self._step_waiting(1 if in_backward else 0)
        if in_backward:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(self._step_waiting, 0))

    def _step_waiting(self, left: int) -> None:
        while len(self._waiting) > left:
            if (managed := self._waiting.popleft()()) is not None:
                self.step(managed)

    def step(self, managed: ManagedUnit) -> None:
        """Step the parameters of the unit that the optimizer has, and drop their gradients."""
        optimizer, unit = self._optimizer(), managed.unit
        assert optimizer is not None
        groups = optimizer.param_groups
        counts = [len(group["params"]) for group in groups]
        if counts != self._counted:
            look_at(optimizer)
            self._counted = counts
            self._group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        chosen: dict[int, list[ShardedParameter]] = {}
        for param in unit.sharded:
            if param.grad is not None and id(param) in self._group_of:
                chosen.setdefault(self._group_of[id(param)], []).append(param)
        if not chosen:
            return
        tracker = managed.tracker
        if isinstance(tracker, Tracker) and not tracker.executor.is_last_backward:
            raise UsageError(
                f"unit {unit.name!r}: set_is_last_backward(False) does not go with "
                "overlap_optimizer, which steps in every backward that reduces gradients. "
                "Accumulate within no_sync() or set_requires_gradient_sync(False)"
            )
        # In a step that is new to the schedule the unit may be gathered ahead though it is over.
        unit.await_gather()
        if _rests_elsewhere(unit):
            unit.synchronize()  # gradients are still on their way to the host
        optimizer.param_groups = [{**groups[i], "params": mine} for i, mine in chosen.items()]
        try:
            # Without the hooks of users and schedulers: those belong to optimizer.step().
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
        finally:
            optimizer.param_groups = groups
            self._merged.finish()
        for params in chosen.values():
            for param in params:
                param.grad = _applied_gradient(param)


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


def _drop_applied(params: list[Tensor]) -> None:
    """Remove applied gradients before a step looks for gradients."""
    for param in params:
        if type(param.grad) is _AppliedGradient:
            param.grad = None


def _refuse_closure(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is not None:
        raise UsageError(
            f"step(closure) of {type(optimizer).__name__}: with overlap_optimizer parameters are "
            "stepped in backward. Call the closure yourself, then step() without it"
        )
