# SPDX-License-Identifier: Apache-2.0
"""Causes put into records are named with their rank and unit, and healthy runs are healthy."""

from dataclasses import replace
from operator import itemgetter

import pytest
from support.simulated_runs import MIB, Prefetch, Simulated

from fullshard.core.errors import ConfigurationError
from fullshard.report.findings import CAUSES, diagnose
from fullshard.report.measure import TimedCollective, Waits, measure
from fullshard.report.record import RankRecord, RunRecord
from fullshard.report.replay import as_exposed, costs_of, events_of, replay, setting_of
from fullshard.report.summary import judge

FORWARD, BACKWARD, DATA = "forward", "backward", "data"
CASES = {
    "slow link": [
        ({"link_s": 9e-3}, None, None),
        ({"link_s": 9e-3, "prefetch": Prefetch(0, 0, 1)}, None, None),
    ],
    "slow rank in forward": [
        ({"slow": {(2, FORWARD, 3): 8e-3}}, 2, "blocks.2"),
        ({"slow": {(0, FORWARD, None): 12e-3}}, 0, None),
        ({"world": 2, "slow": {(1, FORWARD, 1): 8e-3}}, 1, "blocks.0"),
    ],
    "slow rank in backward": [
        ({"slow": {(1, BACKWARD, 2): 8e-3}}, 1, "blocks.1"),
        ({"world": 8, "slow": {(7, BACKWARD, None): 12e-3}}, 7, None),
    ],
    "slow rank": [({"slow": {(1, BACKWARD, None): 12e-3, (1, FORWARD, None): 8e-3}}, 1, None)],
    "slow data": [({"slow": {(3, DATA, None): 12e-3}}, 3, None), ({"data_s": 2e-2}, None, None)],
    "host-bound": [({"host_s": 4e-2}, None, None), ({"slow": {(1, "host", None): 9e-3}}, 1, None)],
    "needless copies": [
        ({"spans": {"copy": 15e-3}}, None, None),
        ({"spans": {"copy": 1e-4}, "slow": {(1, "copy", None): 15e-3}}, 1, None),
    ],
    "bad prefetch": [({"link_s": 3.5e-3, "prefetch": Prefetch(0, 0, 1)}, None, None)],
    "bad wrapping": [
        ({"blocks": 2, "root_bytes": 100 * MIB}, None, "(root)"),
        (
            {"blocks": 99, "unit_bytes": 20000, "root_bytes": 20000, "compute_s": 1e-4}
            | {"link_s": 1e-4, "issue_s": 5e-5},
            None,
            None,
        ),
    ],
    "checkpoint stall": [({"checkpoint_s": 80e-3}, None, None)],
    "memory near its limit": [
        ({"memory": 0.95}, None, None),
        ({"memory_of": {2: 0.95}}, 2, None),
    ],
}
FLAT = [(cause, *case) for cause, cases in CASES.items() for case in cases]


def test_there_is_a_case_for_each_cause():
    assert set(CASES) == set(CAUSES)


@pytest.mark.parametrize(("cause", "options", "rank", "unit"), FLAT)
def test_a_cause_is_named_with_its_rank_and_unit(cause, options, rank, unit):
    first = diagnose(measure(Simulated(**options).run()))[0]
    assert (first.cause, first.rank, first.unit) == (cause, rank, unit)
    assert first.what
    assert first.advice


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("world", [1, 2, 5])
def test_healthy_runs_are_healthy(world, seed):
    run = Simulated(world=world, seed=seed, jitter=0.08, checkpoint_s=8e-3).run()
    assert diagnose(measure(run)) == []


CHANGES = {
    "set_prefetch": {"prefetch": Prefetch(2, 2, 1)},
    "SHARD_GRAD_OP": {"strategy": "SHARD_GRAD_OP"},
    "compression": {"link_s": 4.5e-3},
}


