# SPDX-License-Identifier: Apache-2.0
"""What is collective and called on some ranks only: told at once, and nobody is disturbed."""

import random
import re
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.limits import PEERS_S
from support.stack import shard_stack, step
from support.world import on_processes
from torch.distributed import distributed_c10d as c10d

from fullshard.core.errors import UsageError
from fullshard.testing import LocalWorld
from fullshard.torch import (
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    save_full_weights,
    summon_full_params,
)
from fullshard.torch.comm.process_group import ProcessGroupComm
from fullshard.torch.comm.protocol import SoloComm
from fullshard.torch.comm.watch.roll_call import _Roll, call_roll

INSTEAD = "call it on every rank"


def attempt(comms, what="look()"):
    """The error's text (None if all came), and how long it took."""
    begin = time.monotonic()
    try:
        call_roll(comms, what, INSTEAD)
    except UsageError as error:
        return str(error), time.monotonic() - begin
    return None, time.monotonic() - begin


def enter_summon(model):
    with summon_full_params(model):
        pass


MISHAPS = {
    1: lambda model: model.state_dict(),
    2: lambda model: save_full_weights(model, "never"),
    3: enter_summon,
    4: lambda model: next(model.parameters()).full_tensor(),
}


def training_with_mishaps(group, mishaps):
    """Before some steps rank 0 alone does what all must do. The weights in the end."""
    torch.manual_seed(0)
    model = shard_stack(group, align="element")  # DTensors are handed out without a roll call
    optimizer = torch.optim.AdamW(model.parameters())
    told = []
    for number in range(5):
        if number in MISHAPS and mishaps and group.rank() == 0:
            begin = time.monotonic()
            try:
                MISHAPS[number](model)
            except UsageError as error:
                told.append((str(error), time.monotonic() - begin))
        optimizer.zero_grad()
        step(model, optimizer)
    weights = {name: each.full_tensor() for name, each in model.state_dict().items()}
    return told, weights


def peer_has_left():
    """Return what rank 0 is told when rank 1 has left the group after a roll call and a sum."""
    dist.init_process_group("gloo")
    comm = ProcessGroupComm(dist.group.WORLD)
    call_roll(comm, "look()", INSTEAD)
    comm.all_reduce([torch.ones(1)]).wait()
    told = attempt(comm)[0] if comm.rank == 0 else None
    dist.destroy_process_group()
    return told


def loading_alone(group):
    """Rank 0 alone loads what is exchanged between ranks, while the others go on; what it is told.

    And the weights in the end.
    """
    torch.manual_seed(0)
    model = shard_stack(group, align="element")  # DTensors are handed out without a roll call
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    states = {model: model.state_dict(), optimizer: optimizer.state_dict()}
    told = []
    for target, state in states.items():
        if group.rank() == 0:
            try:
                target.load_state_dict(state)
            except UsageError as error:
                told.append(str(error))
        optimizer.zero_grad()
        step(model, optimizer)
    weights = {name: each.full_tensor() for name, each in model.state_dict().items()}
    return told, weights


def test_what_one_rank_calls_alone_is_told_and_training_goes_on(gloo_world):
    mishaps = gloo_world.run(3, training_with_mishaps, True)
    without = gloo_world.run(3, training_with_mishaps, False)
    told = mishaps[0][0]
    whole = "full_tensor() of 'blocks.0.0.weight'"
    whats = ("state_dict()", "save_full_weights()", "summon_full_params()", whole)
    for what, (text, waited_s) in zip(whats, told, strict=True):
        first, others, *_, last = text.splitlines()
        assert first == f"rank 0 calls {what}, which all of ranks [0, 1, 2] must call; but"
        assert re.match(
            r"  ranks? \S+: in gather of unit 'blocks.0'(?: of model \d+)? for \d+\.\d s$", others
        )
        assert "on every rank" in last
        assert waited_s < PEERS_S / 2
    assert "torch.distributed.checkpoint.save" in told[0][0]  # of what fully_shard hands out
    assert [each[0] for each in (*mishaps[1:], *without)] == [[]] * 5
    for (_, weights), (_, wanted) in zip(mishaps, without, strict=True):
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


@on_processes(3)
def test_a_late_rank_is_waited_for(group):
    """Ranks that are far apart, with a collective under way, call the same rolls."""
    comm = ProcessGroupComm(group)
    for turn in range(2):
        full = torch.empty(comm.size)
        work = comm.all_gather([(full, torch.tensor([float(comm.rank)]))], label="ahead")
        time.sleep(0.7 * (comm.rank if turn else comm.size - 1 - comm.rank))
        assert attempt([comm, comm.duplicate()])[0] is None
        work.wait()


@on_processes(4)
def test_rolls_for_different_things_are_told_on_all_ranks(group):
    """Half of the ranks save, half look; then all look."""
    comm = ProcessGroupComm(group)
    here, there = ("look()", "save()") if comm.rank % 2 else ("save()", "look()")
    text, waited_s = attempt(comm, here)
    assert f"rank {comm.rank} calls {here}" in text
    assert f"until all ranks call {there}" in text
    assert waited_s < PEERS_S / 2  # not the end of patience
    # Who is told first must not be gone, unseen, before the others have looked.
    with comm.witness.watchdog.calling(here, [comm.witness.family]):
        dist.barrier(group)
    assert attempt(comm)[0] is None


