# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step: what must hold of them whatever the constants."""

import math
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.core.errors import ConfigurationError
from fullshard.core.strategy import Precision, Prefetch, ShardingStrategy
from fullshard.plan import (
    Recompute,
    Run,
    Wrap,
    cluster_of,
    named_device,
    named_model,
    predict,
    replay,
    write_script,
)
from fullshard.plan.choose.settings import Setup, with_setting
from fullshard.plan.cluster.cluster import Link
from fullshard.plan.cluster.devices import device_names, device_of_driver, fitted_constants
from fullshard.plan.run import AttentionKernel, Engine
from fullshard.plan.step.interval import Program, cut
from fullshard.plan.step.prices import Group, gather_s, reduce_all_s

H100 = named_device("h100")
MODEL = named_model("llama3-8b")


def seconds(run, devices=64, **links):
    return predict(MODEL, run, cluster_of(H100, devices, **links)).step_s


def test_compute_alone_on_one_device_has_nothing_to_wait_for():
    found = predict(MODEL, Run(), cluster_of(H100, 1))
    assert found.parts["exposed communication"] < 1e-4 * found.step_s
    assert found.parts["stragglers"] == 0
    assert found.communication_s == 0
    assert found.step_s == pytest.approx(sum(found.parts.values()))


def test_products_of_experts_alone_are_grouped():
    """Backward has two products of each weight, which are not grouped for that."""
    slow = replace(named_device("b200"), grouped=0.1)
    for name, longer in (("llama3-8b", False), ("mixtral-8x7b", True)):
        told = [
            predict(named_model(name), Run(), cluster_of(device, 8)).parts["compute"]
            for device in (named_device("b200"), slow)
        ]
        assert (told[1] > 1.5 * told[0]) if longer else (told[0] == told[1])


def test_busy_stretches_of_a_stream_do_not_overlap_and_all_lie_in_the_step():
    run = Run(recompute=Recompute.FULL, wrap=Wrap.PART)
    cluster = cluster_of(H100, 64)
    script = write_script(MODEL, run, cluster)
    found = replay(script, run, cluster, fitted_constants(), record=True)
    assert {each.stream for each in found.records} == {"compute", "gather", "reduce"}
    for stream in ("compute", "gather", "reduce"):
        mine = [each for each in found.records if each.stream == stream]
        for earlier, later in pairwise(mine):
            assert earlier.stop_s <= later.start_s + 1e-12
    on_wire = sorted(
        (each.start_s, each.stop_s) for each in found.records if each.stream != "compute"
    )
    for (_, stop), (start, _) in pairwise(on_wire):
        assert stop <= start + 1e-12  # they share one wire
    assert max(each.stop_s for each in found.records) <= found.step_s


def test_a_unit_is_computed_only_after_its_gather():
    run = Run()
    cluster = cluster_of(H100, 64)
    script = write_script(MODEL, run, cluster)
    records = replay(script, run, cluster, fitted_constants(), record=True).records
    gathered = {}
    for each in sorted(records, key=lambda record: record.start_s):
        if each.stream == "gather":
            gathered.setdefault(each.unit, each.stop_s)
        elif each.stream == "compute" and each.label.startswith("forward"):
            assert gathered[each.unit] <= each.start_s + 1e-12


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(
    micro_batch=st.integers(1, 4),
    recompute=st.sampled_from(list(Recompute)),
    strategy=st.sampled_from([ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]),
    devices=st.sampled_from([8, 16, 128]),
)
def test_more_of_anything_does_not_take_less_time(micro_batch, recompute, strategy, devices):
    run = Run(micro_batch=micro_batch, recompute=recompute, strategy=strategy, sequence=1024)
    base = seconds(run, devices)
    assert seconds(replace(run, micro_batch=micro_batch + 1), devices) > base
    assert seconds(replace(run, accumulate=2), devices) > base
    assert seconds(run, devices, between_bandwidth=1e9) >= base
    assert seconds(replace(run, recompute=Recompute.FULL), devices) >= base - 1e-9