@pytest.mark.parametrize(
    "options",
    [
        {"link_s": 9e-3},
        {"link_s": 9e-3, "strategy": "SHARD_GRAD_OP"},
        {"link_s": 3.5e-3, "prefetch": Prefetch(0, 0, 1)},
        {"link_s": 6e-3, "prefetch": Prefetch(1, 0, 1)},
    ],
)
def test_advice_gains_what_it_says(options):
    before = Simulated(jitter=0.0, **options)
    first = diagnose(measure(before.run()))[0]
    change = next(change for words, change in CHANGES.items() if words in first.advice)
    if "link_s" in change:
        change = {"link_s": before.link_s / 2}
    gained = measure(before.run()).step.value - measure(replace(before, **change).run()).step.value
    assert first.gain_s == pytest.approx(gained, rel=0.15)


@pytest.mark.parametrize("issue_s", [0.0, 3e-3])
def test_each_change_is_said_with_its_gain(issue_s):
    before = Simulated(jitter=0.0, link_s=9e-3, prefetch=Prefetch(0, 0, 1), issue_s=issue_s)
    report = judge(before.run())
    found = report.diagnoses[0]
    ways = [(found.advice, found.gain_s), *found.others]
    assert ways == sorted(ways, key=itemgetter(1), reverse=True)
    for words, change in CHANGES.items():
        (gain_s,) = (each for said, each in ways if words in said)
        after = measure(replace(before, **change).run())
        assert gain_s == pytest.approx(report.measured.step.value - after.step.value, rel=0.15)
    said = report.changes(found)
    assert len(said) == 3
    assert all(each.endswith("would be gained") for each in said)


def _collective(step, op, unit, begin_s, end_s):
    waits = {rank: Waits(begin_s, end_s, begin_s, begin_s) for rank in (0, 1)}
    return TimedCollective(step, op, unit, 1, 0, 8 * MIB, 0, waits)


def test_what_shares_a_link_is_not_priced_twice():
    measured = measure(Simulated(world=2).run())
    shared = [_collective(2, "reduce", 2, 0.0, 0.018), _collective(2, "gather", 1, 0.0, 0.018)]
    alone = [_collective(2, "gather", 3, 0.02, 0.029)]
    costs = costs_of(replace(measured, collectives=shared + alone))
    seconds = [costs.reduce_s[2], costs.gather_s[1], costs.gather_s[3]]
    assert seconds == pytest.approx([0.009] * 3)


def test_waits_for_the_link_add_up_by_step_whichever_unit_waits():
    measured = measure(Simulated(world=2).run())
    turns = [_collective(step, "gather", step % 3, 0.0, 0.01) for step in measured.detailed]
    measured = replace(measured, collectives=turns)
    assert measured.link_s == pytest.approx(0.01)


def test_a_machine_with_too_much_to_do_is_no_slow_link():
    measured = measure(Simulated(world=2).run())
    turns = [
        _collective(step, "gather", unit, 0.0, 0.03 if unit == 1 + step % 6 else 1e-4)
        for step in measured.detailed
        for unit in range(1, 7)
    ]
    measured = replace(measured, collectives=turns)
    assert measured.link_s > 0.15 * measured.mean_step_s
    assert diagnose(measured) == []


@pytest.mark.parametrize("longer_s", [0.004, -0.004])
def test_a_replay_waits_as_long_as_the_run_did(longer_s):
    measured = measure(Simulated(jitter=0.0, link_s=9e-3).run())
    step = measured.first.steps[-1]
    events, setting = events_of(step), setting_of(measured, step)
    exposed_s = measured.link_s + longer_s
    ops = replay(events, setting, as_exposed(events, setting, costs_of(measured), exposed_s))[0]
    waited_s = sum(op.end_s - op.begin_s for op in ops if op.op.startswith("await_"))
    assert waited_s == pytest.approx(exposed_s, rel=0.02)


