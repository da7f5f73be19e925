# SPDX-License-Identifier: Apache-2.0
"""The world of threads must be unkind in the ways it promises, or tests on it prove nothing."""

import threading

import pytest
import torch
from support.collectives import collectives
from support.limits import PEERS_S
from support.threads import on_ranks
from support.world import on_processes

from fullshard.core.errors import ConfigurationError
from fullshard.testing import LocalWorld, LocalWorldError
from fullshard.torch.comm.process_group import ProcessGroupComm
from fullshard.torch.comm.protocol import Comm, SoloComm, rank_order_sum


@pytest.mark.parametrize("eager", [False, True])
def test_values_of_collectives(eager):
    for rank, (full, part, extremes, sent) in enumerate(
        LocalWorld(3, eager=eager).run(collectives)
    ):
        assert full == [1, 2, 11, 12, 21, 22]
        assert part == [3 * x for x in full[2 * rank : 2 * rank + 2]]
        assert (extremes, sent) == ([2, 0], 2)


@on_processes(3)
def test_gloo_has_the_same_values(group):
    assert collectives(ProcessGroupComm(group)) == LocalWorld(3).run(collectives)[group.rank()]


def test_a_group_of_one_has_the_same_values():
    assert isinstance(SoloComm(), Comm)
    assert collectives(SoloComm()) == LocalWorld(1).run(collectives)[0]


@on_ranks(2)
def test_outputs_are_poisoned_until_waited_for(comm):
    full = torch.zeros(4)
    work = comm.all_gather([(full, torch.ones(2))])
    before = full.isnan().all().item()
    completed = work.is_completed()
    work.wait()
    assert (before, completed, full.tolist()) == (True, False, [1, 1, 1, 1])


def test_an_input_changed_under_way_is_found():
    def body(comm):
        shard = torch.ones(2)
        work = comm.all_gather([(torch.zeros(4), shard)])
        shard.add_(1)
        work.wait()

    with pytest.raises(LocalWorldError, match="was changed or freed before the collective"):
        LocalWorld(2).run(body)


def test_ranks_that_disagree_are_found():
    def body(comm):
        comm.all_reduce([torch.zeros(1 + comm.rank)]).wait()

    with pytest.raises(LocalWorldError, match=r"calls .* where another rank calls"):
        LocalWorld(2).run(body)


def test_one_ranks_failure_reaches_those_who_wait():
    def body(comm):
        if comm.rank == 1:
            raise KeyError("the first error")
        comm.all_reduce([torch.zeros(1)]).wait()

    with pytest.raises(KeyError, match="the first error"):
        LocalWorld(3).run(body)


def test_a_rank_that_never_comes_is_named():
    given_up, both_sent = threading.Event(), threading.Barrier(2)

    def body(comm):
        if comm.rank == 2:
            given_up.wait()
            return
        try:
            work = comm.all_reduce([torch.zeros(1)])
            both_sent.wait(PEERS_S)  # or one of them is late, too
            work.wait()
        finally:
            given_up.set()

    with pytest.raises(LocalWorldError, match=r"waited 0.05 s .* for ranks \[2\]"):
        LocalWorld(3, timeout_s=0.05).run(body)
    with pytest.raises(ConfigurationError, match="at least 1 rank, got 0"):
        LocalWorld(0)


def test_low_precision_is_summed_in_fp32_and_rounded_once():
    out = torch.empty(1, dtype=torch.bfloat16)
    parts = [torch.tensor([x], dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0)]
    rank_order_sum(parts, out)
    assert out.item() == 258
    assert sum(parts).item() == 256
