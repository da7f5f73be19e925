# SPDX-License-Identifier: Apache-2.0
"""Programs of ranks that hear of each other: watchdogs, roll calls, failures, and two stages."""

import io
import json
import os
import threading
import time
from contextlib import ExitStack, contextmanager, redirect_stderr
from types import SimpleNamespace
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from support.models import loss_of
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh

from device.network import Work
from device.programs import adamw, gpt, program, shard, wrapped
from device.values import refused
from device.world import real
from fullshard import torch as ours
from fullshard.core.errors import CommunicationError
from fullshard.core.strategy import Sharding
from fullshard.torch.comm import hierarchical, process_group, ranks
from fullshard.torch.comm.process_group import witness_of
from fullshard.torch.comm.watch import roll_call, watchdog
from fullshard.torch.comm.watch.parting import PARTED
from fullshard.torch.comm.watch.watchdog import Watchdog, Witness
from fullshard.torch.step.managed import managed_unit_of

OF_THIS_PROCESS = Watchdog.__dict__["of_this_process"]
PATIENCE_S = 20  # for a thread that has something to do in a few hundredths of a second
GONE = RuntimeError("[tcp.cc:1] Connection closed by peer")


class Watched:
    """A wrapped model on the device, its watchdog, and what the other ranks write to the store."""

    def __init__(self, job):
        self.dog = Watchdog.of_this_process()
        self.model = wrapped(gpt(), job.mesh)
        self.optimizer = adamw(self.model)
        self.witness = witness_of(managed_unit_of(self.model).unit.ranks.gather)

    def summon(self):
        with ours.FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            pass

    def tell(self, *records):
        """Write for the other ranks, in turns, what their watchdogs would."""
        others = [rank for rank in self.witness.members if rank != self.dog.rank]
        usual = {"at": time.time(), "places": {}, "rolls": {}, "left": False}
        for place, rank in enumerate(others):
            record = usual | records[place % len(records)]
            self.dog.store.set(str(rank), json.dumps(record))


