# SPDX-License-Identifier: Apache-2.0
"""What a sharded model holds at rest, and what it does: bytes and traces."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.core.errors import UsageError
from fullshard.core.trace import Trace
from fullshard.torch.compressed_comm import CompressedComm
from fullshard.torch.optim import optimizer_state_bytes
from fullshard.torch.parameter import ShardedParameter
from fullshard.torch.recorder import TraceRecorder
from fullshard.torch.runtime import runtime_of
from fullshard.torch.shard_modules import managed_units

__all__ = ["RestingBytes", "resting_bytes", "tracing"]


@dataclass(frozen=True)
class RestingBytes:
    """What one rank holds between steps, in bytes, padding included."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


def resting_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> RestingBytes:
    """Bytes that this rank holds now for parameters, gradients and optimizer state.

    Counted from the storages there are, not from the layout; what error feedback of compressed
    reduces keeps counts as gradients. Works for plain models too.
    """
    params = list(model.parameters())
    grads = [param.grad for param in params if param.grad is not None]
    reduces = [managed.unit.ranks.reduce for managed in managed_units(model)]
    residuals = sum(each.residual_bytes for each in reduces if isinstance(each, CompressedComm))
    return RestingBytes(
        _storage_bytes(params),
        _storage_bytes(grads) + residuals,
        optimizer_state_bytes(optimizer),
    )


def _storage_bytes(tensors: list[Any]) -> int:
    local = [t.local if isinstance(t, ShardedParameter) else t for t in tensors]
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in local)}
    return sum(storages.values())


@contextmanager
def tracing(model: nn.Module) -> Iterator[Trace]:
    """Record the ops of the units below the root ``model``; the trace is filled on leaving.

    Begin and end it between steps. On CUDA, times are those of the compute stream.
    """
    execution = runtime_of(model).execution
    if execution.recorder is not None:
        raise UsageError("this model is being traced already")
    trace = Trace()
    device = next(iter(execution.units)).unit.device
    execution.recorder = recorder = TraceRecorder(device)
    try:
        yield trace
    finally:
        execution.recorder = None
        recorder.fill(trace)
