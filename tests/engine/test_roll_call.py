# SPDX-License-Identifier: Apache-2.0
"""What is collective and called on some ranks only: told at once, and nobody is disturbed."""

import random
import re
import threading
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from support import roll_call_workers as workers
from support.limits import PEERS_S

from fullshard.testing import LocalWorld
from fullshard.torch.comm.protocol import SoloComm
from fullshard.torch.comm.watch.roll_call import _Roll, call_roll


def test_what_one_rank_calls_alone_is_told_and_training_goes_on(gloo_world):
    mishaps = gloo_world.run(3, workers.training_with_mishaps, True)
    without = gloo_world.run(3, workers.training_with_mishaps, False)
    told = mishaps[0][0]
    whole = "full_tensor() of 'blocks.0.0.weight'"
    whats = ("state_dict()", "save_full_weights()", "summon_full_params()", whole)
    for what, (text, waited_s) in zip(whats, told, strict=True):
        first, others, *_, last = text.splitlines()
        assert first == f"rank 0 calls {what}, which all of ranks [0, 1, 2] must call; but"
        assert re.match(
            r"  ranks? \S+: in gather of unit 'blocks.0'(?: of model \d+)? for \d\.\d s$", others
        )
        assert "on every rank" in last
        assert waited_s < 3
    assert "torch.distributed.checkpoint.save" in told[0][0]  # of what fully_shard hands out
    assert [each[0] for each in (*mishaps[1:], *without)] == [[]] * 5
    for (_, weights), (_, wanted) in zip(mishaps, without, strict=True):
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def test_a_late_rank_is_waited_for(gloo_world):
    assert gloo_world.run(3, workers.late) == [[None, None]] * 3


def test_rolls_for_different_things_are_told_on_all_ranks(gloo_world):
    for rank, (first, then) in enumerate(gloo_world.run(4, workers.for_different_things)):
        here, there = ("look()", "save()") if rank % 2 else ("save()", "look()")
        assert f"rank {rank} calls {here}" in first[0]
        assert f"until all ranks call {there}" in first[0]
        assert first[1] < PEERS_S / 2  # not the end of patience
        assert then[0] is None


def test_without_the_others_it_ends_at_the_timeout_of_the_group(gloo_world):
    answers = gloo_world.run(4, workers.nobody_comes)
    text, waited_s = answers[0][0]
    assert 3 <= waited_s < PEERS_S / 2
    assert "rank 0 has called look()" in text
    assert "timeout of 3 s" in text
    assert re.search(r"rank.* 1.*: .*\n", text)
    assert [then[0] for _, then in answers] == [None] * 4


def test_ranks_of_another_group_need_not_come_and_several_rolls_are_called_at_once(gloo_world):
    answers = gloo_world.run(4, workers.two_halves)
    assert [(alone, both) for alone, _, both in answers] == [(None, None)] * 4
    for rank in (0, 1):
        crossed = answers[rank][1]
        assert f"all of ranks [{rank}, {rank + 2}] must call" in crossed
        assert f"rank {rank + 2}: in sum of a column" in crossed


def test_nothing_stays_in_the_store(gloo_world):
    for before, after in gloo_world.run(3, workers.keys_after, 20):
        assert before == after


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
    told, nothing = gloo_world.launch(2, workers.peer_has_left)
    assert "rank 0 calls look()" in told
    assert "rank 1: has left the process group" in told
    assert nothing is None


def test_who_loads_alone_is_told_and_training_goes_on(gloo_world):
    found = gloo_world.run(2, workers.loading_alone)
    model, optimizer = found[0][0]
    assert "load_state_dict() of DTensors, which all of ranks" in model
    assert "optimizer.load_state_dict() of DTensors, which all of ranks" in optimizer
    for name, value in found[0][1].items():
        assert torch.equal(value, found[1][1][name])


def test_who_sends_an_optimizers_state_alone_is_told(gloo_world):
    told, nothing = gloo_world.run(2, workers.sending_alone)
    assert "scatter_full_optim_state_dict(), which all of ranks" in told[0]
    assert "optim_state_dict_to_load(), which all of ranks" in told[1]
    assert nothing == []
