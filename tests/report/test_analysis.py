# SPDX-License-Identifier: Apache-2.0
"""The analysis of records: time dealt out once, waits by who was late, goodput that adds up."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated_runs import Simulated, restarted

from fullshard.core.errors import ConfigurationError
from fullshard.core.strategy import Prefetch
from fullshard.report.goodput import goodput
from fullshard.report.measure import EXPOSED, Figure, Wanted, measure
from fullshard.report.record import RankRecord, RunRecord
from fullshard.report.replay import costs_of, events_of, replay, setting_of
from fullshard.report.shares import Bid, deal, parts_of, shares_of
from fullshard.report.summary import compare, planned

TIMES = st.integers(0, 30).map(float)
BIDS = st.lists(
    st.builds(
        lambda a, b, weight, number: Bid(min(a, b), max(a, b), weight, ("what", number)),
        TIMES,
        TIMES,
        st.integers(0, 3),
        st.integers(0, 5),
    ),
    max_size=12,
)
RUNS = st.builds(
    Simulated,
    world=st.integers(1, 4),
    blocks=st.integers(1, 4),
    steps=st.integers(1, 5),
    link_s=st.sampled_from([1e-4, 2e-3, 1e-2]),
    data_s=st.sampled_from([0.0, 5e-3]),
    checkpoint_s=st.sampled_from([0.0, 0.03]),
    checkpoint_every=st.integers(1, 3),
    slow=st.dictionaries(
        st.tuples(st.integers(0, 3), st.sampled_from(["forward", "backward", "data"]), st.none()),
        st.just(5e-3),
        max_size=2,
    ),
    prefetch=st.builds(Prefetch, st.integers(0, 2), st.integers(0, 2), st.integers(1, 2)),
    strategy=st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP"]),
    detailed_every=st.sampled_from([1, 1, 2, 7]),
    seed=st.integers(0, 99),
)


@given(BIDS, TIMES, TIMES)
def test_each_moment_goes_to_the_heaviest_bid_that_began_last(bids, one, other):
    begin, end = min(one, other), max(one, other)
    parts = list(deal(bids, begin, end))
    assert sum(part.end_s - part.begin_s for part in parts) == end - begin
    at = begin
    for part in parts:
        assert part.begin_s == at
        at, middle = part.end_s, (part.begin_s + part.end_s) / 2
        over = [bid for bid in bids if bid.begin_s <= middle < bid.end_s]
        best = max(((bid.weight, bid.begin_s) for bid in over), default=None)
        expected = {each.share for each in over if (each.weight, each.begin_s) == best}
        assert part.share in (expected or {("host", None)})


@settings(deadline=None, max_examples=30)
@given(RUNS)
def test_shares_add_up_to_steps_and_exposed_time_is_a_union(run):
    record = run.run()
    for rank in record.ranks.values():
        for step in rank.attempts[0].steps:
            shares = shares_of(step)
            assert sum(shares.values()) == pytest.approx(step.duration_s)
            if step.ops is None:
                continue
            waits = sorted((op.begin_s, op.end_s) for op in step.ops if op.op in EXPOSED)
            union, until = 0.0, 0.0
            for begin, end in waits:
                union += max(0.0, end - max(begin, until))
                until = max(until, end)
            mine = sum(s for (what, _), s in shares.items() if what in EXPOSED)
            assert mine == pytest.approx(union, abs=1e-9)
            assert [part.begin_s for part in parts_of(step)] == sorted(
                part.begin_s for part in parts_of(step)
            )


@settings(deadline=None, max_examples=30)
@given(RUNS, RUNS, st.floats(0, 5), st.integers(0, 4))
def test_goodput_and_badput_add_up_through_a_kill_and_a_restart(first, second, gap_s, back):
    second = replace(second, world=first.world, first_step=max(0, first.steps - back))
    run = restarted(first, second, gap_s)
    whole = goodput(run, measure(run))
    begin = min(a.wall_s(0) for r in run.ranks.values() for a in r.attempts)
    end = max(a.wall_s(a.last_s) for r in run.ranks.values() for a in r.attempts)
    assert whole.wall_s == pytest.approx(end - begin)
    assert sum(whole.seconds.values()) == pytest.approx(whole.wall_s)
    assert all(seconds >= -1e-9 for seconds in whole.seconds.values())
    down = whole.seconds.get("down", 0.0)
    assert gap_s - 1e-6 <= down <= gap_s + 0.2
    again = min(back, first.steps)
    assert (whole.seconds.get("lost work", 0.0) > 0) == (again > 0)


def test_a_late_rank_is_named_by_those_who_wait_for_it():
    measured = measure(Simulated(slow={(2, "forward", 3): 8e-3}, jitter=0).run())
    late = {late for (_, late), seconds in measured.waited.items() if seconds > 1e-4}
    assert late == {2}
    assert measured.excess(2, Wanted("forward", unit=3)).value == pytest.approx(8e-3)
    assert measured.excess(1, Wanted("forward")).value == pytest.approx(0, abs=1e-9)
    assert measured.late_share > 0.5


def test_ranks_that_left_before_the_last_attempt_are_not_compared():
    first, second = Simulated(world=3, steps=4), Simulated(world=2, first_step=4)
    both = restarted(replace(first, world=2), second, 1.0)
    gone = first.run().ranks[2]
    run = RunRecord({**both.ranks, 2: gone})
    assert measure(run).ranks == (0, 1)
    begin, (left,) = gone.attempts[0].wall_s(0.0), gone.attempts
    end = max(a.wall_s(a.last_s) for a in (both.ranks[rank].attempts[-1] for rank in (0, 1)))
    counted = [end - begin, end - begin, left.wall_s(left.last_s) - begin]
    assert goodput(run, measure(run)).wall_s == pytest.approx(sum(counted) / 3)


def test_records_without_steps_are_refused():
    run = Simulated().run()
    empty = {
        rank: RankRecord(rank, (replace(record.attempts[0], steps=()),))
        for rank, record in run.ranks.items()
    }
    with pytest.raises(ConfigurationError, match="has no step"):
        measure(RunRecord(empty))
    other = Simulated(first_step=100).run()
    with pytest.raises(ConfigurationError, match="no step in common"):
        measure(RunRecord({0: run.ranks[0], 1: other.ranks[1]}))


@settings(deadline=None, max_examples=20)
@given(RUNS.filter(lambda run: run.detailed_every == 1 and run.steps > 3))
def test_a_replay_of_a_record_takes_as_long_as_its_step(run):
    run = replace(run, jitter=0, slow={}, data_s=0.0, host_s=0.0, optimizer_s=0.0)
    measured = measure(run.run())
    step = measured.first.steps[-1]
    ops = replay(events_of(step), setting_of(measured, step), costs_of(measured))[0]
    assert max(op.end_s for op in ops) == pytest.approx(step.duration_s, rel=0.1)


def test_two_runs_differ_where_they_do_beyond_noise():
    before, after = (measure(Simulated(data_s=s, seed=n).run()) for n, s in enumerate((1e-3, 9e-3)))
    rows = {row.name: row for row in compare(before, after)}
    assert rows["data"].real
    assert rows["data"].change == pytest.approx(8, rel=0.1)
    assert rows["step"].real
    assert not rows["forward"].real
    assert rows["peak memory"].change == 0


def test_noise_is_a_standard_error():
    assert Figure.of([1.0, 2.0, 3.0]) == (2.0, pytest.approx(1.86 / 3**0.5))
    assert Figure.of([5.0]) == (5.0, math.inf)


def test_the_plan_stands_beside_what_was_measured():
    run = Simulated().run()
    attempt = run.ranks[0].attempts[0]
    facts = replace(attempt.facts, forecast={"step_s": 0.05, "peak_bytes": 2.0**33})
    record = RankRecord(0, (replace(attempt, facts=facts),))
    rows = list(planned(measure(RunRecord({**run.ranks, 0: record}))))
    assert [name for name, *_ in rows] == ["step_s", "peak_bytes"]
    assert rows[1][1:] == (2.0**33, 2.0**33)
