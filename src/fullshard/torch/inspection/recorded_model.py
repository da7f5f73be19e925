# SPDX-License-Identifier: Apache-2.0
"""Models as `recording` sees them: what is said of them, and who tells of their steps.

[Note: Models of others]
PyTorch's ``fully_shard`` and plain modules tell nothing. Hooks around each sharded module hear its
forward, and how long what FSDP does before it held up computation: that is the wait for its
parameters. Gradients of its outputs begin its backward, those of its inputs end it, or the end of
all backward where no input has one, as token numbers have not. What FSDP does before and after a
backward is timed where it is called: `_TimedCall`.
"""

import socket
import statistics
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fullshard.core.strategy import ShardingStrategy
from fullshard.report import Facts, RecordedUnit
from fullshard.torch.comm.process_group import group_of, witness_of
from fullshard.torch.comm.ranks import Ranks, ranks_of
from fullshard.torch.comm.watch.watchdog import Watchdog
from fullshard.torch.inspection.forecast import forecast_step, named_units
from fullshard.torch.inspection.memory import Bytes, resting_bytes
from fullshard.torch.inspection.traffic import tracker_to_record
from fullshard.torch.optim.checks import optimizer_state_bytes
from fullshard.torch.step.managed import ManagedUnit, managed_units
from fullshard.torch.step.profiling import OpRecorder
from fullshard.torch.step.structures import tensors_with_gradients

_ROUNDS = 5  # of asking for the time

Settings = Mapping[str, str | float | bool | None]


class RecordedModel(ABC):
    """A model that can be recorded, on ``device``; its ``units`` in the order of the record."""

    device: torch.device
    units: Sequence[Any]
    recorders: Sequence[OpRecorder]
    numbers: Mapping[Any, int]  # of the units in the record, by what recorders are told of
    counts_buffers: bool  # the units say what they hold beyond their shards
    watchdog: Watchdog | None = None

    def __init__(self, model: nn.Module):
        self.model = model

    @abstractmethod
    def attach(self, recorder: OpRecorder) -> None:
        """Tell ``recorder`` of steps from now on."""

    @abstractmethod
    def detach(self, recorder: OpRecorder) -> None:
        """Tell it no more."""

    @abstractmethod
    def facts(self, settings: Settings, forecast: Mapping[str, float]) -> Facts:
        """Say what is known of the model; these two come in addition. Collective."""

    @abstractmethod
    def resting_bytes(self, optimizers: Sequence[Optimizer]) -> Bytes:
        """Return what rests on this rank."""

    def _facts(self, ranks: Ranks | None, **others: Any) -> Facts:
        rank, world, offset_s = 0, 1, 0.0
        if ranks is not None:
            rank = ranks.replicas.rank * ranks.gather.size + ranks.gather.rank
            world, offset_s = ranks.size, _clock_offset_s(ranks, self.device)
            if group_of(ranks.gather) is not None:
                rank, world = dist.get_rank(), dist.get_world_size()
        host, started_at = socket.gethostname(), time.time()
        return Facts(rank, world, host, started_at, offset_s, device=str(self.device), **others)


def recorded_model(model: nn.Module) -> RecordedModel:
    """Return ``model`` as it can be recorded."""
    return _OfEngine(model) if any(True for _ in managed_units(model)) else _OfOthers(model)


