# SPDX-License-Identifier: Apache-2.0
"""Faults of the engine's order, one at a time: each wait, event, join and keep-alive left out.

`MUTANTS` must each be found by one of the programs named with it. `EQUIVALENT` change nothing that
can be observed; the reason is their value's.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from fullshard.torch.comm import process_group
from fullshard.torch.comm.protocol import Done, Together
from fullshard.torch.unit import gradients, streams
from fullshard.torch.unit.buffers import FlatBuffer
from fullshard.torch.unit.full_gradients import FullGradients
from fullshard.torch.unit.full_parameters import FullParameters
from fullshard.torch.unit.gradients import Gradients
from fullshard.torch.unit.packing import PackedArrival
from fullshard.torch.unit.streams import CopyStream


@dataclass(frozen=True)
class Mutant:
    """``changes`` are (owner, name, stand-in); ``programs`` those of which one must find it."""

    changes: tuple
    programs: tuple[str, ...]


def nothing(*args, **kwargs):
    return None


def _works_without_wait(method):
    """``method`` of a communicator, whose result nobody can wait for."""

    def call(*args, **kwargs):
        method(*args, **kwargs)
        return Done()

    return call


def _except(owner, name, chosen):
    """Leave out ``owner.name`` for the units, ops or arguments that are ``chosen``."""
    method = getattr(owner, name)

    def call(self, *args, **kwargs):
        return None if chosen(self, *args) else method(self, *args, **kwargs)

    return (owner, name, call)


def _before(owner, name, first):
    method = getattr(owner, name)

    def call(self, *args, **kwargs):
        first(self)
        return method(self, *args, **kwargs)

    return (owner, name, call)


def _after(owner, name, then):
    method = getattr(owner, name)

    def call(self, *args, **kwargs):
        result = method(self, *args, **kwargs)
        then(self)
        return result

    return (owner, name, call)


# ---- streams ------------------------------------------------------------------------------------


@contextmanager
def _beside_without_wait(self):
    stream = streams._stream_for(self._device, self._direction)
    with torch.cuda.stream(stream):
        yield
        self._last = stream.record_event()


@contextmanager
def _event_before_copies(self):
    stream = streams._stream_for(self._device, self._direction)
    stream.wait_stream(torch.cuda.current_stream(self._device))
    with torch.cuda.stream(stream):
        self._last = stream.record_event()
        yield


@contextmanager
def _no_event(self):
    stream = streams._stream_for(self._device, self._direction)
    stream.wait_stream(torch.cuda.current_stream(self._device))
    with torch.cuda.stream(stream):
        yield


def _only(direction, stand_in, name):
    """``stand_in`` for the streams of one direction only."""
    method = getattr(CopyStream, name)

    def call(self, *args):
        wanted = self._direction == direction and self._device.type == "cuda"
        return (stand_in if wanted else method)(self, *args)

    return (CopyStream, name, call)


# ---- waits --------------------------------------------------------------------------------------


def _wait_without_work(self):
    if self._gathering is not None:
        self._gathering = _Unawaited(self._gathering)
    _wait(self)


def _unpack_first(self):
    if self._gathering is not None and self._packed is not None and self.part is None:
        self._packed.there.allocate()
        self._packed._unpacking.copy()
    _wait(self)


_wait = FullParameters.wait


def _reduce_freeing_at_once(self):
    _reduce(self)
    self.full.release()


def _reduce_letting_go(self):
    _reduce(self)
    self.full.sent = []


_reduce = Gradients.reduce
_all_reduce = Gradients.all_reduce
_to_rest = Gradients._to_rest


def _without_waiting_works(method):
    """Gradients' ``method`` with works that are taken for finished."""

    def call(self):
        if self._work is not None:
            self._work = _Unawaited(self._work)
        return method(self)

    return call


class _Unawaited:
    """A work that is kept, and not waited for."""

    def __init__(self, work):
        self.work = work

    def wait(self):
        pass

    def is_completed(self):
        return self.work.is_completed()


def _await_without_second_wait(self):
    if self._work is not None:
        self.all_reduce()
        if self._work is not gradients._DONE:
            self._work = _Unawaited(self._work)
    return _await_all(self)


_await_all = Gradients.await_all


def _drop_without_wait(self):
    self._work = None if self._work is None else _Unawaited(self._work)
    return _drop_gradients(self)


_drop_gradients = Gradients.drop


def _evict_without_keeping(self, onboard):
    host = _evict(self, onboard)
    self._leaving.clear()
    return host


_evict = Gradients._evict


def _evict_on_compute(self, onboard):
    """The copy's memory is pageable: the host waits for it."""
    host = FlatBuffer([(f.numel(), f.dtype) for f in onboard.flats], self._plan.resting_device)
    with self._to_host.behind_compute():
        for to, flat in zip(host.flats, onboard.flats, strict=True):
            to.copy_(flat, non_blocking=True)
    return host


