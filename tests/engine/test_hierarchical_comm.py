# SPDX-License-Identifier: Apache-2.0
"""Exchanges in two stages: the direct form's values, less over the link, nobody waits in vain."""

import gc
import os
import random
import threading
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from support.collectives import collectives
from support.limits import PEERS_S
from support.stack import WIDTH, Stack
from support.threads import on_ranks
from support.world import on_processes

from fullshard.core.errors import ConfigurationError
from fullshard.testing import LocalComm, LocalWorld, LocalWorldError
from fullshard.torch import fully_shard
from fullshard.torch.comm.checked import CheckedComm
from fullshard.torch.comm.hierarchical import (
    HierarchicalComm,
    hierarchical_between_hosts,
    ranks_per_host,
)
from fullshard.torch.comm.process_group import ProcessGroupComm, witness_of
from fullshard.torch.comm.protocol import Comm, rank_order_sum
from fullshard.torch.comm.sibling_groups import sibling_group
from fullshard.torch.comm.watch.watchdog import Standing
from fullshard.torch.step.managed import managed_unit_of

NUMEL = 320


@contextmanager
def set_ranks_per_host(count):
    os.environ["FULLSHARD_RANKS_PER_HOST"] = str(count)
    yield
    del os.environ["FULLSHARD_RANKS_PER_HOST"]


@contextmanager
def sends_counted(counts):
    """Within, ``counts[rank]`` grows by the bytes sent to it."""
    isend = dist.isend

    def counted(tensor, *, group, group_dst, tag):
        target = dist.get_global_rank(group, group_dst)
        counts[target] = counts.get(target, 0) + tensor.nbytes
        return isend(tensor, group=group, group_dst=group_dst, tag=tag)

    dist.isend = counted
    yield
    dist.isend = isend


def part_of(rank, dtype):
    """Return the tensor that ``rank`` brings into a reduce."""
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)).to(dtype)


def gathered_and_reduced(group, dtype):
    """A gather and a reduce in two stages, and what each rank was sent in either."""
    comm = HierarchicalComm(ProcessGroupComm(group), 2)
    mine = part_of(comm.rank, dtype)
    full, shard = torch.empty(comm.size * NUMEL, dtype=dtype), torch.empty(NUMEL // 4, dtype=dtype)
    gather_sent, reduce_sent = {}, {}
    with sends_counted(gather_sent):
        comm.all_gather([(full, mine)]).wait()
    with sends_counted(reduce_sent):
        comm.reduce_scatter([(shard, mine)]).wait()
    return full, shard, gather_sent, reduce_sent, comm.reduce_scratch_bytes(full) / full.nbytes


def trained(group, count):
    """The gathers' communicator and parameters after steps with ``count`` ranks on a host."""
    with set_ranks_per_host(count):
        fresh = sibling_group(group, range(4), "trained")  # communicators are kept by group
        return trained_over(fresh, group.rank())


def trained_over(where, rank, **options):
    """The type of the gathers' communicator and parameters after a few steps, in fp64."""
    model, generator = Stack(3).double(), torch.Generator().manual_seed(0)
    for param in model.parameters():  # the default generator is that of all threads
        torch.nn.init.normal_(param, std=WIDTH**-0.5, generator=generator)
    for each in (*model.blocks, model):
        fully_shard(each, mesh=where, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank)).double()
    for _ in range(4):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    gather = managed_unit_of(model.blocks[0]).unit.ranks.gather
    return type(gather).__name__, [param.detach().full_tensor() for param in model.parameters()]


def sum_by_hosts(parts, per_host):
    """What the note on the order of sums promises."""

    def summed(tensors):
        total = torch.empty_like(tensors[0])
        rank_order_sum(tensors, total)
        return total

    return summed([summed(parts[i : i + per_host]) for i in range(0, len(parts), per_host)])


@pytest.mark.parametrize(
    ("hosts", "count"),
    [
        ("aabb", 2),
        ("aaabbbccc", 3),
        ("aaaa", 4),
        ("abcd", 1),
        ("abab", 1),  # not consecutive
        ("aabbb", 1),  # not equally many
        ("aab", 1),
        ("aabbaa", 1),
    ],
)
def test_how_many_ranks_a_host_has(hosts, count):
    assert ranks_per_host(hosts) == count


@pytest.mark.parametrize(("size", "per_host"), [(4, 2), (6, 2), (6, 3)])
@pytest.mark.parametrize("eager", [False, True])
def test_every_collective_has_the_values_of_the_direct_form(size, per_host, eager):
    def body(comm):
        hierarchical = HierarchicalComm(comm, per_host)
        assert isinstance(hierarchical, Comm)
        checked = CheckedComm(HierarchicalComm(comm.duplicate(), per_host))
        return collectives(hierarchical), collectives(checked)

    for direct, found in zip(
        LocalWorld(size).run(collectives), LocalWorld(size, eager=eager).run(body), strict=True
    ):
        assert found == (direct, direct)


