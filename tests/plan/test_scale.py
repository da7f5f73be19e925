# SPDX-License-Identifier: Apache-2.0
"""Simulated runs against what can be worked out by hand, and against a published one."""

import math
from dataclasses import replace

import pytest

from fullshard.core.errors import ConfigurationError
from fullshard.plan.cluster.devices import cluster_of, fitted_constants, named_device
from fullshard.plan.model.named import named_model
from fullshard.plan.predict import predict
from fullshard.plan.run import Run
from fullshard.plan.scale import (
    Faults,
    LongRun,
    scaling_curve,
    simulate,
    where_hybrid_wins,
)

NEVER = Faults(device_mtbf_s=1e18, slow_rate=0.0)


def test_nothing_is_lost_where_nothing_happens():
    found = simulate(LongRun(1.0, 8, 1, 0.0), NEVER, hours=1, interval_s=600)
    assert found.goodput == pytest.approx(1.0)
    assert found.steps == 3600
    assert found.failures == 0


def test_shares_and_goodput_are_all_of_the_time():
    faults = Faults(device_mtbf_s=1e6, slow_rate=1e-3)
    work = LongRun(2.0, 512, 64, 1e9, jitter_s=0.05)
    found = simulate(work, faults, hours=60, seed=1)
    assert found.failures > 20
    assert all(share > 0 for share in found.shares.values())
    assert found.goodput + sum(found.shares.values()) == pytest.approx(1.0)
    assert found == simulate(work, faults, hours=60, seed=1)
    assert found != simulate(work, faults, hours=60, seed=2)


def test_saving_costs_what_it_holds_up():
    faults = Faults(1e18, storage_bandwidth=1e9, blocking_share=0.5, slow_rate=0.0)
    found = simulate(LongRun(1.0, 8, 1, 20e9), faults, hours=10, interval_s=90)
    assert found.shares["saving"] == pytest.approx(10 / 100, rel=0.05)


@pytest.mark.parametrize("hosts", [2, 64, 2048])
def test_jitter_grows_with_the_logarithm_of_the_hosts(hosts):
    found = simulate(LongRun(1.0, 8, hosts, 0.0, jitter_s=0.02), NEVER, hours=6)
    added = found.shares["jitter"] / found.goodput
    harmonic = sum(1 / n for n in range(1, hosts + 1))
    assert added == pytest.approx(0.02 * harmonic, rel=0.03)


def test_lost_work_is_half_an_interval_for_each_failure():
    # Failures at random fall in the middle of an interval on average (Young 1974).
    faults = Faults(8e4 * 64, 0.0, 0.0, storage_bandwidth=1e18, slow_rate=0.0)
    found = simulate(LongRun(1.0, 64, 8, 1.0), faults, hours=40_000, interval_s=2000)
    assert found.failures > 1000
    lost_s = found.shares["lost"] * 40_000 * 3600 / found.failures
    assert lost_s == pytest.approx(1000, rel=0.1)


def test_the_best_interval_is_better_than_others():
    faults = Faults(device_mtbf_s=2e6, storage_bandwidth=2e8, blocking_share=1.0)
    work = LongRun(1.0, 256, 32, 4e9)
    best = faults.best_interval_s(256, 4e9)
    assert best == pytest.approx(math.sqrt(2 * 20 * 2e6 / 256))
    kept = {
        factor: simulate(work, faults, hours=2000, interval_s=best * factor).goodput
        for factor in (0.2, 1.0, 5.0)
    }
    assert max(kept, key=kept.get) == 1.0


def test_llama_3_kept_more_than_90_percent():
    """405B on 16,384 devices: 419 interruptions in 54 days, effective time above 90%."""
    state_bytes = 405e9 * 12 / 16_384
    found = simulate(LongRun(15.0, 16_384, 2048, state_bytes), hours=54 * 24)
    assert found.failures == pytest.approx(419, rel=0.15)
    assert 0.90 < found.goodput < 0.97


def test_scaling_loses_as_it_grows():
    model, cluster = named_model("gpt2-124m"), cluster_of(named_device("h100"), 8)
    run = Run(micro_batch=8, sequence=1024)
    points = scaling_curve(model, run, cluster, devices=(8, 256, 16_384), hours=2)
    assert [each.devices for each in points] == [8, 256, 16_384]
    assert points[0].efficiency == 1.0
    efficiencies = [each.efficiency for each in points]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert all(each.low <= each.goodput.goodput <= each.high for each in points)


def test_hybrid_wins_where_links_between_hosts_are_slow():
    model = named_model("gpt2-124m")
    run = Run(micro_batch=1, sequence=128)
    slow = cluster_of(named_device("h100"), 8, between_bandwidth=1e9)
    found = where_hybrid_wins(model, run, slow, devices=(8, 16, 64, 1024))
    assert found.group == 8
    assert [count for count, _, _ in found.steps] == [16, 64, 1024]
    winners = [count for count, full_s, hybrid_s in found.steps if hybrid_s < full_s]
    assert found.devices == min(winners) == 16


def test_a_calibrated_device_keeps_its_constants_on_more_devices():
    model, device = named_model("gpt2-124m"), named_device("h100")
    slow = replace(fitted_constants(), matmul_share=fitted_constants().matmul_share / 4)
    run = Run(micro_batch=8, sequence=1024)
    for constants in (None, slow):
        cluster = cluster_of(replace(device, constants=constants), 8)
        (point,) = scaling_curve(model, run, cluster, devices=(8,), hours=1)
        assert point.prediction.step_s == predict(model, run, cluster).step_s
        _, full_s, _ = where_hybrid_wins(model, run, cluster, devices=(8, 16)).steps[0]
        assert full_s == predict(model, run, replace(cluster, devices=16)).step_s


def test_a_model_that_fits_nowhere_is_refused():
    cluster = cluster_of(named_device("a100-40"), 8)
    with pytest.raises(ConfigurationError, match="smaller micro-batch"):
        where_hybrid_wins(named_model("llama3-405b"), Run(sequence=8192), cluster, devices=(8, 16))


@pytest.mark.parametrize(
    "wrong",
    [
        {"device_mtbf_s": 0},
        {"detect_s": -1},
        {"blocking_share": 1.5},
        {"slow_factor": 0.5},
        {"slow_rate": float("nan")},
    ],
)
def test_impossible_faults_are_refused(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Faults(**wrong)


def test_impossible_runs_are_refused():
    with pytest.raises(ConfigurationError, match="step above 0"):
        LongRun(0.0, 8, 1, 0.0)
    with pytest.raises(ConfigurationError, match="hours"):
        simulate(LongRun(1.0, 8, 1, 0.0), hours=0)