class _OfEngine(RecordedModel):
    """A model of which fullshard's engine tells."""

    counts_buffers = True

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self._executor = tracker_to_record(model).executor
        alive = self._executor.units
        self.units = [managed.unit for managed in alive]
        self.numbers = {unit: number for number, unit in enumerate(self.units)}
        self.numbers |= {managed.number: number for number, managed in enumerate(alive)}
        self.device = self.units[0].device
        witness = witness_of(self.units[0].ranks.gather)
        self.watchdog = None if witness is None else witness.watchdog

    @property
    def recorders(self) -> Sequence[OpRecorder]:  # type: ignore[override]
        return self._executor.recorders

    def attach(self, recorder: OpRecorder) -> None:
        self._executor.attach(recorder)

    def detach(self, recorder: OpRecorder) -> None:
        self._executor.detach(recorder)

    def resting_bytes(self, optimizers: Sequence[Optimizer]) -> Bytes:
        state_bytes = sum(map(optimizer_state_bytes, optimizers))
        return replace(resting_bytes(self.model, None), optimizer_bytes=state_bytes)

    def facts(self, settings: Settings, forecast: Mapping[str, float]) -> Facts:
        largest = max(self._executor.units, key=lambda m: (m.number > 0, m.unit.layout.full_bytes))
        prefetch, foreseen = self._executor.prefetch, forecast_step(named_units(self.model))
        known = {
            **_settings_of(largest),
            "prefetch_forward": prefetch.forward,
            "prefetch_backward": prefetch.backward,
            "reduces_in_flight": prefetch.reduces_in_flight,
            "torch": torch.__version__,
        }
        sent_bytes = float(sum(sent.total_bytes for sent in foreseen.sent.values()))
        carrier = "the device" if self.device.type == "cuda" else "Gloo"
        missing = [
            f"when gathers and reduces were done that nobody waited for: {carrier} does not tell, "
            "so they end with the wait that follows them"
        ]
        if any(unit.copies for unit in self.units):
            missing.append("copies between host and device: they are part of gathers and reduces")
        return self._facts(
            max((unit.ranks for unit in self.units), key=lambda ranks: ranks.size),
            units=tuple(
                RecordedUnit(
                    unit.name,
                    sum(param.numel() for param in unit.sharded),
                    unit.layout.full_bytes,
                    unit.layout.shard_bytes,
                    unit.layout.grad_full_bytes,
                )
                for unit in self.units
            ),
            settings={**known, **settings},
            forecast={
                "transient_peak_bytes": float(foreseen.peak_bytes),
                "sent_bytes": sent_bytes,
                **forecast,
            },
            missing=tuple(missing),
        )


def _settings_of(managed: ManagedUnit) -> dict[str, str | float | bool | None]:
    unit = managed.unit
    ranks, plan = unit.ranks, unit.plan
    keeps = managed.reshard_after_forward is False
    if ranks.gather.size == 1:
        strategy = ShardingStrategy.NO_SHARD
    elif ranks.replicas.size > 1:
        strategy = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)[keeps]
    else:
        strategy = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)[keeps]
    segments = unit.layout.segments
    return {
        "strategy": strategy.name,
        "shards": ranks.gather.size,
        "replicas": ranks.replicas.size,
        "param_dtype": ", ".join(dict.fromkeys(each.full_dtype for each in segments)),
        "reduce_dtype": ", ".join(dict.fromkeys(each.grad_dtype for each in segments)),
        "align": plan.align,
        "offload": plan.offload.to_host,
        "compressed": ranks.compression is not None,
    }