def test_a_second_gather_shows_where_the_link_is_slow():
    slow = {"between_bandwidth": 1e9}
    run = Run(sequence=512)
    full = seconds(run, 64, **slow)
    kept = seconds(replace(run, strategy=ShardingStrategy.SHARD_GRAD_OP), 64, **slow)
    assert kept < 0.9 * full


def test_prefetch_hides_what_gathering_on_demand_shows():
    on_demand = replace(Run(sequence=2048), prefetch=Prefetch(0, 0))
    assert seconds(Run(sequence=2048)) < seconds(on_demand)


def test_rings_move_every_byte_but_ones_own_once():
    constants = replace(fitted_constants(), inside_share=1.0, between_share=1.0)
    cluster = replace(cluster_of(H100, 16), inside=Link(100e9, 0.0), between=Link(10e9, 0.0))
    inside, across = Group(8, 8), Group(16, 8)
    assert gather_s(8e9, inside, cluster, constants) == pytest.approx(7e9 / 100e9)
    assert gather_s(16e9, across, cluster, constants) == pytest.approx(15e9 / 80e9)
    assert reduce_all_s(8e9, inside, cluster, constants) == pytest.approx(14e9 / 100e9)
    assert gather_s(8e9, Group(1, 1), cluster, constants) == 0


def test_intervals_hold_the_prediction_and_grow_with_what_is_unknown():
    told = Run(recompute=Recompute.FULL, attention=AttentionKernel.FLASH2)
    known = predict(MODEL, told, cluster_of(H100, 8))
    assumed = predict(MODEL, told, cluster_of(named_device("rtx-6000-ada"), 8))
    for each in (known, assumed):
        assert each.interval.low_s < each.step_s < each.interval.high_s
    assert (
        assumed.interval.high_s / assumed.interval.low_s
        > known.interval.high_s / known.interval.low_s
    )
    assert any("assumption" in each.name for each in assumed.interval.unknowns)


def test_a_short_step_may_be_bound_by_a_slow_host():
    run = Run(sequence=512, overhead_s=0.0)
    short = predict(named_model("gpt2-medium"), run, cluster_of(H100, 8))
    slow = next(each for each in short.interval.unknowns if "if that is slow" in each.name)
    assert slow.later > 0.6
    assert short.interval.share < 0.6  # in a factor of two
    assert short.step_s / short.interval.low_s < short.interval.high_s / short.step_s
    long = predict(MODEL, Run(recompute=Recompute.FULL), cluster_of(H100, 8))
    assert not any("if that is slow" in each.name for each in long.interval.unknowns)


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("a100-80", AttentionKernel.FLASH2), ("h100", AttentionKernel.CUDNN), ("b200", "cudnn")],
)
def test_attention_that_is_not_told_is_what_pytorch_picks(name, kernel):
    cluster = cluster_of(named_device(name), 8)
    told = predict(MODEL, Run(attention=AttentionKernel(kernel)), cluster)
    assert predict(MODEL, Run(), cluster).step_s == told.step_s


@pytest.mark.parametrize("devices", [1, 2])
def test_adapters_that_are_units_of_their_own_hold_the_host_up(devices):
    """FSDP1 only, where there is anything to gather, and the less the longer a micro-batch is."""
    cluster = cluster_of(named_device("a100-80"), devices)
    run = Run(lora_rank=16, recompute=Recompute.FULL, sequence=1024)

    def waited_s(engine, batch):
        changed = replace(run, engine=engine, micro_batch=batch)
        return predict(MODEL, changed, cluster).parts["host"]

    assert max(waited_s(Engine.FSDP2, batch) for batch in (1, 16)) < 1e-3
    if devices == 1:
        assert waited_s(Engine.FSDP1, 1) < 1e-3
    else:
        calls_s = 32 * (8 + 8 + 16) * 1e-3  # forward, again, backward with its reduces
        assert 0.5 * calls_s < waited_s(Engine.FSDP1, 1) < calls_s
        assert waited_s(Engine.FSDP1, 16) < 0.2 * waited_s(Engine.FSDP1, 1)