def _let_go_without_join(self):
    self._leaving.clear()


def _converted_on_compute(self, shards):
    """Across on the stream of computation, while the gather runs behind the copy stream."""
    with torch.cuda.stream(torch.cuda.default_stream()):
        return _converted(self, shards)


_converted = FullParameters._converted


def _blocking_fetch(self, shards):
    def to(tensor, *args, non_blocking=False, **kwargs):
        return _to(tensor, *args, **kwargs)

    with mock.patch.object(Tensor, "to", to):
        return _converted(self, shards)


_to = Tensor.to


def _unpack_leaving_holes(self):
    self._fills = False
    _unpack(self)


_unpack = PackedArrival.unpack


def _shrink_without_wait(self):
    self._gathering, late = None, self._gathering
    part = _shrink(self)
    self._gathering = late
    return part


_shrink = FullParameters.shrink


def _drop_full_without_wait(self):
    if self.part is not None:
        self.part = None
        return False
    self._release()
    return True


def _gather_without_allocating(self, custom):
    with mock.patch.object(FlatBuffer, "allocate", nothing):
        _gather(self, custom)


_gather = FullParameters.gather


def _let_part_go(self):
    if self.part is not None:
        self.part = FlatBuffer([], self._plan.device)


def _pending_without_works(self, witness, what, works, finish=None, device=None):
    _pending_init(self, witness, what, (), finish, device)


_pending_init = process_group._Pending.__init__


def _together_without_keeping(self, works, finish=None, *in_flight):
    _together_init(self, works, finish)


def _together_without_waiting(self, works, finish=None, *in_flight):
    _together_init(self, [], finish)


_together_init = Together.__init__


def _look_past_padding(self, buffer):
    _look_into(self, buffer)
    self._padding.clear()


_look_into = FullGradients._look_into


def _item_in_reduce(self):
    _reduce(self)
    self._reduced.flats[0][0].item()


def _synchronizing_gather(self, custom):
    _gather(self, custom)
    torch.cuda.synchronize()


_FULL = ("full",)
_OFFLOAD = ("offload", "offload replicas")
_HYBRID = ("hybrid", "bf16 hybrid", "hybrid accumulation")
_BACKWARDS = ("an exception in backward", "an exception in a hybrid backward")
_behind = "behind_compute"

