# SPDX-License-Identifier: Apache-2.0
"""Ranks that die, hang, or do not do the same: everybody is told, nobody waits forever."""

import contextlib
import io
import json
import re
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support import divergence_workers as workers
from support.limits import PEERS_S, PROCESS_S
from support.world import TIMEOUT, on_processes, ranks_context
from torch.distributed import distributed_c10d as c10d

from fullshard.core.errors import CommunicationError, ConfigurationError
from fullshard.testing import LocalWorld, LocalWorldError
from fullshard.torch.comm.agreement import verify_agreement
from fullshard.torch.comm.checked import CheckedComm, checked_in_debug_mode
from fullshard.torch.comm.process_group import ProcessGroupComm
from fullshard.torch.comm.protocol import Comm, Done, SoloComm
from fullshard.torch.comm.sibling_groups import timeout_s_of
from fullshard.torch.comm.watch.parting import PARTED, deadlock, parting
from fullshard.torch.comm.watch.store import own_store
from fullshard.torch.comm.watch.watchdog import Watchdog, Witness, period_s_of

CPU = torch.device("cpu")


class StoreWithEveryKey:
    """As fake groups have it from torch 2.14 on; ``has_it`` as a real one answers."""

    def __init__(self, has_it):
        self.has_it = has_it

    def clone(self):
        return self

    def set_timeout(self, timeout):
        assert timeout.total_seconds() > 0

    def check(self, keys):
        return self.has_it


def test_a_store_that_keeps_nothing_is_none(monkeypatch):
    kept = StoreWithEveryKey(False)
    for default, expected in ((StoreWithEveryKey(True), None), (kept, kept), (object(), None)):
        monkeypatch.setattr(c10d, "_get_default_store", lambda default=default: default)
        assert own_store() is expected


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    """How each rank of each bad world ended: {(case, rank): (step, after_s, class, text)}.

    {(case, rank, "left"): text} is what it left beside its record.
    """
    folder = tmp_path_factory.mktemp("endings")
    process = ranks_context().Process(target=workers.run_cases, args=(str(folder), list(sys.path)))
    process.start()
    process.join(PROCESS_S)
    if process.is_alive():
        process.kill()
    found = {}
    for file in folder.glob("*.json"):
        case, _, rank = file.stem.rpartition("-")
        found[case, int(rank)] = json.loads(file.read_text())
    for file in folder.glob("*/trace/waits-rank-*.txt"):
        found[file.parts[-3], int(file.stem[-5:]), "left"] = file.read_text()
    return found


@pytest.mark.parametrize("case", workers.CASES)
def test_the_others_end_with_an_error_that_names_ranks_and_units(endings, case):
    _, culprit = workers.CASES[case]
    for rank in set(range(workers.RANKS)) - {culprit}:
        step, after_s, kind, text = endings[case, rank]
        assert step == workers.BAD_STEP
        assert kind == CommunicationError.__name__, text
        assert after_s < workers.TIMEOUT_S + PEERS_S / 2
        assert f"rank {rank}" in text or "debug" in case
        assert "unit 'blocks." in text
        assert endings[case, rank, "left"] == f"{text}\n\n"


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank_is_reported_as_silent(endings, rank):
    assert "rank 1: no sign of life for " in endings["killed", rank][3]


def test_when_the_store_dies_too_the_error_says_so(endings):
    text = endings["killed with the store", 1][3]
    assert "not known: the process that keeps the store has ended" in text


@pytest.mark.parametrize("rank", [0, 2])
def test_a_sleeping_rank_is_reported_with_what_it_did_last(endings, rank):
    wanted = r"rank 1: waits for nothing, last finished: gather of unit 'blocks.1' \d+\.\d s ago"
    assert re.search(wanted, endings["asleep", rank][3])


@pytest.mark.parametrize("rank", [0, 2])
def test_unequal_numbers_of_batches_name_the_ways_out(endings, rank):
    text = endings["fewer batches", rank][3]
    assert "rank 1: has left the process group" in text
    assert "stop_together" in text
    assert "pad_to_longest" in text


def test_ranks_that_wait_for_each_other_in_two_groups_are_told_so(endings):
    for rank in range(workers.RANKS):
        step, after_s, kind, text = endings["no backward", rank]
        assert (step, kind) == (workers.BAD_STEP + (rank == 1), "CommunicationError")
        assert after_s < workers.TIMEOUT_S
        for what in ("reduce", "gather"):
            assert re.search(rf"in {what} of unit 'blocks.3', which rank \d has not", text)