@pytest.mark.parametrize("name", device_names())
def test_every_device_says_where_its_figures_come_from(name):
    device = named_device(name)
    assert device.origin
    assert 0 < device.sustained <= 1.15  # boost clocks may be above the data sheet's
    halves = Precision(compute="float16" if "bfloat16" not in device.flops else "bfloat16")
    run = Run(param_dtype="float32", precision=halves, micro_batch=1, sequence=128)
    found = predict(named_model("gpt2-124m"), run, cluster_of(device, 1))
    assert 0 < found.mfu < 0.9
    assert 0 < found.watts <= device.power_w


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_devices_are_known_by_what_the_driver_says(reported, name):
    assert device_of_driver(reported) is named_device(name)


@pytest.mark.parametrize(
    "reported",
    ["NVIDIA L40", "Tesla T4", "NVIDIA GeForce RTX 2080 Ti", "NVIDIA H2000"],
)
def test_an_unknown_device_is_not_guessed(reported):
    assert device_of_driver(reported) is None


@pytest.mark.parametrize(
    ("devices", "said"),
    [(0, "at least 1, got 0"), (-4, "got -4"), (12, "take 8 or 16"), (2.0, "whole number")],
)
def test_clusters_that_cannot_be_are_refused(devices, said):
    with pytest.raises(ConfigurationError, match=said):
        cluster_of(H100, devices)


def test_unknown_devices_and_dtypes_are_refused_with_what_there_is():
    with pytest.raises(ConfigurationError, match="did you mean 'h100'"):
        named_device("h10")
    with pytest.raises(ConfigurationError, match="no matrix units for float8"):
        predict(MODEL, Run(fp8=True), cluster_of(named_device("a100-80"), 8))
    with pytest.raises(ConfigurationError, match="nearest that divides is 2"):
        predict(MODEL, Run(replicas=3), cluster_of(H100, 16))


