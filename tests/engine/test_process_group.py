# SPDX-License-Identifier: Apache-2.0
"""Works of process groups that have been waited for hold nothing any more."""

import weakref
from types import SimpleNamespace

import torch
import torch.distributed as dist

from fullshard.torch.comm.process_group import _Pending, forget_destroyed

CPU = torch.device("cpu")


class Work:
    """One that keeps its output, as those of NCCL do."""

    def __init__(self):
        self.output = torch.ones(4)

    def wait(self):
        pass

    def is_completed(self):
        return False


def a_witness():
    return SimpleNamespace(pending=None, waits=lambda what, works: [work.wait() for work in works])


def test_outputs_may_go_once_they_have_been_waited_for():
    witness, works = a_witness(), [Work()]
    witness.pending = ("a gather", 1.0, works)
    output = weakref.ref(works[0].output)
    pending = _Pending(witness, "a gather", works, None, CPU)
    del works
    assert output() is not None
    pending.wait()
    assert output() is None
    assert witness.pending is None


def test_a_later_collective_is_still_looked_at():
    witness, works, later = a_witness(), [Work()], [Work()]
    pending = _Pending(witness, "a gather", works, None, CPU)
    witness.pending = ("another gather", 2.0, later)
    pending.wait()
    assert witness.pending == ("another gather", 2.0, later)


def test_on_a_device_a_mark_is_looked_at_instead(monkeypatch):
    event = SimpleNamespace(query=lambda: event.done, done=False)
    stream = SimpleNamespace(record_event=lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    witness, works = a_witness(), [Work()]
    witness.pending = ("a gather", 1.0, works)
    _Pending(witness, "a gather", works, None, torch.device("cuda", 0)).wait()
    what, begin, (mark,) = witness.pending
    assert (what, begin, mark.is_completed()) == ("a gather", 1.0, False)
    event.done = True
    assert mark.is_completed()


class Key:
    """Stands for a key that is no process group, as the communicator of a thread."""


def test_communicators_of_destroyed_groups_are_forgotten():
    gone, other = dist.ProcessGroup(0, 1), Key()
    known = weakref.WeakKeyDictionary({gone: "its communicator", other: "a thread's"})
    forget_destroyed(known)
    assert list(known.values()) == ["a thread's"]