def test_who_ended_in_an_error_is_said_first():
    attempts = list(Simulated(world=2).attempts())
    attempts[0] = replace(attempts[0], ending="CommunicationError: rank 1 is gone")
    attempts[1] = replace(attempts[1], ended_s=attempts[1].last_s - 1e-3, ending="ValueError: <b>")
    run = RunRecord({rank: RankRecord(rank, (each,)) for rank, each in enumerate(attempts)})
    assert judge(run).verdict.startswith("rank 1 ended in step 8 by ValueError: <b>; until then h")
    empty = [replace(each, steps=()) for each in attempts]
    run = RunRecord({rank: RankRecord(rank, (each,)) for rank, each in enumerate(empty)})
    with pytest.raises(ConfigurationError, match="rank 1 ended in its first step by ValueError"):
        judge(run)


def test_causes_come_by_what_they_cost():
    run = Simulated(data_s=3e-2, slow={(1, BACKWARD, 2): 12e-3}, memory=0.95)
    causes = [each.cause for each in diagnose(measure(run.run()))]
    assert causes == ["slow data", "slow rank in backward", "memory near its limit"]


def test_a_rank_is_named_without_its_unit_where_no_step_was_noted_by_units():
    slow = {(1, FORWARD, 2): 20e-3}
    measured = measure(Simulated(slow=slow, steps=9, detailed_every=100, first_step=1).run())
    assert not measured.detailed
    first = diagnose(measured)[0]
    assert (first.cause, first.rank, first.unit) == ("slow rank in forward", 1, None)


def test_without_ops_nothing_is_said_of_units():
    run = Simulated(slow={(1, DATA, None): 20e-3}, steps=9, detailed_every=100, first_step=1).run()
    measured = measure(run)
    assert not measured.by_op
    assert [(each.cause, each.rank) for each in diagnose(measured)] == [("slow data", 1)]


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize(("what", "cause"), [(DATA, "slow data"), ("host", "host-bound")])
def test_what_one_rank_alone_does_is_not_said_of_all(world, what, cause):
    run = Simulated(world=world, slow={(1, what, None): 9e-2}).run()
    assert [(each.cause, each.rank) for each in diagnose(measure(run))] == [(cause, 1)]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("what", "cause"),
    [(DATA, "slow data"), ("host", "host-bound"), (BACKWARD, "slow rank in backward")],
)
def test_a_rank_that_stalls_now_and_then_is_named(world, what, cause):
    options = {"steps": 40, "detailed_every": 50, "slow_every": 5}
    run = Simulated(world=world, slow={(1, what, None): 0.3}, **options).run()
    first, *others = diagnose(measure(run))
    assert (first.cause, first.rank, others) == (cause, 1, [])
    assert first.cost_s == pytest.approx(0.06, rel=0.2)
    assert "in 8 of 38 steps" in first.what


def test_two_causes_on_one_rank_are_both_named():
    run = Simulated(slow={(1, DATA, None): 4e-2, (1, FORWARD, None): 2e-2}).run()
    causes = [(each.cause, each.rank) for each in diagnose(measure(run))]
    assert causes == [("slow data", 1), ("slow rank in forward", 1)]


def test_a_checkpoint_within_steps_of_one_rank_is_named_once():
    run = Simulated(spans={"checkpoint": 1e-4}, slow={(1, "checkpoint", None): 3e-2}).run()
    assert [(each.cause, each.rank) for each in diagnose(measure(run))] == [("checkpoint stall", 1)]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_of_few_steps_is_not_called_healthy(steps):
    run = Simulated(steps=steps, slow={(1, FORWARD, 2): 2e-2}).run()
    assert judge(run).verdict.startswith("not enough to say")


@pytest.mark.parametrize("steps", [1, 2])
def test_first_steps_alone_accuse_nobody(steps):
    assert diagnose(measure(Simulated(steps=steps, link_s=9e-3).run())) == []


def test_a_span_of_an_own_word_that_takes_long_is_named():
    (found,) = diagnose(measure(Simulated(spans={"logging": 8e-2}).run()))
    assert (found.cause, found.rank) == ("host-bound", None)
    assert "'logging'" in found.what
