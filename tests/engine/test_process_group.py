# SPDX-License-Identifier: Apache-2.0
"""Process groups: works that hold nothing any more, and the options of derived groups."""

import weakref
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.world import on_processes
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

from fullshard.core.errors import NotSupportedError
from fullshard.torch.comm import process_group
from fullshard.torch.comm.process_group import ProcessGroupComm, _Pending, forget_destroyed
from fullshard.torch.comm.protocol import Parts
from fullshard.torch.comm.sibling_groups import options_like, sibling_group, without_host

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


class NcclOptions:
    """Stands for those of NCCL, which a build of torch without it does not have."""

    def __init__(self):
        self.is_high_priority_stream = False
        self.config = SimpleNamespace(min_ctas=4)
        self.split_from = object()


class Uncopyable:
    def __deepcopy__(self, memo):
        raise TypeError("cannot pickle this")


class Group:
    """A group with a backend for each device: Gloo for the host, NCCL, wrapped, for others."""

    group_name = "a group"

    def __init__(self, **options_by_device):
        self._options = options_by_device
        self._device_types = [torch.device(name) for name in options_by_device]

    def _get_backend(self, device):
        name = "gloo" if device.type == "cpu" else "nccl"
        backend = SimpleNamespace(name=lambda: name, options=self._options[device.type])
        return backend if name == "gloo" else SimpleNamespace(name=lambda: name, wrapped_pg=backend)


def test_options_that_nobody_takes_or_can_copy_are_left_out():
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=9))
    assert options_like(Group(cpu=gloo.options)) is None
    assert options_like(Group(cuda=Uncopyable())) is None
    assert options_like(Group(cuda=None)) is None


def test_only_duplicates_ask_for_high_priority(monkeypatch):
    asked = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **given: asked.append(given))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    group = Group(cpu=dist.ProcessGroupGloo._Options(), cuda=NcclOptions())
    sibling_group(group, [0, 1], "duplicate", high_priority=True)
    sibling_group(group, [0, 1], "block")
    sibling_group(group, [0, 1], "host", "gloo")
    passed = [each["pg_options"] for each in asked]
    assert [each and each.is_high_priority_stream for each in passed] == [True, False, None]
    assert passed[0] is not passed[1]
    # Nor do they connect all ranks in host memory a second time.
    assert [each["backend"] for each in asked] == ["cuda:nccl", "cpu:gloo,cuda:nccl", "gloo"]
    assert [without_host(each) for each in ("cpu:gloo", "gloo", "nccl")] == [
        "cpu:gloo",
        "gloo",
        "nccl",
    ]


def test_an_extreme_takes_as_many_rounds_as_the_number_of_ranks_has_bits(monkeypatch):
    sent = []
    monkeypatch.setattr(dist, "irecv", lambda tensor, **_: tensor.fill_(7))
    monkeypatch.setattr(dist, "isend", lambda tensor, group_dst, **_: sent.append(group_dst))
    for size, rounds in ((1, 0), (2, 1), (3, 2), (64, 6), (16_384, 14)):
        comm = object.__new__(ProcessGroupComm)
        comm.rank, comm.size, comm.group = size - 1, size, None
        comm.witness = SimpleNamespace(issues=lambda what: None, waits=lambda what, works: None)
        comm._routes = {CPU: SimpleNamespace(on_gloo=True)}
        sent.clear()
        comm.all_reduce([torch.zeros(3)], "max").wait()
        assert sent == [2**number - 1 for number in range(rounds)]


@pytest.mark.parametrize("gathers", [True, False])
def test_a_call_takes_the_equal_slices_of_one_dtype_and_unequal_ones_go_alone(gathers):
    """As on NCCL; a single pair goes by the call for one."""
    calls = []

    def noted(name):
        return lambda outputs, inputs, _options: calls.append((name, len(outputs)))

    names = ("_GATHER", "_GATHERS") if gathers else ("_REDUCE", "_REDUCES")
    single, several = (getattr(process_group, name) for name in names)
    alone = "allgather" if gathers else "reduce_scatter"
    group = SimpleNamespace(**{name: noted(name) for name in (single, several, alone)})
    comm = SimpleNamespace(group=group, _options=dict.fromkeys([single]))
    route = process_group._Route(None, on_gloo=False, together=True)

    def send(*kinds):
        tensors, fulls = [], []
        for dtype, unequal in kinds:
            full, shard = torch.zeros(4, dtype=dtype), torch.zeros(2, dtype=dtype)
            tensors += [full, shard] if gathers else [shard, full]
            fulls.append(Parts(full, [2, 2]) if unequal else full)
        ProcessGroupComm._by_pairs(comm, single, route, tensors, fulls)
        found = calls.copy()
        calls.clear()
        return found

    wide, low = (torch.float32, False), (torch.bfloat16, False)
    assert send(wide, low, (torch.float32, True), wide) == [(alone, 1), (several, 2), (several, 1)]
    assert send((torch.float32, True), wide) == [(alone, 1), (single, 4 if gathers else 2)]
    assert send(low) == [(single, 4 if gathers else 2)]
    assert send((torch.float32, True)) == [(alone, 1)]


@pytest.mark.parametrize("size", [2, 3])
@on_processes("size")
def test_extremes_are_those_of_all_ranks(group, size):
    comm = ProcessGroupComm(group)
    for numel, dtype in ((1, torch.float32), (5, torch.int64), (0, torch.float32)):
        values = torch.arange(numel).add(comm.rank).to(dtype)
        most, least = values.clone(), values.clone()
        comm.all_reduce([most], "max").wait()
        comm.all_reduce([least, values], "min").wait()
        assert most.tolist() == [number + size - 1 for number in range(numel)]
        assert least.tolist() == values.tolist() == list(range(numel))


def test_a_group_without_a_backend_is_refused_by_name():
    with pytest.raises(NotSupportedError, match=r"ProcessLocalGroup has no backend.*LocalWorld"):
        ProcessGroupComm(ProcessLocalGroup(0, 2))
