# SPDX-License-Identifier: Apache-2.0
"""Choosing: what is ranked, rejected, changed, asked."""

import pytest

from fullshard.core.errors import ConfigurationError
from fullshard.core.strategy import ShardingStrategy
from fullshard.plan import (
    Loss,
    Recompute,
    Run,
    SearchSpace,
    Setup,
    cluster_of,
    named_device,
    named_model,
    pareto,
    parse_question,
    predict,
    search,
    smallest_change,
    what_if,
    with_setting,
)

H100 = named_device("h100")
MODEL = named_model("llama3-8b")
EIGHT = cluster_of(H100, 8)


@pytest.fixture(scope="module")
def choice():
    return search(MODEL, SearchSpace(Run()), EIGHT)


def test_the_best_is_as_fast_as_any_that_fits(choice):
    speeds = [each.tokens_per_s for each in choice.ranked]
    assert choice.best.tokens_per_s >= 0.99 * max(speeds)  # steps of 1%, then by memory
    assert all(each.memory.peak_bytes <= choice.budget_bytes for each in choice.ranked)
    alone = predict(MODEL, choice.best.run, EIGHT)
    assert alone.step_s == pytest.approx(choice.best.step_s)
    assert alone.memory.peak == choice.best.memory.peak


def test_rejections_name_their_reason(choice):
    assert choice.rejected
    assert all(" needs " in f" {each.reason}" for each in choice.rejected)
    full = [each for each in choice.rejected if each.run.strategy is ShardingStrategy.NO_SHARD]
    assert any("model state alone" in each.reason for each in full)


def test_no_other_is_both_faster_and_smaller_than_one_on_the_front(choice):
    front = pareto(choice.ranked)
    for each in front:
        assert not any(
            other.tokens_per_s > 1.006 * each.tokens_per_s
            and other.memory.peak_bytes < each.memory.peak_bytes
            for other in choice.ranked
        )


def test_what_is_fixed_stays(choice):
    space = SearchSpace(Run(micro_batch=2, recompute=Recompute.FULL), frozenset({"strategy"}))
    found = search(MODEL, space, EIGHT)
    assert {(each.run.micro_batch, each.run.recompute) for each in found.ranked} == {
        (2, Recompute.FULL)
    }
    with pytest.raises(ConfigurationError, match="cannot search over"):
        SearchSpace(Run(), frozenset({"colour"}))


def test_a_global_batch_is_accumulated_up_to():
    found = search(MODEL, SearchSpace(Run(), global_batch=64), EIGHT)
    assert {each.run.micro_batch * each.run.accumulate for each in found.ranked} == {8}
    with pytest.raises(ConfigurationError, match="the nearest that can is 64"):
        search(MODEL, SearchSpace(Run(), global_batch=63), EIGHT)


def test_an_impossible_budget_is_refused_with_the_floor():
    with pytest.raises(ConfigurationError, match=r"the least is .* of which .* is model state"):
        search(MODEL, SearchSpace(Run()), EIGHT, budget_bytes=2**30)
    with pytest.raises(ConfigurationError, match="must be above 0"):
        search(MODEL, SearchSpace(Run()), EIGHT, budget_bytes=0)


@pytest.mark.long
def test_the_smallest_change_is_one_if_one_is_enough():
    run = Run(micro_batch=2, loss=Loss.FUSED)
    assert not predict(MODEL, run, EIGHT).fits
    change = smallest_change(MODEL, run, EIGHT)
    assert change is not None
    assert len(change.words) == 1
    assert change.prediction.fits
    samples = change.prediction.run.micro_batch * change.prediction.run.accumulate
    assert samples == run.micro_batch * run.accumulate
    assert smallest_change(MODEL, Run(micro_batch=64), cluster_of(H100, 1)) is None


def test_questions_change_one_setting():
    setup = Setup(Run(recompute=Recompute.FULL), EIGHT)
    base = predict(MODEL, setup.run, EIGHT)
    answers = what_if(MODEL, setup, "recompute", ["full", "none", "ful"])
    assert answers[0].prediction.step_s == base.step_s
    assert answers[1].prediction.step_s < base.step_s
    assert answers[2].prediction is None
    assert "did you mean 'full'" in answers[2].reason
    faster = what_if(MODEL, setup, "devices", ["16", "12"])
    assert faster[0].prediction.cluster.devices == 16
    assert faster[1].reason


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("micro-batch", "4"),
        ("sequence", "2048"),
        ("strategy", "HYBRID_SHARD"),
        ("replicas", "2"),
        ("wrap", "part"),
        ("precision", "bf16-pure"),
        ("reduce", "bf16"),
        ("recompute", "selective"),
        ("offload", "optimizer"),
        ("prefetch", "2/3"),
        ("optimizer", "sgd"),
        ("lora", "8"),
        ("compiled", "true"),
        ("loss", "chunked"),
        ("accumulate", "3"),
        ("device", "h200"),
        ("per-host", "4"),
        ("between", "100"),
        ("inside", "300"),
        ("tensor-parallel", "2"),
    ],
)
def test_every_setting_can_be_asked_about(key, value):
    setup = Setup(Run(micro_batch=1), cluster_of(H100, 16))
    changed = with_setting(setup, key, value)
    assert changed != setup
    assert predict(named_model("gpt2-124m"), with_setting(setup, "sequence", "64").run, EIGHT)
    assert what_if(MODEL, setup, key, [value])[0].prediction is not None


@pytest.mark.parametrize(
    ("text", "said"),
    [("recompute", "expected key=a,b,c"), ("recompute=", "expected"), ("colour=red", "it may be")],
)
def test_questions_that_cannot_be_read_are_refused(text, said):
    with pytest.raises(ConfigurationError, match=said):
        parse_question(text)


@pytest.mark.long
def test_a_loss_that_fills_the_memory_is_part_of_the_way_out():
    cluster = cluster_of(named_device("h100"), 1)
    with pytest.raises(ConfigurationError, match="a loss that keeps less"):
        search(named_model("qwen3-0.6b"), SearchSpace(Run(sequence=32_768)), cluster)