def test_a_calibration_file_is_a_device(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[a]\ntitle = 1\n")
    with pytest.raises(ConfigurationError, match="missing"):
        named_device(str(file))
    with pytest.raises(ConfigurationError, match="No such file"):
        named_device(str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("strategy", "name", "times"),
    [("FULL_SHARD", "small", 2.5), ("NO_SHARD", "small", 0), ("FULL_SHARD", "nano", 0)],
)
def test_large_buffers_of_a_cpu_are_cleared_by_its_system_at_each_use(strategy, name, times):
    """Buffers hold the parameters once, gradients, and half of these as they are received."""
    model, device = named_model(name), named_device("cpu")
    run = Run(
        param_dtype="float32",
        precision=Precision(),
        strategy=ShardingStrategy[strategy],
        wrap=Wrap.NONE,
    )
    kept, fresh = (
        predict(model, run, cluster_of(replace(device, fresh=rate), 2)).parts["compute"]
        for rate in (None, 1e9)
    )
    whole = sum(math.prod(spec.shape) * 4 for spec in model.spec(run).params)
    assert (whole >= 2**25) == (name == "small")
    assert fresh - kept == pytest.approx(times * whole / 1e9, rel=0.01, abs=1e-9)


def test_micro_batches_that_are_not_reduced_take_less_time_and_hold_full_gradients():
    model, cluster = named_model("llama3-8b"), cluster_of(H100, 16, between_bandwidth=5e9)
    run = Run(sequence=2048, accumulate=4, engine=Engine.FSDP2)
    each, once = (predict(model, replace(run, sync_each=sync), cluster) for sync in (True, False))
    assert once.step_s < each.step_s
    numel = model.spec(run).numel
    more = once.memory.allocated_bytes - each.memory.allocated_bytes
    assert more == pytest.approx(4 * numel * 15 / 16, rel=0.05)  # float32, not a sixteenth of it


def test_intervals_are_wide_only_where_home_is_really_far():
    def ends(far):
        added = Program(sooner=0.2, later=0.26).unknown("program", far)
        return added.sooner, added.later

    assert ends(0.2) == pytest.approx((0.1, 0.1))
    assert ends(1.0) == ends(1.5) == (0.2, 0.26)
    assert ends(2.0) == pytest.approx((0.45, 0.51))


@given(st.floats(0.01, 3), st.floats(0.01, 3))
def test_an_interval_ends_at_a_factor_of_two_and_says_what_lies_inside(sooner, later):
    less, more, share = cut(sooner, later)
    assert less + more == pytest.approx(min(sooner + later, math.log(2)))
    assert less * later == pytest.approx(more * sooner)
    deviations = 1.6449 * (less + more) / (sooner + later)
    assert share == pytest.approx(2 * statistics.NormalDist().cdf(deviations) - 1, abs=0.001)


def test_links_that_are_not_told_widen_intervals_as_far_as_they_are_waited_for():
    run = Run(sequence=2048, engine=Engine.FSDP2)
    device = named_device("a100-80")
    untold, told = (
        predict(MODEL, run, cluster_of(device, 32, between_bandwidth=bandwidth))
        for bandwidth in (None, device.between.bandwidth)
    )
    assert untold.step_s == told.step_s
    slow = predict(
        MODEL, run, cluster_of(device, 32, between_bandwidth=device.between.bandwidth / 4)
    )
    link = next(each for each in untold.interval.unknowns if "--between tells" in each.name)
    assert link.later == pytest.approx(math.log(slow.step_s / told.step_s))
    assert untold.interval.high_s > told.interval.high_s
    assert untold.interval.low_s < told.interval.low_s
    assert not any("--between tells" in each.name for each in told.interval.unknowns)
    asked = with_setting(Setup(run, untold.cluster), "devices", "64").cluster
    assert "between" in asked.untold
    assert "between" not in with_setting(Setup(run, asked), "between", "100").cluster.untold


def test_a_step_may_take_as_much_less_as_its_loop_is_told_to_take():
    model, run = named_model("gpt2-124m"), Run(micro_batch=12, sequence=1024, compiled=True)
    short = predict(model, run, cluster_of(H100, 1))
    loop = next(each for each in short.interval.unknowns if "--overhead tells" in each.name)
    assert loop.sooner == pytest.approx(-math.log1p(-short.parts["step overhead"] / short.step_s))
    bare = predict(model, replace(run, overhead_s=0.0), cluster_of(H100, 1))
    assert not any("--overhead" in each.name for each in bare.interval.unknowns)


def test_another_engine_hides_half_of_what_fsdp2_does_and_is_less_sure():
    run = Run(sequence=4096, engine=Engine.FSDP2)
    known, other = (
        predict(MODEL, replace(run, engine=engine), cluster_of(named_device("a100-80"), 8))
        for engine in (Engine.FSDP2, Engine.OTHER)
    )
    hidden = known.communication_s - known.parts["exposed communication"]
    assert other.step_s - known.step_s == pytest.approx(hidden / 2, rel=0.1)
    assert other.interval.high_s / other.interval.low_s == pytest.approx(2)
    assert known.interval.share > 0.899 > other.interval.share
    assert other.interval.low_s < known.step_s
    assert any("another engine" in each.name for each in other.interval.unknowns)


def test_hooks_of_another_engine_hold_short_steps_up():
    cluster = cluster_of(named_device("a100-80"), 1)
    run = Run(sequence=64, recompute=Recompute.FULL)
    known, other = (
        predict(MODEL, replace(run, engine=engine), cluster)
        for engine in (Engine.FSDP2, Engine.OTHER)
    )
    calls = 3 * len(MODEL.blocks)  # forward, recomputed and backward
    assert other.step_s - known.step_s == pytest.approx(calls * 1.5e-3, rel=0.1)


def test_what_software_reaches_on_amd_is_unsure_towards_slower():
    run = Run(recompute=Recompute.FULL, overhead_s=0.0)
    found = predict(MODEL, run, cluster_of(named_device("mi300x"), 8)).interval
    software = next(each for each in found.unknowns if "software" in each.name)
    assert software.later > 0.5 > software.sooner
