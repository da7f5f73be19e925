# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of a sharded model captured as one CUDA graph, and replayed.

[Note: A step as a graph]
From the second step in one order on, a step issues the same operations at the same addresses, asks
the device nothing, and ends as it began: all units at rest, every stream joined. That is what a
graph needs. Its memory is a pool of its own, where a unit's buffer gets memory while the step is
captured; between replays the storages of buffers are empty, and steps without the graph use them
as ever. A replay makes no call of the engine: all that it leaves behind on the host is ``.grad``.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import nn

from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.torch.comm.checked import CheckedComm
from fullshard.torch.comm.process_group import group_of
from fullshard.torch.comm.protocol import Comm, SoloComm
from fullshard.torch.comm.sibling_groups import backend_of
from fullshard.torch.comm.watch.watchdog import Watchdog
from fullshard.torch.step.managed import ManagedUnit, managed_units
from fullshard.torch.step.tracker import Tracker, ensure_tracker

T = TypeVar("T")


class CapturedStep(Generic[T]):
    """Forward and backward as a CUDA graph; made by `capture_step`.

    ``output`` is what the step returned. Each replay writes to the memory of its tensors and of the
    gradients anew.
    """

    def __init__(self, model: nn.Module, step: Callable[[], T]):
        self._units = list(managed_units(model))
        self._shards = [managed.unit.shards for managed in self._units]
        self._graph = torch.cuda.CUDAGraph()
        for param in model.parameters():
            param.grad = None
        with Watchdog.looking_away(), torch.cuda.graph(self._graph):
            self.output: T = step()
        self._grads = [(param, param.grad) for param in model.parameters()]

    def replay(self) -> T:
        """Run forward and backward on what the step's inputs hold now; return ``output``.

        Gradients are replaced, not added to. Collective: all ranks replay. Raises `UsageError` in
        the middle of a step, and if the model has been moved or sharded anew since the capture.
        """
        if any(managed.in_step for managed in self._units):
            raise UsageError("a captured step is replayed between steps, not in the middle of one")
        for managed, shards in zip(self._units, self._shards, strict=True):
            if managed.unit.shards is not shards:
                raise UsageError(
                    f"the shards of unit {managed.unit.name!r} have been replaced since the step "
                    "was captured (moved, cast, or given more trained parameters), and the graph "
                    "reads the old ones: capture it again"
                )
        for managed in self._units:
            managed.unit.catch_up()  # the graph asks for no step that was put off
        self._graph.replay()
        for param, grad in self._grads:
            param.grad = grad
        return self.output


def capture_step(model: nn.Module, step: Callable[[], T], *, warm_up: int = 3) -> CapturedStep[T]:
    """Capture ``step``, which runs forward and backward of a sharded ``model``, as a CUDA graph.

    ``step`` takes nothing: it reads its inputs from tensors that stay, to which you copy each
    batch, and runs whatever `torch.cuda.graphs` can capture, in one order. It is called ``warm_up``
    times, at least twice, and once more while it is captured; gradients are None before each call.
    Clip and step the optimizer outside of it, between replays. Collective: all ranks capture alike.

    Raises:
        UsageError: in the middle of a step; ``model`` holds no unit; ``warm_up`` is below 2; the
            step runs its units in changing order, or leaves units full or gradients to be reduced.
        NotSupportedError: not on CUDA; parameters or optimizers on the host, optional units, an
            optimizer in backward, a recording that is on, and communicators other than NCCL's, or
            compared by FULLSHARD_DEBUG. Nothing has been run then.
    """
    if warm_up < 2:
        raise UsageError(f"warm_up={warm_up}, expected 2 or more: the second step may be replayed")
    units = list(managed_units(model))
    if any(managed.in_step for managed in units):
        raise UsageError("capture_step runs steps of its own: call it between steps")
    tracker = ensure_tracker(model)
    _refuse(tracker, units)
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(warm_up):
            for param in model.parameters():
                param.grad = None
            step()
    torch.cuda.current_stream().wait_stream(beside)
    _check_order(tracker, units)
    captured = CapturedStep(model, step)
    _check_order(tracker, units)
    return captured


def _refuse(tracker: Tracker, units: Sequence[ManagedUnit]) -> None:
    """Raise `NotSupportedError` for what a graph cannot hold."""
    reasons = {
        "optional units, about which ranks ask each other": tracker.optional is not None,
        "a recording, which marks moments": bool(tracker.executor.recorders),
    }
    for managed in units:
        unit = managed.unit
        comms = (unit.ranks.gather, unit.ranks.gather_of_steps, unit.ranks.replicas)
        name = f"unit {unit.name!r} "
        reasons |= {
            f"{name}computes on {unit.device}": unit.device.type != "cuda",
            f"{name}rests on the host": unit.copies,
            f"{name}steps its optimizer in backward": bool(unit.settings.on_delivered),
            f"{name}communicates by other ways than NCCL's": not all(map(_by_nccl, comms)),
        }
    for reason, holds in reasons.items():
        if holds:
            raise NotSupportedError(f"capture_step cannot capture this model: {reason}")


def _by_nccl(comm: Comm) -> bool:
    if isinstance(comm, SoloComm):
        return True
    group = None if isinstance(comm, CheckedComm) else group_of(comm)
    return group is not None and backend_of(group, "cuda") == "nccl"


def _check_order(tracker: Tracker, units: Sequence[ManagedUnit]) -> None:
    full = [m.unit.name for m in units if m.unit.transient_bytes and not m.unit.resident]
    if full or not tracker.idle:
        raise UsageError(
            f"the step ends with {', '.join(full) or 'a step under way'}: full parameters, or "
            "gradients that are not reduced. A graph begins and ends with all units at rest: run "
            "backward within it, with reduces and without reshard_after_backward=False"
        )
    if tracker.executor.repeated < 2:
        raise UsageError(
            "the step runs its units in another order than the time before, and a graph has one: "
            "make it take the same way each time, or warm it up until it does (warm_up=)"
        )
