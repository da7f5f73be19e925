# SPDX-License-Identifier: Apache-2.0
"""One rank of a job on simulated devices: everything of torch that stands for a machine."""

from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from device.machine import Machine
from device.network import Network
from device.operations import Memories, Operations
from device.streams import Streams
from device.updates import Updates
from fullshard.torch import capture
from fullshard.torch.comm import ranks
from fullshard.torch.comm.watch.watchdog import Watchdog, Witness
from fullshard.torch.sharding import summon
from fullshard.torch.step import optional, usage
from fullshard.torch.tensor import placements
from fullshard.torch.unit import full_parameters, shards
from fullshard.torch.unit import streams as engine_streams
from fullshard.torch.unit.buffers import MemorySource
from fullshard.torch.unit.sites import notes_on
from fullshard.torch.unit.unit import Unit

overlap_optimizer = import_module("fullshard.torch.optim.overlap_optimizer")  # not the function


@contextmanager
def rank_of_job(rank, size, machine=None):
    """Within, torch runs on a simulated device as one rank of ``size``; yields its `Machine`.

    Groups and meshes are to be made here; the program runs within `on_device`.
    """
    machine = machine or Machine()
    memories = Memories(machine)
    resize = torch.UntypedStorage.resize_

    def resize_(storage, nbytes):
        memories.resize(storage, nbytes)
        return resize(storage, nbytes)

    def nothing(*_):  # a Mock would take as long as an operation
        pass

    with ExitStack() as stack:
        for name, stand_in in Streams(machine).names.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        for name, stand_in in Network(machine, memories).names.items():
            stack.enter_context(mock.patch.object(dist.ProcessGroup, name, stand_in))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize_))
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", nothing))
        # Nobody else is there whom it could tell anything.
        nobody = classmethod(lambda cls: None)
        stack.enter_context(mock.patch.object(Watchdog, "of_this_process", nobody))
        issues = Witness.issues

        def labelled(witness, what):
            machine.label = what
            issues(witness, what)

        stack.enter_context(mock.patch.object(Witness, "issues", labelled))
        stack.enter_context(
            mock.patch.object(overlap_optimizer, "HostUpdates", partial(Updates, machine))
        )
        stack.enter_context(mock.patch.dict(engine_streams._streams, clear=True))
        stack.enter_context(mock.patch.dict(MemorySource._of, clear=True))
        stack.enter_context(mock.patch.object(MemorySource, "is_set", False))
        shapes = _unwatched(memories, ShardingPropagator._propagate_tensor_meta_non_cached)
        name = "_propagate_tensor_meta_non_cached"
        stack.enter_context(mock.patch.object(ShardingPropagator, name, shapes))
        stack.enter_context(mock.patch.object(ranks, "backend_of", return_value="nccl"))
        stack.enter_context(mock.patch.object(capture, "backend_of", return_value="nccl"))
        asking = (optional._Question, "ask"), (optional.OptionalUnits, "_compare_marks")
        for module, name in (
            *((usage, "_settle"), (placements, "_joined")),
            *(*asking, (optional.OptionalUnits, "settle")),
        ):
            real = _with_values(getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, real))
        for module in (full_parameters, shards, summon):
            stack.enter_context(mock.patch.object(module, "notes_on", _notes_of_users))
        # A fake tensor cannot become of another class.
        same = mock.patch.object(FakeTensor, "as_subclass", lambda self, kind: self, create=True)
        stack.enter_context(same)
        stack.enter_context(_units_with_versions(memories))
        stack.enter_context(_groups_with_options(machine))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        stack.callback(dist.destroy_process_group)
        machine.memories = memories
        yield machine


@contextmanager
def _units_with_versions(memories):
    """Units tell where weights rest, and each use of full parameters is looked at."""
    use, rest_in = Unit.use, Unit.rest_in

    def used(unit):
        use(unit)
        memories.check_fresh(unit)

    def resting(unit, shards):
        rest_in(unit, shards)
        if isinstance(shards.buffer.memory, FakeTensor):
            memories.of(shards.buffer.memory).weights = True

    with mock.patch.object(Unit, "use", used), mock.patch.object(Unit, "rest_in", resting):
        yield


def _options():
    return SimpleNamespace(_timeout=dist.default_pg_timeout, is_high_priority_stream=False)


@contextmanager
def _groups_with_options(machine):
    """Groups of the fake backend keep what they are made with, as NCCL's do."""
    made = {}

    def create(common, options):
        options = options or _options()
        backend = FakeProcessGroup._create_internal(common.group_rank, common.group_size)
        made[id(backend)] = backend, options
        machine.high_priority[common.group_id] = options.is_high_priority_stream
        return backend

    plugin = dist.Backend._BackendPlugin(create, extended_api=True)
    options = property(lambda backend: made[id(backend)][1])
    with (
        mock.patch.dict(dist.Backend._plugins, FAKE=plugin),
        mock.patch.object(FakeProcessGroup, "options", options),
    ):
        yield


def real():
    """Within, tensors have values, as those of meshes and of what is asked on the host."""
    return _disable_current_modes()


def _with_values(function):
    """``function``, which asks other ranks by tensors on the host: these are real, and our own."""

    def call(*args, **kwargs):
        with real():
            return function(*args, **kwargs)

    return call


def _notes_of_users(param):
    """Return the notes of users on a parameter, without those that make it a fake tensor."""
    notes = notes_on(param)
    if isinstance(param, FakeTensor):
        bare = torch.empty(0, device=param.device).__dict__
        notes = {name: note for name, note in notes.items() if name not in bare}
    return notes


def _unwatched(memories, method):
    """DTensor works out shapes with tensors that nobody fills."""

    def call(*args, **kwargs):
        before, memories.watched = memories.watched, False
        try:
            return method(*args, **kwargs)
        finally:
            memories.watched = before

    return call


@contextmanager
def on_device(machine):
    """Within, tensors are fake, and what is done with them is looked at."""
    # torch.tensor(1, device="cuda") makes its tensor on the host, and asks us to copy it.
    lifted = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    with (
        torch.autograd.set_multithreading_enabled(False),
        FakeTensorMode(allow_non_fake_inputs=True),
        Operations(machine, machine.memories),
    ):
        machine.running = True
        try:
            yield
        finally:
            machine.running = False
            torch._C._set_only_lift_cpu_tensors(lifted)