@contextmanager
def watched(job):
    """Within, new communicators tell a store what they do."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    quick = {"PERIOD_S": 0.04, "FAREWELL_S": 0.0, "STUCK_S": 0.02}
    with ExitStack() as stack:
        for patch in (
            mock.patch.multiple(watchdog, own_store=store.clone, **quick),
            mock.patch.object(Watchdog, "of_this_process", OF_THIS_PROCESS),
            mock.patch.object(Watchdog, "_current", None),
            mock.patch.object(ranks, "_communicators", WeakKeyDictionary()),
            mock.patch.object(roll_call, "PATIENCE_S", 0.01),
            redirect_stderr(io.StringIO()),
        ):
            stack.enter_context(patch)
        jobs = Watched(job)
        stack.callback(jobs.dog.stop)
        yield jobs


def everybody_comes():
    """Within, the other ranks call a roll when this one does."""
    add = roll_call._Roll._add
    return mock.patch.object(
        roll_call._Roll, "_add", lambda roll, n: add(roll, n * roll._size if n > 0 else n)
    )


def fails(job, call, *told):
    """``call`` raises an error that tells all this of the others."""
    try:
        call()
    except CommunicationError as error:
        for each in told:
            if each not in str(error):
                job.machine.find(f"nothing is said of {each!r} in {str(error)!r}")
    else:
        job.machine.find("nobody sees a failure")


@program("watched")
def _(job):
    with watched(job) as our:
        with everybody_comes():
            job.train(our.model, our.optimizer)
            our.summon()
        heard, told = threading.Event(), []
        our.dog.listeners += [told.append, lambda _: heard.set()]
        our.witness.timeout_s = 0.01
        with everybody_comes():
            our.summon()
        if not heard.wait(PATIENCE_S) or "not done yet" not in told[0]:
            job.machine.find(f"a gather is late, and the watchdog says {told}")


@program("a rank calls alone")
def _(job):
    with watched(job) as our:
        family = our.witness.family
        for elsewhere in (
            {"places": {family: [0, 10**6]}, "issued": ["gather of unit 'x'", time.time()]},
            {"rolls": {family: "state_dict()"}, "calling": ["state_dict()", time.time()]},
            {"left": True},
        ):
            our.tell(elsewhere)
            refused(job, our.summon)
        our.tell({})
        our.witness.timeout_s = 0.01
        refused(job, our.summon)  # nobody comes
        with everybody_comes():
            job.train(our.model, our.optimizer)


@program("a collective fails", shape=(8,))
def _(job):
    def forward():
        our.model(job.inputs())

    now, step = time.time(), ["reduce of unit 'x'", time.time()]
    with watched(job) as our:
        our.tell(
            {"failed": step},
            {"left": True},
            {"at": now - 100, "waiting": step},
            {"calling": ["state_dict()", now], "at": now + 100},
            {"waiting": step, "at": now + 100},
            {"issued": step, "finished": step, "at": now + 100},
            {"issued": step, "at": now + 100},
        )
        job.begin()
        gone = mock.Mock(side_effect=GONE)
        gathers = (process_group._GATHER, process_group._GATHERS)
        with mock.patch.multiple(dist.ProcessGroup, **dict.fromkeys(gathers, gone)):
            told = ("Connection closed", "failed in", "no sign of life", "call state_dict()")
            fails(job, forward, *told, "in reduce of", "last finished", "last issued")
        fails(job, our.model.state_dict, "stops before", "its group has failed")


@program("a collective fails on the device")
def _(job):
    with watched(job) as our:
        job.begin()
        with mock.patch.object(Work, "wait", side_effect=GONE):
            fails(job, lambda: our.model(job.inputs()), "failed on rank", "no sign of life at all")


@program("the store ends")
def _(job):
    ended = mock.Mock(**dict.fromkeys(("set.side_effect", "check.side_effect"), GONE))
    with watched(job) as our:
        job.begin()
        our.dog.stop()
        our.dog._store_is_gone, our.dog._lifeline = False, None  # nobody has noticed
        ends = mock.patch.object(our.dog, "store", ended)
        with ends, mock.patch.object(Work, "wait", side_effect=GONE):
            told = ("failed on rank", "the other ranks are doing is not known")
            fails(job, lambda: our.model(job.inputs()), *told)


@program("ranks part")
def _(job):
    with watched(job) as our:
        job.begin()
        other = our.witness.watchdog.calls
        our.model(job.inputs())
        our.tell({"calls": {name: [[1, "something else"]] for name in other}})
        end = time.monotonic() + PATIENCE_S
        while our.witness.family not in our.dog.announced and time.monotonic() < end:
            time.sleep(0.01)
        fails(job, lambda: our.model(job.inputs()), PARTED, "something else")


class AtOnce:
    """In place of a queue: calls advance as they come, without a thread."""

    put = staticmethod(lambda call: None if call is None else call.advance())
    get = staticmethod(lambda: None)


def address_of(tensor):
    return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()


@contextmanager
def on_gloo(ranks_per_host):
    """Within, Gloo carries what is on the host; yields a mesh of hosts of so many ranks."""
    with ExitStack() as stack:
        for patch in (
            mock.patch.dict(os.environ, {hierarchical.PRETEND: str(ranks_per_host)}),
            mock.patch.object(hierarchical, "ranks_per_host", return_value=ranks_per_host),
            mock.patch.object(hierarchical, "backend_of", return_value="gloo"),
            mock.patch.object(hierarchical, "queue", SimpleNamespace(SimpleQueue=AtOnce)),
            mock.patch.object(ranks, "backend_of", return_value="gloo"),
            mock.patch.object(FakeTensor, "data_ptr", address_of),
            mock.patch.object(process_group, "backend_of", return_value="gloo"),
            mock.patch.object(ranks, "_communicators", WeakKeyDictionary()),
        ):
            stack.enter_context(patch)
        with real():
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            ranks.ranks_of(mesh, Sharding(True, True, replicated=False))
        yield mesh


def train_on_host(job, mesh, **options):
    model = shard(gpt("cpu"), mesh, **options)
    x = torch.zeros(2, 8, dtype=torch.long)
    job.train(model, each_step=lambda _: loss_of(model(x), x).backward())
    str(ours.memory_summary(model)), str(ours.communication(model))


@program("two stages between hosts", shape=(6,))
def _(job):
    waits, seen = Witness.waits, set()

    def waited(witness, what, works):
        seen.add(what)
        waits(witness, what, works)

    with on_gloo(2) as mesh:
        with mock.patch.object(Witness, "waits", waited):
            train_on_host(job, mesh)
        if not any(each.startswith("gather of unit") for each in seen):
            job.machine.find("no watchdog sees who waits for a gather")
        train_on_host(job, mesh, align="matrix")


@program("two stages in blocks of two hosts", shape=(8,))
def _(job):
    with on_gloo(2) as mesh:
        train_on_host(job, mesh, reshard_after_forward=4)


@program("a device that Gloo cannot reach", syncs=("process_group.py", "agreement.py"))
def _(job):
    with on_gloo(1):
        job.train(shard(gpt(), job.mesh))
