# SPDX-License-Identifier: Apache-2.0
"""Capture of a step as a CUDA graph, on the simulated device.

Within a capture, streams belong to it from where they wait for what it has recorded. CUDA ends it
with an error if the host waits or asks, if one of its streams waits for what came before it, or if
one is not joined at its end; a graph is wrong if it touches memory that was given away meanwhile.
No graph runs here: a replay is noted, nothing else.
"""

import gc
import itertools
import os
import tempfile
from contextlib import contextmanager, nullcontext
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from device import cost
from device.machine import HOST, Machine
from device.mutants import Mutant, applied
from device.programs import Stack, program, shard
from device.world import on_device, rank_of_job
from fullshard import torch as ours
from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.report import recording
from fullshard.torch.comm import ranks
from fullshard.torch.step.managed import managed_units

BLOCKS, TOKENS = 3, 16


class _Position(dict):
    captured = False  # recorded on a stream of the capture that runs
    timeline = HOST


class Capturing(Machine):
    """A machine that knows which of its streams are in a capture."""

    def __init__(self):
        super().__init__()
        self.streams = set()  # of the capture that runs
        self.graphs = []  # the operations of each
        self.notes = []
        self._owned = set()
        self._positions = []

    @contextmanager
    def capture(self, graph, **_):
        stream, before = "capture", self.current
        self.step(HOST)
        self.put_behind(stream, self.position(before))
        self.streams, self.current, self.notes, self._owned = {stream}, stream, [], set()
        asked, waited = self.questions, self.syncs.total()
        try:
            yield
        finally:
            end, streams = self.position(stream), self.streams
            for other in streams:
                if end.get(other, 0) < self.clock(other)[other]:
                    self.find(f"{other} is not joined when the capture ends")
            if (asked, waited) != (self.questions, self.syncs.total()):
                self.find("the host asks or waits in a capture")
            self.streams, self.current = set(), before
            for position in self._positions:
                position.captured = False
            self.put_behind(before, end)
            graph.notes = list(self.notes)
            self.graphs.append(graph)

    def position(self, timeline):
        position = _Position(super().position(timeline))
        position.captured, position.timeline = timeline in self.streams, timeline
        self._positions += [position] if position.captured else []
        return position

    def put_behind(self, timeline, position):
        if self.streams and HOST not in (timeline, getattr(position, "timeline", "")):
            if getattr(position, "captured", False):
                self.streams.add(timeline)
                self.step(timeline)  # which must be joined, even if nothing else comes
            elif timeline in self.streams:
                self.find(f"{timeline} waits in a capture for what came before it")
        super().put_behind(timeline, position)

    def step(self, timeline):
        if self.streams and timeline != HOST and timeline not in self.streams:
            self.find(f"{timeline} is given work in a capture of which it is no part")
        return super().step(timeline)

    def allocate(self, size, home, label, *, pinned=False):
        memory = super().allocate(size, home, label, pinned=pinned)
        if self.streams:
            self._owned.add(id(memory))
            self.notes.append(("allocate", size))
        return memory

    def free(self, memory):
        super().free(memory)
        if self.streams and memory.home != HOST and memory.size and id(memory) not in self._owned:
            self.find(f"{memory.label} is given away in a capture, and the graph has its address")

    def touch(self, memory, span, write, timeline, what, *, again=False):
        super().touch(memory, span, write, timeline, what, again=again)
        if timeline != HOST:
            self.notes.append((what, memory.size, span, write))


class _Graph:
    replays = 0

    def replay(self):
        self.replays += 1