def _clock_offset_s(ranks: Ranks, device: torch.device) -> float:
    """Return how far this host's clock is ahead of the first rank's. Collective."""
    host = float(zlib.crc32(socket.gethostname().encode()))
    offsets = []
    for _ in range(_ROUNDS):
        ranks.any(False, device)  # all ranks leave it at about the same moment
        mine = time.time()
        first = torch.tensor([host, mine // 1, mine % 1], dtype=torch.float64, device=device)
        ranks.broadcast(first)
        first_host, seconds, fraction = first.tolist()
        offsets.append(mine // 1 - seconds + mine % 1 - fraction)
    return 0.0 if first_host == host else statistics.median(offsets)


# ---- models of others ---------------------------------------------------------------------------


class _Hooked(NamedTuple):
    """A module whose parameters travel together, or the whole of a plain model."""

    name: str
    module: nn.Module


class _OfOthers(RecordedModel):
    """A model sharded by PyTorch's FSDP2, or plain. See [Note: Models of others]."""

    counts_buffers = False

    def __init__(self, model: nn.Module):
        super().__init__(model)
        named = {name or "(root)": module for name, module in model.named_modules()}
        sharded = getattr(dist.fsdp, "FSDPModule", ()) if dist.is_available() else ()
        self._sharded = any(isinstance(module, sharded) for module in named.values())
        self.units = [
            _Hooked(name, module)
            for name, module in named.items()
            if (isinstance(module, sharded) if self._sharded else module is model)
        ]
        self.numbers = {unit: number for number, unit in enumerate(self.units)}
        self.device = next((param.device for param in model.parameters()), torch.device("cpu"))
        self.recorders: list[OpRecorder] = []
        self._handles: list[Any] = []

    def attach(self, recorder: OpRecorder) -> None:
        if self.recorders:
            return
        self.recorders.append(recorder)
        for unit in self.units:
            self._handles += _hook(unit, recorder, self._sharded)
            for group in _fsdp_groups(unit.module):
                for name, wait in _OF_BACKWARD.items():
                    self._handles.append(_TimedCall(group, name, wait, unit, recorder))

    def detach(self, recorder: OpRecorder) -> None:
        self.recorders.clear()
        while self._handles:
            self._handles.pop().remove()

    def resting_bytes(self, optimizers: Sequence[Optimizer]) -> Bytes:
        params = list(self.model.parameters())
        values = tree_leaves([list(each.state.values()) for each in optimizers])
        state = [value for value in values if isinstance(value, Tensor)]
        grads = [param.grad for param in params if param.grad is not None]
        return Bytes(*(sum(map(_bytes_here, tensors)) for tensors in (params, grads, state)))

    def facts(self, settings: Settings, forecast: Mapping[str, float]) -> Facts:
        joined = dist.is_available() and dist.is_initialized()
        ranks = ranks_of(None, ShardingStrategy.FULL_SHARD.sharding) if joined else None
        missing = ["memory of gather buffers and gradients on their way"]
        if self._sharded:
            missing.append("when gathers and reduces begin: PyTorch's FSDP2 does not tell")
            if not any(_fsdp_groups(unit.module) for unit in self.units):
                missing.append("waits in backward, for which this torch has other names")
        return self._facts(
            ranks,
            engine="torch.distributed.fsdp" if self._sharded else "plain",
            units=tuple(_sizes_of(unit, self.units) for unit in self.units),
            settings={"torch": torch.__version__, **settings},
            forecast=forecast,
            missing=tuple(missing),
        )


def _sizes_of(unit: _Hooked, units: Sequence[_Hooked]) -> RecordedUnit:
    others = {each.module for each in units if each is not unit}
    inner = {id(p) for m in unit.module.modules() if m in others for p in m.parameters()}
    own = [param for param in unit.module.parameters() if id(param) not in inner]
    full = sum(param.numel() * param.element_size() for param in own)
    here = sum(map(_bytes_here, own))
    return RecordedUnit(unit.name, sum(param.numel() for param in own), full, here, full)


def _bytes_here(tensor: Tensor) -> int:
    return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes


def _hook(unit: _Hooked, recorder: OpRecorder, waits: bool) -> list[Any]:
    """Let hooks tell ``recorder`` of a module; return their handles."""
    begun: list[Any] = []

    def enter(*_: Any) -> None:
        begun.append(recorder.mark() if recorder.kinds else None)

    def run(*_: Any) -> None:
        begin = begun.pop()
        if waits and begin is not None:
            recorder.note("await_gather", unit, begin, recorder.mark())
        recorder.begins("forward", unit)

    def leave(_: nn.Module, inputs: Any, options: Any, output: Any) -> None:
        recorder.ends("forward", unit)
        outputs = tensors_with_gradients(output)
        if torch.is_grad_enabled() and outputs:
            receiving = tensors_with_gradients((inputs, options))
            _once(outputs, lambda: begin_backward(not receiving), "any")
            _once(receiving, end_backward, "all")

    def begin_backward(to_its_end: bool) -> None:
        recorder.begins("backward", unit)
        if to_its_end:
            Variable._execution_engine.queue_callback(end_backward)

    def end_backward() -> None:
        recorder.ends("backward", unit)

    module = unit.module
    return [
        module.register_forward_pre_hook(enter, prepend=True),
        module.register_forward_pre_hook(run),
        module.register_forward_hook(leave, with_kwargs=True),
    ]


_OF_BACKWARD = {
    "pre_backward": "await_gather",
    "post_backward": "await_reduce",
    "finalize_backward": "await_reduce",
}


def _fsdp_groups(module: nn.Module) -> Sequence[Any]:
    """Return what PyTorch's FSDP2 keeps for a module, if this torch has what we call there."""
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    several = getattr(state, "_fsdp_param_groups", None)
    groups = [getattr(state, "_fsdp_param_group", None)] if several is None else several
    return [group for group in groups if all(hasattr(group, name) for name in _OF_BACKWARD)]


class _TimedCall:
    """A method of one object whose time is noted as a wait, until `remove`."""

    def __init__(self, owner: Any, name: str, wait: str, unit: _Hooked, recorder: OpRecorder):
        self._owner, self._name = owner, name
        plain = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            begin = recorder.mark() if recorder.kinds else None
            result = plain(*arguments, **options)
            if begin is not None:
                recorder.note(wait, unit, begin, recorder.mark())
            return result

        setattr(owner, name, timed)

    def remove(self) -> None:
        delattr(self._owner, self._name)


def _once(tensors: Sequence[Tensor], tell: Callable[[], None], mode: Any) -> None:
    if tensors:
        register_multi_grad_hook(tensors, lambda *_: tell(), mode=mode)
