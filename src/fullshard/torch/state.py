# SPDX-License-Identifier: Apache-2.0
"""What a sharded model holds: its weights as one file, its bytes at rest."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from fullshard.core.errors import ConfigurationError, UsageError
from fullshard.core.trace import Trace
from fullshard.torch.modules import WRAPPED, clean_name
from fullshard.torch.optim import optimizer_state_bytes
from fullshard.torch.parameter import ShardedParameter
from fullshard.torch.recorder import TraceRecorder
from fullshard.torch.runtime import runtime_of

__all__ = ["RestingBytes", "resting_bytes", "save_full_weights", "tracing"]

# The dtype names of the safetensors format: https://github.com/huggingface/safetensors#format
_SAFETENSORS_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


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

    Counted from the storages there are, not from the layout. Works for plain models too.
    """
    params = list(model.parameters())
    grads = [param.grad for param in params if param.grad is not None]
    return RestingBytes(
        _storage_bytes(params), _storage_bytes(grads), optimizer_state_bytes(optimizer)
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


def save_full_weights(model: nn.Module, path: str | Path) -> None:
    """Write all parameters and buffers of ``model`` to one safetensors file. Collective.

    Names, shapes and values are those of the plain model's ``state_dict()``, so
    ``plain.load_state_dict(safetensors.torch.load_file(path))`` restores it (a tied parameter is
    there under each of its names). Parameters are gathered one by one; rank 0 holds one full
    parameter at a time and writes. The file appears at ``path`` when it is complete.

    Raises:
        ConfigurationError: on all ranks, if rank 0 cannot write the file.
    """
    entries = {clean_name(name): tensor for name, tensor in _sharded_entries(model).items()}
    for name, tensor in entries.items():
        if tensor.dtype not in _SAFETENSORS_NAMES:
            raise ConfigurationError(f"{name!r} is {tensor.dtype}, which safetensors cannot hold")
    ranks = next(runtime_of(model).execution.units).unit.ranks
    owners = [t.ownership for t in entries.values() if isinstance(t, ShardedParameter)]
    cuts = dict.fromkeys(o.tensor_parallel for o in owners if o.tensor_parallel is not None)
    target = Path(path)
    failure: OSError | None = None
    writer: _Writer | None = None
    if ranks.first and all(cut.first for cut in cuts):
        writer = _Writer(target, _header(entries))
    for tensor in entries.values():
        full = tensor.full_tensor() if isinstance(tensor, ShardedParameter) else tensor
        if writer is not None:
            writer.append(_raw(full))
    if writer is not None:
        writer.finish()
        failure = writer.failure
    failed = torch.tensor(float(failure is not None), device=_device_of(entries))
    for comm in dict.fromkeys(comm for owner in owners for comm in owner.comms):
        comm.all_reduce([failed], "max").wait()
    if ranks.any(bool(failed), failed.device):
        detail = f": {failure}" if failure else "; the error is on rank 0"
        raise ConfigurationError(f"could not write the weights to {target}{detail}") from failure


def _sharded_entries(model: nn.Module) -> dict[str, Any]:
    # A wrapper may have been told to give whole tensors; the module inside it never does.
    inside = model._modules.get(WRAPPED)
    entries: dict[str, Any] = (model if inside is None else inside).state_dict()
    return entries


class _Writer:
    """A file that appears under its name when it is complete; keeps its first failure."""

    def __init__(self, target: Path, header: bytes):
        self._target = target
        self._staging = target.with_name(f"{target.name}.partial")
        self._file: IO[bytes] | None = None
        self.failure: OSError | None = None
        try:
            self._file = self._staging.open("wb")
        except OSError as error:
            self.failure = error
        self.append(header)

    def append(self, data: bytes) -> None:
        if self._file is None or self.failure is not None:
            return
        try:
            self._file.write(data)
        except OSError as error:
            self.failure = error

    def finish(self) -> None:
        if self._file is None:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            if self.failure is None:
                self._staging.replace(self._target)
            else:
                self._staging.unlink(missing_ok=True)
        except OSError as error:
            self.failure = self.failure or error


def _header(entries: dict[str, Tensor]) -> bytes:
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in entries.items():
        stop = start + tensor.numel() * tensor.element_size()
        described[name] = {
            "dtype": _SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _raw(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _device_of(entries: dict[str, Tensor]) -> torch.device:
    return next((tensor.device for tensor in entries.values()), torch.device("cpu"))