@pytest.mark.parametrize("rank", range(workers.RANKS))
def test_two_models_do_not_take_each_others_gradients(endings, rank):
    _, after_s, kind, text = endings["other model", rank]
    assert kind == "CommunicationError"
    assert after_s < workers.TIMEOUT_S
    assert re.search(r"rank \d (calls )?(gather|reduce) of unit 'blocks.\d' of model 2", text)


def test_a_rank_that_calls_the_same_later_is_not_waited_for_in_vain():
    calls = {"gather": [(1, "a"), (2, "b")], "reduce": [(1, "a")]}
    behind = {"gather": [(1, "a")], "reduce": [(1, "a"), (2, "b")]}
    here, there = ("b", 0.0, "gather"), ("b", 0.0, "reduce")
    told = deadlock(0, here, calls, 5, there, behind)
    assert "rank 0 waits in b, which rank 5 has not called, and rank 5 in b, which rank 0" in told
    for its, its_calls in ((None, behind), (there, calls), (("b", 0.0, "other"), behind)):
        assert deadlock(0, here, calls, 5, its, its_calls) is None
    assert deadlock(0, None, calls, 5, there, behind) is None
    assert deadlock(0, here, behind, 5, there, behind) is None
    assert deadlock(0, ("a", 0.0, "gather"), calls, 5, there, behind) is None


@pytest.mark.parametrize("case", ["left out", "other order"])
def test_all_ranks_name_the_unit_that_one_left_out_long_before_the_timeout(endings, case):
    for rank in range(workers.RANKS):
        _, after_s, kind, text = endings[case, rank]
        assert kind == "CommunicationError"
        assert after_s < workers.TIMEOUT_S
        assert "rank 1 has left out gather of unit 'blocks.2'. All ranks must run" in text
        assert "or rank" not in text


@given(
    steps=st.lists(st.permutations("abcde"), min_size=1, max_size=2, unique_by=tuple),
    late=st.integers(0, 4),
    without=st.sampled_from("abcde"),
)
def test_a_rank_that_is_late_has_not_parted_and_one_that_leaves_something_out_is_named(
    steps, late, without
):
    once = [what for step in steps for what in step]
    calls = list(enumerate(3 * once, 1))
    assert parting(0, calls, 1, calls[: len(calls) - late]) is None
    assert parting(0, calls[10:], 1, calls[:10]) is None
    short = list(enumerate(2 * once + [what for what in once if what != without], 1))
    at = next((n for (n, a), (_, b) in zip(calls, short, strict=False) if a != b), None)
    if at is None:  # the last one of all
        return
    for mine, its in ((calls, short), (short, calls)):
        told = parting(0, mine[:at], 1, its[:at])
        assert f"rank {int(mine is calls)} has left out {calls[at - 1][1]}. All ranks" in told


def test_what_watchdogs_ask_of_the_store_is_bounded_in_large_worlds():
    for size in (2, 64, 1024, 16384, 131072):
        assert period_s_of(size) >= 1.0
        assert 3 * size / period_s_of(size) <= 3 * 4096
    asked = []

    def read(ranks):
        asked.extend(ranks)
        return dict.fromkeys(ranks)

    watchdog = SimpleNamespace(rank=5, store_lives=lambda: True, read=read, period_s=4.0)
    told = Watchdog.table(watchdog, range(16384))
    assert len(set(asked)) == 64
    assert 5 not in asked
    assert told.endswith("(64 of 16383 others were asked)")
    assert "asked" not in Watchdog.table(watchdog, range(65))


def test_a_parting_is_told_though_the_store_has_ended():
    def publish():
        raise RuntimeError("Broken pipe")

    watchdog = SimpleNamespace(hear=lambda family: f"{PARTED}left out", publish=publish)
    witness = SimpleNamespace(watchdog=watchdog, family="all", _rank=2)
    told = str(Witness.failure(witness, "gather", RuntimeError("connection closed")))
    assert told == f"gather is given up on rank 2: {PARTED}left out"


def test_a_local_world_does_not_wait_for_a_rank_that_has_ended():
    def body(comm: Comm) -> None:
        if comm.rank != 1:
            comm.all_gather([(torch.empty(6), torch.ones(2))], label="gather of unit 'a'").wait()

    begin = time.monotonic()
    with pytest.raises(LocalWorldError, match=r"gather of unit 'a'.*of its ranks \[1\] have ended"):
        LocalWorld(3, timeout_s=60.0).run(body)
    assert time.monotonic() - begin < 60.0


