# SPDX-License-Identifier: Apache-2.0
"""The methods that `fully_shard` adds to a module's class, as FSDP2 has them.

Unless a method says otherwise it is called between steps, with the same arguments on all ranks, and
concerns the module's own unit; with ``recurse`` also those below.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.core.errors import ConfigurationError, NotSupportedError, UsageError
from fullshard.torch.comm.process_group import group_of
from fullshard.torch.sharding.initialisation import filled_with_nan
from fullshard.torch.sharding.settings import (
    require_gradient_sync,
    set_separate_reduce_scatter_group,
    synchronize_gradients,
)
from fullshard.torch.sharding.shard import NotCopied, take_over_below
from fullshard.torch.state.forms import AS_DTENSORS, ask_before_loading, collecting, hand_out
from fullshard.torch.step.managed import ManagedUnit, managed_unit_of, managed_units
from fullshard.torch.step.paths import make_ties
from fullshard.torch.step.tracker import ensure_tracker, tracker_of
from fullshard.torch.unit.changes import follow_conversion, take_over
from fullshard.torch.unit.sites import clean_name


class FSDPGrad:
    """PyTorch's class (2026) of gradients that wait for a reduce, for scripts that ask for it.

    Nothing is one here: ``.grad`` is None, or holds what is reduced.
    """

    def __new__(cls, *arguments: Any, **options: Any) -> "FSDPGrad":
        """Refuse: there are none."""
        _refuse_of_later("FSDPGrad", "gradients that wait for a reduce are in no parameter's .grad")


class _ModuleState:
    """The answer of ``module._get_fsdp_state()``, as far as libraries read FSDP2's."""

    def __init__(self, managed: ManagedUnit):
        self._managed = managed

    @property
    def _is_root(self) -> bool | None:
        """None before the first forward, as with FSDP2: nobody knows yet."""
        return None if self._managed.tracker is None else self._managed.number == 0

    def _lazy_init(self) -> None:
        """Do nothing: what a first forward prepares, it prepares itself."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"fullshard's state of a module has no {name}: units are no parameter groups of "
            "PyTorch. Use the methods of FSDPModule (unshard, reshard, set_...), DTensor's "
            "attributes of module.parameters(), or start the script without fullshard"
        )


class UnshardHandle:
    """A gather that `FSDPModule.unshard` has started."""

    def __init__(self, managed: ManagedUnit):
        self._managed = managed

    def wait(self) -> None:
        """Wait until the full parameters are there, and let the module show them."""
        self._managed.unit.await_gather()
        self._managed.unit.show_full()


if TYPE_CHECKING:

    class _OwnModule(nn.Module):
        """The module's own class: Python's types have no word for a class and a subclass of it."""

        def __getattr__(self, name: str) -> Any: ...

else:
    _OwnModule = object


class FSDPModule(NotCopied, _OwnModule):
    """The base of every class that `fully_shard` makes."""

    # Options go on as they were given: a class's own methods may take fewer than PyTorch's.
    def state_dict(self, *args: Any, **options: Any) -> Any:
        """Return the module's state dict with DTensors, placed as ``Shard(0)``. Collective.

        They have elements of their own: to load into them is not to load into the model. With
        ``keep_vars=True`` entries are the sharded parameters themselves. ``destination`` and
        ``prefix`` are those of `torch.nn.Module.state_dict`.
        """
        options = {
            **dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)),
            **options,
        }
        with collecting("function") as (outermost, first):
            # Else a module around this one has seen to it.
            if first or options.get("destination") is None:
                _show_sharded(_module(self))
            state = super().state_dict(**options)
        if outermost and not options.get("keep_vars"):
            hand_out(state, options.get("prefix", ""), AS_DTENSORS)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Load whole tensors or DTensors. Collective for DTensors."""
        _show_sharded(_module(self))
        ask_before_loading(state_dict.values(), _module(self).parameters())
        return super().load_state_dict(state_dict, *args, **options)

    # ---- full parameters by hand ----------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the unit's parameters and show them, until `reshard` or the unit's next use.

        Collective. With ``async_op`` the gather is only started: wait on the handle before use.
        """
        managed = _managed(self)
        if managed.unit.params:
            managed.unit.gather()
        handle = UnshardHandle(managed)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Drop the unit's full parameters now and show the sharded ones."""
        unit = _managed(self).unit
        if not unit.resident:
            unit.free()
        unit.hide_full()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose if full parameters are dropped after forward and gathered again in backward."""
        _check_bool("reshard_after_forward", reshard_after_forward)
        for managed in _managed_below(self, recurse):
            managed.change("reshard_after_forward", reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Choose if full parameters are dropped after backward.

        With False they stay, P bytes a unit, for the next micro-batch; the forward after an
        optimizer's step gathers them again.
        """
        _check_bool("reshard_after_backward", reshard_after_backward)
        for managed in _managed_below(self, recurse):
            managed.change("reshard_after_backward", reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Choose if backward gathers the unit: False if it needs no parameters (an embedding)."""
        _check_bool("unshard_in_backward", unshard_in_backward)
        _managed(self).change("unshard_in_backward", unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: "list[FSDPModule]") -> None:
        """Gather the units of ``modules`` when this one's forward begins, not those next in order.

        Every unit in the list costs its full parameters' memory until it has run.
        """
        _managed(self).change("prefetch_forward", _with_parts(modules))

    def set_modules_to_backward_prefetch(self, modules: "list[FSDPModule]") -> None:
        """Gather the units of ``modules`` when this one's backward begins."""
        _managed(self).change("prefetch_backward", _with_parts(modules))

    # ---- gradients ------------------------------------------------------------------------------

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Choose if the next backwards reduce gradients, or keep them full for a later one.

        With False, gradients of several micro-batches add up without communication, at the price
        of the full gradients' memory on every rank; the first backward with True again reduces
        their sum. Until then ``.grad`` has none of it.
        """
        _check_bool("requires_gradient_sync", requires_gradient_sync)
        require_gradient_sync(_module(self), requires_gradient_sync, recurse=recurse)

    def synchronize_gradients(self) -> None:
        """Reduce now what backwards without communication have kept. Collective.

        Of this module and those below, whatever `set_requires_gradient_sync` says of the backwards
        to come. For steps that do not know which backward will be the last. Raises `UsageError` in
        the middle of a forward or backward.
        """
        synchronize_gradients(_module(self))

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose if hybrid sharding sums gradients over replicas in the next backwards.

        With False they are reduced within the group that shares slices only, and kept as a slice in
        the reduce dtype; the first backward with True sums what was kept over the replicas. Until
        then ``.grad`` has none of it.
        """
        _check_bool("requires_all_reduce", requires_all_reduce)
        for managed in _managed_below(self, recurse):
            managed.unit.settings.all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say if the next backward is the last before the optimizer steps.

        After others, reduces may still be under way when ``backward()`` returns, and overlap the
        next micro-batch's forward.
        """
        _check_bool("is_last_backward", is_last_backward)
        ensure_tracker(_module(self)).executor.is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor``, not by the number of ranks."""
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            raise ConfigurationError(f"gradients must be divided by a number, got {factor!r}")
        if not 0 < factor < math.inf:
            raise ConfigurationError(
                f"gradients must be divided by a finite number of more than 0, got {factor!r}"
            )
        _managed(self).unit.settings.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Do as `set_gradient_divide_factor`, under its former name."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(
        self, hook: Callable[[Tensor], None], *, stream: "torch.cuda.Stream | None" = None
    ) -> None:
        """Call ``hook`` with each flat reduced slice (1-D, in the reduce dtype), to change it.

        It runs when the unit's sums are there and before they are averaged, for an all-reduce of
        one's own. On CUDA it is issued on ``stream``, which the compute stream then waits for.
        """
        if stream is None:
            _managed(self).unit.settings.all_reduce_hook = hook
            return

        def on_stream(reduced: Tensor) -> None:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                hook(reduced)
            torch.cuda.current_stream().wait_stream(stream)

        _managed(self).unit.settings.all_reduce_hook = on_stream

    # ---- communication --------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: Callable[..., Any]) -> None:
        """Gather by ``comm(output_tensor, input_tensor, group, async_op=True)``.

        Both tensors are 1-D and flat; the input may be this rank's slice of the output. Memory is
        not taken from ``comm.allocate``: full parameters have a storage of their own, always.
        """
        unit = _managed(self).unit
        unit.refuse_unequal("set_custom_all_gather")
        group = _group(unit.ranks.gather_of_steps)
        unit.custom_gather = lambda full, shard: comm(
            output_tensor=full, input_tensor=shard, group=group, async_op=True
        )

    def set_custom_reduce_scatter(self, comm: Callable[..., Any]) -> None:
        """Reduce by ``comm(output_tensor, input_tensor, group, op, async_op=True)``; op: sum."""
        unit = _managed(self).unit
        unit.refuse_unequal("set_custom_reduce_scatter")
        group = _group(unit.ranks.reduce)
        unit.settings.reduce_scatter = lambda shard, full: comm(
            output_tensor=shard, input_tensor=full, group=group, op=dist.ReduceOp.SUM, async_op=True
        )

    def set_post_optim_event(self, event: "torch.Event") -> None:
        """Let the next steps' first gather wait for ``event``, recorded after the optimizer."""
        ensure_tracker(_module(self)).wait_before_gather = event

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Choose how many units' reduces may be under way at once in the whole step (1 if not set).

        Each costs the unit's full gradients. The engine knows one number for all units of a root.
        """
        tracker = ensure_tracker(_module(self))
        tracker.set_prefetch(replace(tracker.prefetch, reduces_in_flight=max_input_buffers))

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """See `fullshard.torch.set_separate_reduce_scatter_group`."""
        set_separate_reduce_scatter_group(_module(self), enable, recurse=recurse)

    # ---- accepted without effect ----------------------------------------------------------------

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """No effect: unused parameters always take part with zeros, so no rank waits in vain."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """No effect: gradients are always summed, and divided separately."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """No effect: nothing is staged; gathers write into the parameters' own storage."""

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """No effect: parameters' storages are not in symmetric memory."""

    # ---- what libraries reach for ---------------------------------------------------------------

    # PyTorch's main of 2026 has these; none of its releases that we know does.

    def set_all_gather_layout(self, layout: Any) -> NoReturn:
        """Refuse: what is gathered arrives in its place, there is no copy to choose."""
        _refuse_of_later("set_all_gather_layout", "what is gathered arrives in its place")

    def set_reduce_scatter_input_fn(self, fn: Any) -> NoReturn:
        """Refuse: gradients are sent from where they are, or packed by the engine."""
        _refuse_of_later("set_reduce_scatter_input_fn", "the engine packs what a reduce sends")

    def _get_fsdp_state(self) -> _ModuleState:
        return _ModuleState(_managed(self))

    # ---- recovery, and what torch's own methods must do -----------------------------------------

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters under the names that they have in the plain model and its state dict."""
        _take_over_meta(_module(self))  # an optimizer may be made of them
        for name, param in super().named_parameters(*args, **kwargs):
            yield clean_name(name, compiled=True), param

    def reset_iter_state(self) -> None:
        """Forget a step that an exception has ended, with its gradients; on the root.

        The next forward does so by itself; this gives the memory back at once.
        """
        managed = _managed(self)
        if managed.number != 0:
            raise UsageError("reset_iter_state is for the root module, the one that runs first")
        tracker = tracker_of(_module(self))
        if tracker is not None:
            tracker.recover()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # to() and its kin, and to_empty(), which gives units on the meta device their memory
        module = _module(self)
        make_ties(module)
        on_meta = any(m.unit.shards.device.type == "meta" for m in managed_units(module))
        fn = follow_conversion((m.unit for m in managed_units(module)), fn)
        try:
            with filled_with_nan() if on_meta else nullcontext():
                applied = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            take_over_below(module)
        except UsageError:
            for managed in managed_units(module):
                managed.unit.show_sharded()  # all of it as it was
            raise
        return applied


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.method_name(...)`` gather and free like forward does (``generate``, ``encode``).

    Does nothing for a module without a unit. Raises `ConfigurationError` if there is no such
    method.
    """
    managed = managed_unit_of(module)
    if managed is None:
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ConfigurationError(f"{type(module).__name__} has no method {method_name!r}")

    def as_forward(*args: Any, **kwargs: Any) -> Any:
        return managed.run(module, method, args, kwargs)

    module.__dict__[method_name] = as_forward


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Do nothing: units share these already. Raises `ConfigurationError` for a plain module."""
    for module in modules:
        _managed(module)


def _refuse_of_later(name: str, why: str) -> NoReturn:
    raise NotSupportedError(f"{name}() of PyTorch's FSDP2 of 2026 is not served: {why}")


def _module(module: object) -> nn.Module:
    assert isinstance(module, nn.Module)
    return module


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} must be True or False, got {value!r}")


def _show_sharded(module: nn.Module) -> None:
    """Show sharded parameters again after `FSDPModule.unshard`, unless in a step or summoned."""
    _take_over_meta(module)
    for managed in managed_units(module):
        if managed.unit.on_meta:
            continue  # modules inside may have been given memory by themselves: it stays
        if not managed.summoned and (managed.tracker is None or managed.tracker.idle):
            managed.unit.hide_full()


def _take_over_meta(module: nn.Module) -> None:
    """Take over what modules inside units on the meta device have been given one by one."""
    if any(managed.unit.on_meta for managed in managed_units(module)):
        make_ties(module)
    for managed in managed_units(module):
        if managed.unit.on_meta:
            take_over(managed.unit)


def _managed(module: object) -> ManagedUnit:
    managed = managed_unit_of(module) if isinstance(module, nn.Module) else None
    if managed is None:
        raise ConfigurationError(f"expected a module that is a unit's, got {type(module).__name__}")
    return managed


def _with_parts(modules: Sequence[object]) -> list[ManagedUnit]:
    return [unit for module in modules for unit in (_managed(module), *_managed(module).parts)]


def _managed_below(module: object, recurse: bool) -> list[ManagedUnit]:
    return list(managed_units(_module(module), recurse=recurse))


def _group(comm: Any) -> Any:
    return group_of(comm) or comm