@on_processes(4)
def test_without_the_others_it_ends_at_the_timeout_of_the_group(group):
    """Rank 0 waits for others that are in a barrier of torch's own; then all come."""
    comm = ProcessGroupComm(dist.new_group(range(4), timeout=timedelta(seconds=3)))
    if comm.rank == 0:
        text, waited_s = attempt(comm)
        assert 3 <= waited_s < PEERS_S / 2
        assert "rank 0 has called look()" in text
        assert "timeout of 3 s" in text
        assert re.search(r"rank.* 1.*: .*\n", text)
    dist.barrier(group)
    assert attempt(comm)[0] is None


@on_processes(4)
def test_ranks_of_another_group_need_not_come_and_several_rolls_are_called_at_once(group):
    """Pairs of ranks call rolls of their own; then each rank those of two groups at once."""
    rank = group.rank()
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    row, column = ProcessGroupComm(rows[rank // 2]), ProcessGroupComm(columns[rank % 2])
    if rank < 2:
        assert attempt(row)[0] is None
        dist.barrier(group)
        # These call what all must call, while the others are in a collective of their columns.
        crossed = attempt([row, column])[0]
        assert f"all of ranks [{rank}, {rank + 2}] must call" in crossed
        assert f"rank {rank + 2}: in sum of a column" in crossed
        column.all_reduce([torch.ones(1)], label="sum of a column").wait()
    else:
        dist.barrier(group)
        column.all_reduce([torch.ones(1)], label="sum of a column").wait()
        assert attempt(row)[0] is None
    assert attempt([column, row] if rank % 2 else [row, column])[0] is None


@on_processes(3)
def test_nothing_stays_in_the_store(group):
    comm, store = ProcessGroupComm(group), c10d._get_default_store()
    attempt(comm)
    comm.witness.watchdog.publish()  # what a rank is doing stays there, under one key
    dist.barrier(group)
    before = store.num_keys()
    dist.barrier(group)
    for number in range(20):
        attempt(comm, f"look({number})")
    dist.barrier(group)
    assert store.num_keys() == before


def test_threads_and_single_ranks_are_not_asked():
    call_roll(SoloComm(), "look()", "")
    assert LocalWorld(2).run(lambda comm: comm.rank or call_roll([comm], "look()", "")) == [None, 1]


def test_all_come_or_none_whoever_leaves_when():
    """Threads come and leave at random moments: a roll is complete for all of them or for none."""
    size, rounds = 4, 60
    store = dist.HashStore()
    completed = [[] for _ in range(size)]
    together = threading.Barrier(size)

    def come_and_go(rank):
        chance = random.Random(rank)
        witness = SimpleNamespace(family="f", members=tuple(range(size)))
        watchdog = SimpleNamespace(rank=rank, places={}, store=store)
        for _ in range(rounds):
            together.wait()
            time.sleep(chance.random() * 1e-3)
            roll = _Roll(witness, watchdog, "look()")
            end = time.monotonic() + chance.random() * 2e-3
            while not (complete := roll.is_complete()) and time.monotonic() < end:
                time.sleep(1e-5)
            if not complete:
                roll.leave()
                complete = roll.is_complete()
            completed[rank].append(complete)

    threads = [threading.Thread(target=come_and_go, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PEERS_S)
    assert completed[1:] == completed[:1] * (size - 1)
    assert len(set(completed[0])) == 2, "all rounds ended alike: nothing was put to the test"


def test_a_rank_whose_peer_has_ended_is_told(gloo_world):
    told, nothing = gloo_world.launch(2, peer_has_left)
    assert "rank 0 calls look()" in told
    assert "rank 1: has left the process group" in told
    assert nothing is None


def test_who_loads_alone_is_told_and_training_goes_on(gloo_world):
    found = gloo_world.run(2, loading_alone)
    model, optimizer = found[0][0]
    assert "load_state_dict() of DTensors, which all of ranks" in model
    assert "optimizer.load_state_dict() of DTensors, which all of ranks" in optimizer
    for name, value in found[0][1].items():
        assert torch.equal(value, found[1][1][name])


@on_processes(2)
def test_who_sends_an_optimizers_state_alone_is_told(group):
    api = FullyShardedDataParallel
    model = api(torch.nn.Linear(3, 2), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = FullOptimStateDictConfig(rank0_only=True)
    api.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config)
    state = {"state": {}, "param_groups": []}
    if group.rank() == 0:
        with pytest.raises(
            UsageError, match=r"scatter_full_optim_state_dict\(\), which all of ranks"
        ):
            api.scatter_full_optim_state_dict(state, model, optim=optimizer)
        with pytest.raises(UsageError, match=r"optim_state_dict_to_load\(\), which all of ranks"):
            api.optim_state_dict_to_load(model, optimizer, state)
    model(torch.ones(1, 3)).sum().backward()