def test_debug_mode_finds_another_order_before_anything_is_sent(endings):
    for rank in range(workers.RANKS):
        _, after_s, kind, text = endings["other order in debug mode", rank]
        assert kind == "CommunicationError"
        assert after_s < workers.TIMEOUT_S
        assert "all_gather (gather of unit 'blocks.2') of " in text
        assert "torch.float32 on ranks 0, 1; " in text
        assert "all_gather (gather of unit 'blocks.1') of " in text
        assert "on rank 2. Make all ranks" in text


def test_a_local_world_reports_both_labels():
    def body(comm: Comm) -> None:
        for name in ["a", "b"] if comm.rank == 0 else ["b", "a"]:
            comm.all_gather([(torch.empty(4), torch.ones(2))], label=f"gather of unit {name!r}")

    with pytest.raises(LocalWorldError) as caught:
        LocalWorld(2).run(body)
    assert "unit 'a'" in str(caught.value)
    assert "unit 'b'" in str(caught.value)


# -- debug mode on threads -----------------------------------------------------------------------


def everything(comm: Comm) -> list[object]:
    """One of each collective, and their results."""
    full, shard = torch.empty(4 * comm.size), torch.full((4,), float(comm.rank))
    comm.all_gather([(full, shard)], label="gather").wait()
    comm.reduce_scatter([(shard, full)], label="reduce").wait()
    comm.all_reduce([shard], "max", label="maximum").wait()
    value = torch.tensor([float(comm.rank)])
    comm.broadcast([value], source=1).wait()
    half = comm.block(2)
    half.duplicate().all_reduce([value]).wait()
    return [full.tolist(), shard.tolist(), value.item(), half.rank, half.size]


def test_a_checked_communicator_does_what_the_plain_one_does():
    plain = LocalWorld(4).run(everything)
    assert LocalWorld(4).run(lambda comm: everything(CheckedComm(comm))) == plain
    assert isinstance(CheckedComm(SoloComm()), Comm)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (lambda c: c.all_gather([(torch.empty(6), torch.ones(2))], "x"), "all_gather (x) of 6"),
        (lambda c: c.all_reduce([torch.ones(3)], "sum", "x"), "all_reduce sum (x) of 3 torch.f"),
        (lambda c: c.all_reduce([torch.ones(2)], "max", "x"), "all_reduce max (x) of 2 torch.f"),
        (lambda c: c.all_reduce([torch.ones(2)], "sum", "y"), "all_reduce sum (y) of 2 torch.f"),
        (lambda c: c.all_reduce([torch.ones(2).half()], label="x"), "(x) of 2 torch.float16"),
        (lambda c: c.broadcast([torch.ones(2)], 2), "broadcast from 2 () of 2 torch.float32"),
        (lambda c: c.duplicate(), "duplicate on rank 1"),
        (lambda c: c.block(1), "block(1) on rank 1"),
    ],
)
def test_all_ranks_learn_who_wanted_what(others, said):
    def body(comm: Comm) -> str:
        comm = CheckedComm(comm)
        wide = comm.duplicate()  # comparisons are shared: which of the two is used does not matter
        with pytest.raises(CommunicationError) as caught:
            others(wide) if comm.rank == 1 else comm.all_reduce([torch.ones(2)], "sum", "x")
        return str(caught.value)

    texts = set(LocalWorld(3).run(body))
    assert len(texts) == 1
    (text,) = texts
    assert "all_reduce sum (x) of 2 torch.float32 on ranks 0, 2" in text
    assert said in text


def test_debug_mode_is_off_unless_asked_for(monkeypatch):
    def body(comm: Comm) -> bool:
        return isinstance(checked_in_debug_mode(comm), CheckedComm)

    for value, debug in [(None, False), ("", False), ("0", False), ("1", True)]:
        if value is None:
            monkeypatch.delenv("FULLSHARD_DEBUG", raising=False)
        else:
            monkeypatch.setenv("FULLSHARD_DEBUG", value)
        assert LocalWorld(2).run(body) == [debug, debug]
        assert not isinstance(checked_in_debug_mode(SoloComm()), CheckedComm)


# -- agreement at first use ----------------------------------------------------------------------