def captured(reduces):
    """Capture a step of a model; tell what was found, and if it has a step's operations."""
    with rank_of_job(0, cost.RANKS, Capturing()) as machine:
        mesh = init_device_mesh("cuda", (cost.RANKS,), mesh_dim_names=("shard",))
        ranks.ranks_of(mesh, cost.FULL_SHARD)
        names = {"CUDAGraph": _Graph, "graph": machine.capture}
        with mock.patch.multiple(torch.cuda, **names), on_device(machine):
            model = cost.model_of("fullshard", BLOCKS, reduces, mesh)
            model.order = range(BLOCKS)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
            x = torch.zeros(1, TOKENS, 4096, dtype=torch.bfloat16, device="cuda")

            def step():
                machine.notes = []
                loss = model(x).float().square().mean()
                loss.backward()
                return loss.detach()

            graphed = ours.capture_step(model, step)
            for _ in range(2):
                assert graphed.replay() is graphed.output
                assert all(param.grad is not None for param in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
            step()  # without the graph, in between
            usual = [note for note in machine.notes if note[0] != "allocate"]
            (graph,) = machine.graphs
        notes = [note for note in graph.notes if note[0] != "allocate"]
    return {
        "captured": reduces,
        "findings": list(machine.findings),
        "operations": len(notes),
        "as without": notes == usual,
        "replays": graph.replays,
    }


# Edits of the engine after which a step cannot be captured, or is captured wrong.
FAULTS = {
    "the stream of early gathers follows each forward": (
        "unit.streams:EarlyStream.begin", "self._begun =",
        "self._stream.wait_stream(self._module.current_stream()); self._begun =",
    ),
    "reduces are not joined": (
        "unit.gradients:Gradients.all_reduce", "self._work.wait()", "pass",
    ),
    "the device is asked if reduces are there": (
        "unit.gradients:Gradients.completed", 'self._plan.device.type != "cpu"', "False",
    ),
    "buffers keep what they had before the capture": (
        "unit.full_parameters:FullParameters._release", "self._buffer.release()", "pass",
    ),
    "replays leave gradients as they are": (
        "capture:CapturedStep.replay", "param.grad = grad", "pass",
    ),
    "a step that has not been replayed is captured": (
        "capture:capture_step", "for _ in range(warm_up)", "for _ in range(0)",
    ),
}  # fmt: skip


def faults():
    """A dict for each of `FAULTS`: what finds it, an error or what the machine has found."""
    for name, edit in FAULTS.items():
        with applied(Mutant((edit,), ())):
            try:
                found = captured("bf16")["findings"][:1]
            except Exception as error:
                found = [f"{type(error).__name__}: {error}"[:200]]
        yield {"captured fault": name, "found": found}


def _stack(job, device="cuda", **options):
    with torch.device(device):
        model = Stack([nn.Linear(64, 64) for _ in range(3)])
    return shard(model, job.mesh, **options)


@program("steps that cannot be captured", syncs=("agreement.py", "recorded_model.py"))
def _(job):
    def refuses(wanted, model, step=lambda: job.machine.find("a step runs"), **options):
        try:
            ours.capture_step(model, step, **options)
        except (NotSupportedError, UsageError) as error:
            if wanted not in str(error):
                job.machine.find(f"{error}, which says nothing of {wanted}")
        else:
            job.machine.find(f"{wanted} is captured")

    refuses("rests on the host", _stack(job, "cpu", offload_policy=ours.CPUOffloadPolicy()))
    stepping = _stack(job)
    ours.overlap_optimizer(stepping, torch.optim.SGD(stepping.parameters(), lr=0.1))
    refuses("optimizer in backward", stepping)
    with mock.patch.dict(os.environ, FULLSHARD_DEBUG="1"):
        fresh = mock.patch.object(ranks, "_communicators", WeakKeyDictionary())
        with fresh:
            refuses("other ways than NCCL's", _stack(job))
    optional = _stack(job)
    ours.mark_optional(optional.blocks[1])
    refuses("optional units", optional)
    model = _stack(job)
    with tempfile.TemporaryDirectory() as folder, recording(folder, model, None):
        refuses("a recording", model)
    orders = itertools.cycle([(0, 1, 2), (0, 2, 1)])

    def step():
        model.order = next(orders)
        model(torch.zeros(2, 64, device="cuda")).sum().backward()

    refuses("in another order", model, step)

    def leave():
        model(torch.zeros(2, 64, device="cuda")).sum()

    refuses("with all units at rest", model, leave)
    del stepping, optional
    gc.collect()  # models that were refused
    step()
    model.zero_grad()
    job.at_rest(model)


@program("a replay after a step that was put off", syncs=("agreement.py",))
def _(job):
    model = _stack(job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ours.overlap_optimizer(model, optimizer, beside="forward")

    def step():
        model(torch.zeros(2, 64, device="cuda")).sum().backward()

    def late():
        return [managed.number for managed in managed_units(model) if managed.unit.put_off]

    names = {"CUDAGraph": _Graph, "graph": lambda _: nullcontext()}
    with mock.patch.multiple(torch.cuda, **names):
        graphed = ours.capture_step(model, step)
    for _ in range(2):  # the first step is made at once
        graphed.replay()
        optimizer.step()
    assert late()
    graphed.replay()
    if late():
        job.machine.find(f"a graph reads the parameters of units {late()}, whose step is put off")
    optimizer.zero_grad()
    del graphed
    job.at_rest(model, optimizer)
