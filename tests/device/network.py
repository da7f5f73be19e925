# SPDX-License-Identifier: Apache-2.0
"""Collectives as NCCL carries them out, for one rank of a fake process group.

Each communicator has a stream of its own. A collective runs there behind the position of the stream
that issues it; ``wait()`` puts the then current stream behind it and holds no host; the tensors are
kept until then. One that is issued to block runs on the current stream.
"""

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from device.machine import COMPUTE, HOST, where
from device.operations import is_on_device


def is_question(label):
    """True for what ranks ask each other about optional units."""
    return label.startswith(("question for optional units", "which units a backward may reach"))


class Network:
    """The methods of process groups that stand for ``machine``."""

    def __init__(self, machine, memories):
        self.machine, self.memories = machine, memories
        self._awaited = {}  # tensors by tag, of which others send what this rank does
        single = {
            "all_gather_single": self._method("all_gather", lambda o, i, *_: ([o], [i])),
            "reduce_scatter_single": self._method("reduce_scatter", lambda o, i, *_: ([o], [i])),
            "all_to_all_single": self._method("all_to_all", lambda o, i, *_: ([o], [i])),
            "allreduce": self._method("all_reduce", lambda ts, *_: (_listed(ts), _listed(ts))),
            "broadcast": self._method("broadcast", lambda ts, *_: (_listed(ts), [])),
            "all_gather_single_coalesced": self._method("all_gather", lambda o, i, *_: (o, i)),
            "reduce_scatter_single_coalesced": self._method(
                "reduce_scatter", lambda o, i, *_: (o, i)
            ),
            # Of slices of unequal sizes, by a list with those of all ranks.
            "allgather": self._method("all_gather", lambda os, i, *_: (os[0], i)),
            "reduce_scatter": self._method("reduce_scatter", lambda o, of, *_: (o, of[0])),
            "scatter": self._method("scatter", lambda ts, of, *_: (ts, of[0] if of else [])),
            "send": self._method("send", self._sent),
            "recv": self._method("recv", self._awaits),
            "barrier": self._method("barrier", lambda *_: ([], [])),
        }
        older = {
            "_allgather_base": "all_gather_single",
            "_reduce_scatter_base": "reduce_scatter_single",
            "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
            "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
            "alltoall_base": "all_to_all_single",
        }
        named = single | {name: single[new] for name, new in older.items()}
        self.names = {k: v for k, v in named.items() if hasattr(dist.ProcessGroup, k)}

    def _method(self, kind, tensors_of):
        def call(group, *args, **kwargs):
            options = kwargs.get("opts", args[-1] if args else None)
            outputs, inputs = tensors_of(*args)
            if kind == "broadcast" and group.rank() == options.rootRank:
                outputs, inputs = [], outputs  # others only receive
            return self.issue(kind, group, outputs, inputs, getattr(options, "asyncOp", True))

        return call

    def _awaits(self, tensors, _source, tag):
        self._awaited.setdefault(tag, []).extend(tensors)
        return tensors, []

    def _sent(self, tensors, _target, tag):
        for awaited in self._awaited.pop(tag, ()):
            if isinstance(awaited, FakeTensor):
                self.memories.derive(tensors, [awaited])
            else:
                awaited.copy_(tensors[0])
        return [], tensors

    def _answer(self, tensors):
        """Give the host what other ranks have answered in a rehearsal, if it asks them."""
        label = self.machine.label
        if not is_question(label):
            return
        expected, values = self.machine.answers.pop(0) if self.machine.answers else ("", [])
        if label != expected:
            self.machine.find(f"the host asks for {label!r} instead of {expected!r}")
            return
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)

    def issue(self, kind, group, outputs, inputs, beside):
        machine = self.machine
        if kind == "all_reduce" and not any(is_on_device(tensor) for tensor in inputs):
            self._answer(inputs)
        shapes = tuple((t.numel(), str(t.dtype)) for t in (*outputs, *inputs))
        if kind == "scatter" or len(outputs) > len(inputs):  # the source alone has inputs
            shapes = shapes[: len(outputs)]
        elif len(outputs) < len(inputs):
            shapes = shapes[len(outputs) :]
        if machine.running:
            summed = inputs if kind == "all_reduce" else []
            numbers = [number for t in summed for number in self.memories.of(t).numbers]
            machine.collectives.append((group.group_name, kind, machine.label, shapes, numbers))
        machine.label = ""
        on_device = any(is_on_device(tensor) for tensor in (*outputs, *inputs))
        if any(tensor.is_complex() for tensor in (*outputs, *inputs)):
            machine.find(f"{kind} sends complex numbers, which NCCL does not know")
        by_engine = where() != "the program"
        if on_device and not beside and machine.current == COMPUTE and by_engine:
            machine.find(f"{kind} holds up the stream of computation")
        timeline = machine.current if on_device else HOST
        if on_device and beside:
            timeline = f"nccl {group.group_name}"
            machine.put_behind(timeline, machine.position(machine.current))
        machine.step(timeline)
        for tensor in inputs:
            self.memories.touch(tensor, False, timeline, kind)
        for tensor in outputs:
            self.memories.touch(tensor, True, timeline, kind)
        filled = outputs if len(outputs) == len(inputs) else outputs[group.rank() :]
        for pair in zip(inputs, filled, strict=False) if kind == "all_gather" else ():
            self.memories.derive(*([tensor] for tensor in pair))
        sent = sum(t.numel() * t.element_size() for t in inputs)
        received = sum(t.numel() * t.element_size() for t in outputs)
        ways = 2 if kind == "all_reduce" else 1
        machine.send(timeline, kind, ways * max(sent, received), group.size())
        kind_of_work = Work if on_device else WorkOnHost
        return kind_of_work(machine, machine.position(timeline), (outputs, inputs))


class Work(dist.Work):
    def __init__(self, machine, position, kept):
        super().__init__()
        self._machine, self._position = machine, position
        # Whoever looks after works lets go of the tensors of those that are done.
        self._kept = None if machine.completes_at_once else kept

    def wait(self, timeout=None):
        self._machine.put_behind(self._machine.current, self._position)
        self._kept = None
        return True

    def is_completed(self):
        return self._machine.ask(self._position)


class WorkOnHost(Work):
    """A work of Gloo's, which asks no device; its answer depends on time as well."""

    def is_completed(self):
        return self._kept is None or self._machine.answer()


def _listed(tensors):
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]