@on_ranks(4, timeout_s=PEERS_S)
def test_calls_may_be_waited_for_in_any_order_on_each_rank(comm):
    gathers, order = HierarchicalComm(comm, 2), random.Random(comm.rank)
    reduces = gathers.duplicate()
    issued = []
    for number in range(24):
        mine = torch.full((2,), float(number + comm.rank))
        if number % 3:
            full = torch.empty(8)
            issued.append((gathers.all_gather([(full, mine)]), full, number))
        else:
            shard, which = torch.empty(2), (gathers, reduces)[number // 3 % 2]
            whole = mine.repeat(4)
            issued.append((which.reduce_scatter([(shard, whole)]), shard, number))
        if order.random() < 0.3:
            time.sleep(0.002)
    order.shuffle(issued)
    for work, out, number in issued:
        work.wait()
        if number % 3:
            assert out.tolist() == [number + r for r in range(4) for _ in range(2)]
        else:
            assert out.tolist() == [4 * number + 6] * 2
        work.wait()  # again: nothing
        assert work.is_completed()


def test_what_fails_between_stages_is_raised_where_it_is_waited_for():
    def body(comm):
        if comm.rank == 3:
            raise ValueError("rank 3 has gone")
        work = HierarchicalComm(comm, 2).all_gather([(torch.empty(4), torch.ones(1))])
        with pytest.raises(LocalWorldError, match="waits for a rank that has failed"):
            work.wait()
        assert work.is_completed()
        with pytest.raises(LocalWorldError, match="waits for a rank that has failed"):
            work.wait()
        raised.append(comm.rank)

    raised = []
    with pytest.raises(ValueError, match="rank 3 has gone"):
        LocalWorld(4).run(body)
    assert sorted(raised) == [0, 1, 2]


def test_the_thread_ends_with_its_communicator():
    def threads():
        return sum(thread.name == "fullshard stages" for thread in threading.enumerate())

    def body(comm):
        hierarchical = HierarchicalComm(comm, 2)
        hierarchical.all_gather([(torch.empty(4), torch.ones(1))]).wait()
        return threads()

    gc.collect()
    assert min(LocalWorld(4).run(body)) > 0
    deadline = time.monotonic() + PEERS_S
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == 0


def test_blocks_of_whole_hosts_have_two_stages_others_do_not():
    def body(comm):
        hierarchical = HierarchicalComm(comm, 2)
        blocks = [hierarchical.block(size) for size in (1, 2, 4, 8)]
        return [type(block) for block in blocks], [block.size for block in blocks]

    two = HierarchicalComm
    expected = ([LocalComm, LocalComm, two, two], [1, 2, 4, 8])
    assert LocalWorld(8).run(body) == [expected] * 8


@on_ranks(4)
def test_hosts_must_have_equally_many_ranks(comm):
    with pytest.raises(ConfigurationError, match="ranks_per_host=3 must divide the 4 ranks"):
        HierarchicalComm(comm, 3)


@pytest.mark.parametrize(
    ("size", "options"),
    [(4, {}), (8, {"reshard_after_forward": 4})],
    ids=str,
)
@on_ranks("size")
def test_training_is_as_in_the_direct_form(comm, size, options):
    hierarchical = trained_over(HierarchicalComm(comm, 2), comm.rank, **options)
    (name, found), (_, expected) = hierarchical, trained_over(comm, comm.rank, **options)
    assert name == "HierarchicalComm"
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("size", [2, 4])
@on_processes("size")
def test_processes_choose_it_for_several_ranks_on_several_hosts(group, size):
    for count in ("", 1, 2, 4):  # ranks on a host; nothing is the truth, one host
        with set_ranks_per_host(count):
            chosen = type(hierarchical_between_hosts(ProcessGroupComm(group)))
        assert chosen is (HierarchicalComm if (size, count) == (4, 2) else ProcessGroupComm)


def test_a_wrong_number_of_ranks_is_refused(gloo_world):
    with pytest.raises(RuntimeError, match=r"FULLSHARD_RANKS_PER_HOST must be a number .* got 'x'"):
        gloo_world.run(4, trained, "x")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_processes_send_each_slice_over_the_link_once(gloo_world, dtype):
    parts = [part_of(rank, dtype) for rank in range(4)]
    found = gloo_world.run(4, gathered_and_reduced, dtype)
    for full, _, _, _, scratch in found:
        assert torch.equal(full, torch.cat(parts))
        assert scratch == 1
    assert torch.equal(torch.cat([shard for _, shard, *_ in found]), sum_by_hosts(parts, 2))
    for kind, full_bytes in ((2, 4 * parts[0].nbytes), (3, parts[0].nbytes)):
        over_link = [0, 0]
        for rank, result in enumerate(found):
            sent = result[kind]
            assert sum(sent.values()) == full_bytes * 3 // 4  # as in the direct form
            over_link[rank // 2] += sum(b for to, b in sent.items() if to // 2 != rank // 2)
        assert over_link == [full_bytes // 2] * 2  # the direct form: all of it


@on_processes(4)
def test_a_call_counts_once_however_far_its_stages_are(group):
    comm = HierarchicalComm(ProcessGroupComm(group), 2)
    witness = witness_of(comm)
    places, family = witness.watchdog.places, witness.family

    def issued():
        return places.get(family, Standing()).issued  # nothing yet, if this call is the first

    before, works = issued(), []
    for number in range(3):
        works.append(comm.all_gather([(torch.empty(8), torch.ones(2))]))
        works.append(comm.reduce_scatter([(torch.empty(2), torch.ones(8))]))
        assert issued() - before == 2 * number + 2
    for work in works:
        work.wait()
    assert issued() - before == 6


def test_processes_train_as_in_the_direct_form(gloo_world):
    two_stages, direct = gloo_world.run(4, trained, 2), gloo_world.run(4, trained, 1)
    for (name, found), (direct_name, expected) in zip(two_stages, direct, strict=True):
        assert (name, direct_name) == ("HierarchicalComm", "ProcessGroupComm")
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
