# SPDX-License-Identifier: Apache-2.0
"""Functions of `test_hierarchical_comm` for the four ranks of a Gloo world, taken for two hosts."""

import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
from support.stack import WIDTH, Stack
from support.workers import collectives

from fullshard.torch import fully_shard
from fullshard.torch.comm import hierarchical as hierarchical_comm
from fullshard.torch.comm.hierarchical import HierarchicalComm, hierarchical_between_hosts
from fullshard.torch.comm.process_group import ProcessGroupComm, witness_of
from fullshard.torch.comm.sibling_groups import sibling_group
from fullshard.torch.comm.watch.watchdog import Standing
from fullshard.torch.step.managed import managed_unit_of

NUMEL = 320


@contextmanager
def ranks_per_host(count):
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
    """What ``rank`` brings into a reduce."""
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)).to(dtype)


def chosen_forms(group):
    """What is chosen for each number of ranks on a host; None is the truth, one host."""
    found = {}
    for count in (None, 1, 2, 4):
        with ranks_per_host("" if count is None else count):
            found[count] = type(hierarchical_between_hosts(ProcessGroupComm(group))).__name__
    return found


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


def without_further_groups(group):
    """All collectives with a torch in which no sibling of a group can be made."""
    hierarchical_comm.sibling_group = lambda *args: None
    try:
        return collectives(HierarchicalComm(ProcessGroupComm(group), 2))
    finally:
        hierarchical_comm.sibling_group = sibling_group


def calls_counted(group):
    """How many collectives a roll call takes for issued: after each of a few calls, and at last."""
    comm = HierarchicalComm(ProcessGroupComm(group), 2)
    witness = witness_of(comm)
    places, family = witness.watchdog.places, witness.family

    def issued():
        return places.get(family, Standing()).issued  # nothing yet, if this call is the first

    before, counts, works = issued(), [], []
    for _ in range(3):
        works.append(comm.all_gather([(torch.empty(8), torch.ones(2))]))
        works.append(comm.reduce_scatter([(torch.empty(2), torch.ones(8))]))
        counts.append(issued() - before)
    for work in works:
        work.wait()
    return [*counts, issued() - before]


def trained(group, count):
    """The gathers' communicator and parameters after steps with ``count`` ranks on a host."""
    with ranks_per_host(count):
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
