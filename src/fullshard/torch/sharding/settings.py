# SPDX-License-Identifier: Apache-2.0
"""Settings of the step of a sharded model, chosen between steps and alike on all ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn

from fullshard.core.errors import ConfigurationError, UsageError
from fullshard.core.strategy import Prefetch
from fullshard.torch.step.managed import ManagedUnit, managed_unit_of, managed_units
from fullshard.torch.step.tracker import ensure_tracker
from fullshard.torch.unit.changes import gather_apart
from fullshard.torch.unit.sites import clean_name


def require_gradient_sync(module: nn.Module, required: bool, *, recurse: bool = True) -> None:
    """Choose if the units of ``module`` (``recurse``: and below) reduce after backward."""
    for managed in managed_units(module, recurse=recurse):
        managed.step.requires_gradient_sync = required


def synchronize_gradients(module: nn.Module) -> None:
    """Reduce what backwards without communication have kept in units of ``module`` and below.

    Collective. Raises `UsageError` in the middle of a forward or backward.
    """
    required = {managed: managed.step.requires_gradient_sync for managed in managed_units(module)}
    require_gradient_sync(module, True)
    try:
        ensure_tracker(module).reduce_what_waits()
    finally:
        for managed, before in required.items():
            managed.step.requires_gradient_sync = before


def reduce_once(stage: Any) -> None:
    """Let a stage of `torch.distributed.pipelining` reduce its gradients once in a step.

    Otherwise they are reduced after each micro-batch. Call it with a ``PipelineStage`` whose module
    is sharded, between steps. Full gradients are kept until the schedule's last backward, on every
    rank, and so are those of backwards outside of the schedule. Not collective.

    Raises:
        UsageError: the module of ``stage`` is not sharded, or it reduces once already.
        ConfigurationError: ``stage`` is none of torch's.
    """
    ends = ("perform_reduce_grad", "scale_grads")  # schedules call the one, the other or both
    if not all(callable(getattr(stage, name, None)) for name in (*ends, "submod")):
        raise ConfigurationError(
            "reduce_once needs a PipelineStage of torch.distributed.pipelining, got "
            f"{type(stage).__name__}"
        )
    module: nn.Module = stage.submod
    if not list(managed_units(module)):
        raise UsageError(f"reduce_once: {type(module).__name__} holds no unit; shard it first")
    if not vars(stage).keys().isdisjoint(ends):
        raise UsageError("this stage reduces its gradients once already")

    def reduced_before(do: Callable[[int], None]) -> Callable[[int], None]:
        def reduce_and_do(grad_scale_factor: int) -> None:
            synchronize_gradients(module)
            do(grad_scale_factor)

        return reduce_and_do

    for name in ends:
        setattr(stage, name, reduced_before(getattr(stage, name)))
    require_gradient_sync(module, False)


def keep_for_double_backward(module: nn.Module, keep: bool = True) -> None:
    """Keep the units of ``module`` and below full from forward to the next optimizer step.

    What ``backward(create_graph=True)`` and ``torch.autograd.grad(..., create_graph=True)`` need,
    since the second backward reads parameters again. It costs the memory of all full parameters.
    Between steps; all ranks must choose the same.
    """
    for managed in managed_units(module):
        managed.change("reshard_after_forward", False if keep else None)
        managed.change("reshard_after_backward", not keep)


def mark_optional(*modules: nn.Module, mean_over: Literal["ranks", "users"] = "ranks") -> None:
    """Let ranks leave the units of ``modules`` and below out of a forward, each as it likes.

    Ranks ask each other who runs one, and those that do not take part in what the others need: a
    gather, and a reduce of zeros. A gradient is None where no rank used the parameter. Between
    steps; all ranks must mark the same.

    Args:
        modules: sharded modules, or ones with sharded modules inside.
        mean_over: what a gradient is: the mean over all "ranks", those that have not run the unit
            counting as zero, as in DDP; or the mean over its "users" alone, the ranks whose
            backward may reach it in the same forward of the root.

    Raises:
        ConfigurationError: ``mean_over`` is neither.
        UsageError: a module holds no unit, is the root of a model, or is in the middle of a step.
        NotSupportedError: at the next forward, if ranks have no group that carries host memory.
    """
    if mean_over not in ("ranks", "users"):
        raise ConfigurationError(
            f'mark_optional: mean_over is {mean_over!r}; expected "ranks" or "users"'
        )
    for module in modules:
        chosen = list(managed_units(module))
        if not chosen:
            raise UsageError(
                f"mark_optional: {type(module).__name__} holds no unit; shard it first"
            )
        for managed in chosen:
            if managed.tracker is not None and managed.number == 0:
                raise UsageError(
                    f"mark_optional: unit {managed.unit.name!r} is the root of its model, which "
                    "all ranks run; mark parts of it"
                )
            if managed.in_step:
                raise UsageError("units can only be marked between steps, not in the middle of one")
            managed.change("mean_over", mean_over)
            managed.change("optional", True)


@contextmanager
def using(model: nn.Module, **runs: int) -> Iterator[None]:
    """Say how often this rank runs optional parts of ``model`` in each forward within.

    Ranks that know beforehand ask each other less: once all parts that any of them has announced
    have begun, nothing more is asked in that forward::

        with using(model, tower=batch.image is not None):
            loss = model(batch.text, batch.image)

    Keywords are the parts' names in ``model`` (``**{"vision.tower": True}`` if they have dots),
    values how often the part runs: False, True (once) or a number. Of a module that is no unit it
    counts for each optional unit directly inside. Ranks may announce different things, or nothing.
    What backward recomputes is asked about as always. Not collective.

    Raises:
        ConfigurationError: a name is no module of ``model`` or has no optional unit, or a number is
            negative.
        UsageError: in the forward, on the rank where a part runs more often than announced, and on
            all ranks if one has run less often, as long as all have announced.
    """
    announced = {
        managed: _number_of_runs(name, number)
        for name, number in runs.items()
        for managed in _optional_units_at(model, name)
    }
    before = {managed: managed.declared_runs for managed in announced}
    try:
        for managed, number in announced.items():
            managed.declared_runs = number
        yield
    finally:
        for managed, runs_before in before.items():
            managed.declared_runs = runs_before


def _number_of_runs(name: str, number: int) -> int:
    if not isinstance(number, int) or number < 0:
        raise ConfigurationError(
            f"using({name}={number!r}): expected how often this rank runs it in a forward: False, "
            "True, or a number from 0 on"
        )
    return int(number)


def _optional_units_at(model: nn.Module, name: str) -> list[ManagedUnit]:
    named = (module for path, module in model.named_modules() if clean_name(path) == name)
    module = next(named, None)  # a wrapper comes before what it wraps
    if module is None:
        raise ConfigurationError(f"using({name}=...): {type(model).__name__} has no such module")
    units = [managed for managed in _outermost(module) if managed.optional]
    if not units:
        raise ConfigurationError(
            f"using({name}=...): no unit there is optional; mark it (mark_optional)"
        )
    return units


def _outermost(module: nn.Module) -> Iterator[ManagedUnit]:
    managed = managed_unit_of(module)
    if managed is not None:
        yield managed
        return
    for child in module.children():
        yield from _outermost(child)


def set_prefetch(
    module: nn.Module, forward: int = 1, backward: int = 1, *, least_bytes: int = 0
) -> None:
    """Set how many units are gathered ahead of use below the root ``module``, between steps.

    ``forward`` and ``backward`` count units beyond the one in use: 0 gathers each when it is
    needed. Every unit more costs the memory of one full unit. As many units as ``backward`` says
    stay full between forward and backward where they are the last of one and the first of the
    other, and are not gathered a second time. With ``least_bytes`` further units
    are gathered ahead, and further reduces left under way, until those beside the last hold so many
    bytes: it keeps a link busy where units are small. All ranks must choose the same.
    """
    tracker = ensure_tracker(module)
    if not tracker.idle:
        raise UsageError("prefetch can only be changed between steps, not in the middle of one")
    reduces = tracker.prefetch.reduces_in_flight
    tracker.set_prefetch(Prefetch(forward, backward, reduces, least_bytes))


def set_separate_reduce_scatter_group(
    module: nn.Module, enable: bool = True, *, recurse: bool = True
) -> None:
    """Choose whether gathers and reduces have a communicator each (as made) or share one.

    For the units of ``module`` (``recurse``: and below), between steps; all ranks must choose the
    same. With two, a gather need not queue behind a reduce, and on NCCL gathers have a stream of
    high priority. A communicator of NCCL takes memory of the device, at its first use or, if
    ``init_process_group`` was given a ``device_id``, when it is made: choose one before the first
    step where that memory is missed. Raises `UsageError` in the middle of a step.
    """
    chosen = list(managed_units(module, recurse=recurse))
    if any(managed.in_step for managed in chosen):
        raise UsageError("communicators can only be chosen between steps, not in the middle of one")
    for managed in chosen:
        gather_apart(managed.unit, enable)