MUTANTS = {
    # the copies' streams
    "fetches do not wait for compute": Mutant(
        (_only("to the device", _beside_without_wait, _behind),), _OFFLOAD
    ),
    "evictions do not wait for compute": Mutant(
        (_only("to the host", _beside_without_wait, _behind),), _OFFLOAD
    ),
    "fetches are marked before they are issued": Mutant(
        (_only("to the device", _event_before_copies, _behind),), ("NO_SHARD offloaded",)
    ),
    "evictions are marked before they are issued": Mutant(
        (_only("to the host", _event_before_copies, _behind),), _OFFLOAD
    ),
    "fetches are not marked": Mutant(
        (_only("to the device", _no_event, _behind),), ("NO_SHARD offloaded",)
    ),
    "evictions are not marked": Mutant((_only("to the host", _no_event, _behind),), _OFFLOAD),
    "no join": Mutant(((CopyStream, "join", nothing),), _OFFLOAD),
    "no join of fetches": Mutant(
        (_only("to the device", nothing, "join"),), ("NO_SHARD offloaded",)
    ),
    "no join of evictions": Mutant((_only("to the host", nothing, "join"),), _OFFLOAD),
    "the host waits for no copies": Mutant(((CopyStream, "synchronize", nothing),), _OFFLOAD),
    "the host waits for no evictions": Mutant(
        (_only("to the host", nothing, "synchronize"),), _OFFLOAD
    ),
    "the host waits for no fetches": Mutant(
        (_only("to the device", nothing, "synchronize"),), ("evaluation offloaded",)
    ),
    # gathers
    "gathers are not waited for": Mutant(((FullParameters, "wait", _wait_without_work),), _FULL),
    "unwaited gathers in bf16": Mutant(((FullParameters, "wait", _wait_without_work),), ("bf16",)),
    "unwaited gathers of offloaded shards": Mutant(
        ((FullParameters, "wait", _wait_without_work),), _OFFLOAD
    ),
    "no wait at the schedule's await": Mutant(((FullParameters, "wait", nothing),), _FULL),
    "shards cross on the compute stream": Mutant(
        ((FullParameters, "_converted", _converted_on_compute),), _OFFLOAD
    ),
    "fetches block the host": Mutant(((FullParameters, "_converted", _blocking_fetch),), _OFFLOAD),
    "packed parameters are unpacked before they are there": Mutant(
        ((FullParameters, "wait", _unpack_first),), _FULL
    ),
    "what arrives packed is freed when its gather is issued": Mutant(
        (_after(FullParameters, "gather", lambda self: self._packed.arriving.release()),), _FULL
    ),
    "what lies between packed parameters is not filled": Mutant(
        ((PackedArrival, "unpack", _unpack_leaving_holes),), ("blocks of 2",)
    ),
    "gathers get no memory": Mutant(
        ((FullParameters, "gather", _gather_without_allocating),), _FULL
    ),
    "a gather from the block passes for one from all": Mutant(
        (_after(FullParameters, "gather", lambda self: setattr(self, "part", None)),),
        ("blocks of 2",),
    ),
    "gathers hold up the host": Mutant(((FullParameters, "gather", _synchronizing_gather),), _FULL),
    "full parameters are freed when gathered": Mutant(
        (_after(FullParameters, "gather", lambda self: self._buffer.release()),), _FULL
    ),
    "full parameters are freed when they are there": Mutant(
        (_after(FullParameters, "wait", lambda self: self._buffer.release()),), _FULL
    ),
    # reduces
    "full gradients are freed when the reduce is issued": Mutant(
        ((Gradients, "reduce", _reduce_freeing_at_once),), _FULL
    ),
    "reduces are not waited for": Mutant(
        ((Gradients, "all_reduce", _without_waiting_works(_all_reduce)),), _FULL
    ),
    "unwaited reduces before the all-reduce": Mutant(
        ((Gradients, "all_reduce", _without_waiting_works(_all_reduce)),), _HYBRID
    ),
    "unwaited reduces in bf16": Mutant(
        ((Gradients, "all_reduce", _without_waiting_works(_all_reduce)),), ("bf16",)
    ),
    "all-reduces are not waited for": Mutant(
        ((Gradients, "await_all", _await_without_second_wait),), _HYBRID
    ),
    "gradients are dropped under way": Mutant(
        ((Gradients, "drop", _drop_without_wait),), _BACKWARDS
    ),
    "a reduce does not wait for the same unit's before it": Mutant(
        (_before(Gradients, "reduce", lambda self: setattr(self, "_work", None)),),
        ("the reduce of a single unit left under way",),
    ),
    # What travels packed is zeroed where it has holes, and so always written: by element there are
    # none.
    "gradients are not copied to where they are sent from": Mutant(
        ((FullGradients, "_copy", nothing),), ("FULL_SHARD",)
    ),
    "padding is not zeroed": Mutant(
        ((FullGradients, "_look_into", _look_past_padding),), ("odd parameters", "full over 3")
    ),
    "the host looks at every reduce": Mutant(((Gradients, "reduce", _item_in_reduce),), _FULL),
    # evictions
    "evicted gradients are not kept": Mutant(
        ((Gradients, "_evict", _evict_without_keeping),), _OFFLOAD
    ),
    "evictions to pageable memory": Mutant(((Gradients, "_evict", _evict_on_compute),), _OFFLOAD),
    "evicted gradients are let go without a join": Mutant(
        ((Gradients, "let_go", _let_go_without_join),), _OFFLOAD
    ),
    # the communicator
    "works are lost": Mutant(
        ((process_group._Pending, "__init__", _pending_without_works),), _FULL
    ),
    "what follows a compressed gather comes first": Mutant(
        ((Together, "__init__", _together_without_waiting),), ("gathers in int8", "reduces in int8")
    ),
}

EQUIVALENT = {
    "units are shrunk before they are there": (
        Mutant(((FullParameters, "shrink", _shrink_without_wait),), ("blocks of 2",)),
        "the schedule awaits every gather before it shrinks the unit",
    ),
    "a block's part is dropped when its gather is issued": (
        Mutant((_after(FullParameters, "gather", _let_part_go),), ("blocks of 2",)),
        "the works of torch.distributed keep their tensors until they are waited for",
    ),
    "messages of a compressed reduce are not kept": (
        Mutant(((Together, "__init__", _together_without_keeping),), ("reduces in int8",)),
        "the works of torch.distributed keep their tensors until they are waited for",
    ),
    "gradients that are sent as they were made are let go when their reduce is issued": (
        Mutant(((Gradients, "reduce", _reduce_letting_go),), _FULL),
        "the works of torch.distributed keep their tensors until they are waited for",
    ),
    "full parameters are dropped without a wait": (
        Mutant(((FullParameters, "drop", _drop_full_without_wait),), _FULL),
        "the schedule awaits every gather before it frees the unit",
    ),
}


@contextmanager
def applied(mutant):
    """Run the engine with the fault within."""
    before = [(owner, name, owner.__dict__[name]) for owner, name, _ in mutant.changes]
    try:
        for owner, name, stand_in in mutant.changes:
            setattr(owner, name, stand_in)
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)