def test_all_ranks_are_told_which_rank_differs_in_which_line():
    told = [
        {"strategy": "FULL_SHARD", "a.weight": "(4, 4)", "same": "1"},
        {"strategy": "FULL_SHARD", "a.weight": "(4, 5)", "same": "1"},
        {"strategy": "NO_SHARD", "a.weight": "(4, 4)", "same": "1", "b.größe": "(2,)"},
    ]

    def body(comm: Comm) -> str:
        with pytest.raises(ConfigurationError) as caught:
            verify_agreement(comm, told[comm.rank], CPU, "unit 'a'")
        return str(caught.value)

    texts = LocalWorld(3).run(body)
    assert len(set(texts)) == 1
    assert texts[0].splitlines() == [
        "the ranks disagree about unit 'a'; build the same module and pass the same arguments on "
        "every rank",
        "  a.weight: (4, 4) on ranks 0, 2; (4, 5) on rank 1",
        "  strategy: FULL_SHARD on ranks 0, 1; NO_SHARD on rank 2",
        "  b.größe: (missing) on ranks 0, 1; (2,) on rank 2",
    ]


def test_ranks_of_a_subgroup_are_named_by_their_numbers_in_the_world():
    def body(comm: Comm) -> str:
        with pytest.raises(ConfigurationError) as caught:
            verify_agreement(comm.block(2), {"x": str(comm.rank % 2)}, CPU)
        return str(caught.value).splitlines()[1]

    assert LocalWorld(4).run(body)[2:] == ["  x: 0 on rank 2; 1 on rank 3"] * 2


# -- processes -----------------------------------------------------------------------------------


@on_processes(4)
def test_a_subgroup_derives_communicators_alone(world):
    """Ranks 0 and 1, and 2 and 3, which know different numbers of groups."""
    rank = dist.get_rank(world)
    pairs = [
        dist.new_group(each, timeout=timedelta(seconds=PEERS_S + 7)) for each in ([0, 1], [2, 3])
    ]
    more = [dist.new_group([0], use_local_synchronization=True)] if rank == 0 else []
    comm = ProcessGroupComm(pairs[rank // 2])
    derived = [comm.duplicate(), comm.duplicate(), comm.block(1), ProcessGroupComm(world).block(2)]
    found = []
    for each in derived:
        value = torch.tensor([float(rank)])
        each.all_reduce([value]).wait()
        found.append((each.members, each.rank, value.item(), timeout_s_of(each.group)))
    pair = (0, 1) if rank < 2 else (2, 3)
    both = (pair, rank % 2, float(sum(pair)), PEERS_S + 7)
    alone = ((rank,), 0, float(rank), PEERS_S + 7)
    assert found == [both, both, alone, (*both[:3], TIMEOUT.total_seconds())]
    assert len({each.group.group_name for each in (comm, *derived)}) == 5
    for group in [each.group for each in derived] + more + pairs[rank // 2 :][:1]:
        dist.destroy_process_group(group)


@on_processes(3)
def test_overlapping_exchanges_keep_apart(group):
    """Gathers and reduces that are waited for in another order."""
    comm = ProcessGroupComm(group)
    fulls = [torch.empty(12) for _ in range(6)]
    works = [
        comm.all_gather([(full, torch.full((4,), 10.0 * index + comm.rank))], label="gather")
        for index, full in enumerate(fulls)
    ]
    shard, full = torch.empty(4), torch.ones(12)
    works.append(comm.reduce_scatter([(shard, full)], label="reduce"))
    for work in reversed(works):
        work.wait()
    for number, full in enumerate(fulls):
        assert full[::4].tolist() == [10.0 * number + rank for rank in range(3)]
    assert shard.tolist() == [3.0] * 4


@on_processes(2)
def test_a_collective_that_a_device_does_not_complete_is_printed_once(group):
    comm = ProcessGroupComm(group)
    comm.all_reduce([torch.ones(1)], label="all-reduce of unit 'a'").wait()
    comm.witness.watchdog.publish()  # before rank 0 looks
    dist.barrier(group)
    if comm.rank > 0:
        dist.barrier(group)
        return
    wanted = "rank 1: waits for nothing, last finished: all-reduce of unit 'a'"
    witness = Witness("late", comm.members, timeout_s=3.0)  # others tell once a second
    printed, told = io.StringIO(), []
    witness.watchdog.listeners.append(told.append)
    with contextlib.redirect_stderr(printed):
        witness.leaves_pending("gather of unit 'b'", [Done()])
        witness.leaves_pending("gather of unit 'c'", [Done(), SimpleNamespace(is_completed=bool)])
        deadline = time.monotonic() + PEERS_S / 2
        while wanted not in printed.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1.2)  # it is not printed twice
    witness.watchdog.listeners.clear()
    dist.barrier(group)
    printed = printed.getvalue()
    assert [f"{text}\n" for text in told] == [printed]
    assert printed.count("not done yet") == 1
    assert "fullshard: rank 0: gather of unit 'c' was issued " in printed
    assert wanted in printed
