# SPDX-License-Identifier: Apache-2.0
"""A plain ``nn.Module`` as the planner knows models: recorded anew for each way to run it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fullshard.core.errors import ConfigurationError
from fullshard.core.strategy import Precision
from fullshard.plan import Choice, Cluster, SearchSpace, search
from fullshard.plan.measured import MeasuredModel
from fullshard.plan.measured.recording import StepRecording
from fullshard.plan.run import Recompute, Run
from fullshard.torch.measuring.record import record_step
from fullshard.torch.unit.buffers import dtype_of
from fullshard.torch.unit.sites import clean_name

Inputs = Callable[[int], Sequence[Any]] | Sequence[Tensor]
"""Positional arguments of the model for a micro-batch: made by a function of its size, or tensors
whose first dim is that of samples, which are repeated."""

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "convolution"}


def measure(
    model: nn.Module,
    inputs: Inputs,
    *,
    blocks: Sequence[str] | None = None,
    parts: Sequence[str] = (),
    loss: Callable[[Any], Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> MeasuredModel:
    """Describe ``model``, which may be on the meta device, for `fullshard.plan`.

    It is recorded (see `record_step`) when the planner first asks for a micro-batch, a dtype of
    computation and a choice of recomputed blocks, and not again for the same. ``blocks`` are the
    paths of what is wrapped and recomputed, by default `repeated_modules`; ``parts`` those of finer
    units. Not collective; the model is not changed.

    Selective recomputation is recorded with a policy of torch's selective checkpoints that keeps
    attention and each second matrix product of a block, as in torchtitan.

    Raises `ConfigurationError` for unknown paths.
    """
    paths = tuple(repeated_modules(model) if blocks is None else blocks)
    known = {clean_name(path) for path, _ in model.named_modules()}
    for path in (*paths, *parts):
        if path not in known:
            raise ConfigurationError(f"{type(model).__name__} has no module {path!r}")
    recordings: dict[tuple[object, ...], StepRecording] = {}

    def record(run: Run) -> StepRecording:
        compute = run.autocast or run.precision.compute
        again = tuple(path for number, path in enumerate(paths) if run.recomputed(number))
        selective = bool(again) and run.recompute is Recompute.SELECTIVE
        key = (run.micro_batch, compute, again, selective)
        if key not in recordings:
            with _recomputing(model, again, selective):
                recordings[key] = record_step(
                    model,
                    _given(inputs, run.micro_batch),
                    loss=loss,
                    compute_dtype=dtype_of(compute) if compute else None,
                    device=device,
                )
        return recordings[key]

    record(Run(precision=Precision()))  # what cannot be recorded is told now
    return MeasuredModel(type(model).__name__, paths, tuple(parts), record)


def repeated_modules(model: nn.Module) -> tuple[str, ...]:
    """Paths of the layers of ``model``: members of one class in its outermost lists of modules."""
    found: list[str] = []

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            below = f"{path}.{name}" if path else name
            members = list(child.children())
            alike = len({type(each) for each in members}) == 1 and len(members) > 1
            if isinstance(child, nn.ModuleList | nn.Sequential) and alike:
                found.extend(f"{below}.{inner}" for inner, _ in child.named_children())
            else:
                visit(child, below)

    visit(model, "")
    return tuple(map(clean_name, found))


def plan_module(
    model: nn.Module,
    batch: Inputs,
    cluster: Cluster,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    space: SearchSpace | None = None,
    budget_bytes: int | None = None,
) -> Choice:
    """Choose how to train ``model`` on ``cluster``: record it, then rank what fits.

    ``model`` may be on the meta device. ``batch`` is what `measure` takes as inputs: tensors of a
    micro-batch, or a function of its size. ``space`` is by default all that `fullshard plan`
    chooses, in float32 with bfloat16 on the wire and in products. Not collective; the model is not
    changed. Raises `ConfigurationError` if nothing fits.
    """
    measured = measure(model, batch, loss=loss)
    return search(measured, space or SearchSpace(Run()), cluster, budget_bytes=budget_bytes)


def _given(inputs: Inputs, micro_batch: int) -> Sequence[Any]:
    if callable(inputs):
        return inputs(micro_batch)
    return [
        torch.empty((micro_batch, *each.shape[1:]), dtype=each.dtype, device="meta")
        for each in inputs
    ]


@contextmanager
def _recomputing(model: nn.Module, paths: Sequence[str], selective: bool) -> Iterator[None]:
    """Let the modules at ``paths`` keep their inputs alone, and run again in backward.

    With ``selective`` they also keep what `_EachSecondProduct` says.
    """
    chosen = [m for path, m in model.named_modules() if clean_name(path) in set(paths)]

    def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
        make: Any = create_selective_checkpoint_contexts  # has no types
        kept: dict[str, Any] = {}
        if selective:
            kept["context_fn"] = lambda: make(_EachSecondProduct())
        return partial(checkpoint, forward, use_reentrant=False, **kept)

    for module in chosen:
        module.__dict__["forward"] = recomputed(module.forward)
    try:
        yield
    finally:
        for module in chosen:
            del module.__dict__["forward"]


class _EachSecondProduct:
    """The policy of one call of a block: keep attention, and its first, third, ... product."""

    def __init__(self) -> None:
        self._products = {False: 0, True: 0}  # in forward, and when it is recomputed

    def __call__(self, context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = str(op.overloadpacket).rpartition(".")[2]
        keep = "attention" in name
        if name in _PRODUCTS:
            self._products[context.is_recompute] += 1
            keep = self._products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
