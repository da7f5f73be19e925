# SPDX-License-Identifier: Apache-2.0
"""Ways to train on one GPU: those that were measured are told as they were, and each matters."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from fullshard.core.strategy import Precision
from fullshard.plan import (
    Recompute,
    Run,
    cluster_of,
    named_device,
    named_model,
    predict,
    write_script,
)
from fullshard.plan.choose.settings import Setup, with_setting
from fullshard.plan.memory import memory_timeline
from fullshard.plan.run import AttentionKernel, Engine, OptimizerKernels

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MEASURED = BENCHMARKS / "data" / "measured"
H100, MODEL = named_device("h100"), named_model("llama3-8b")
RUN = Run(sequence=8192, recompute=Recompute.FULL)


def told(file):
    """Each row with what was measured beside it, and its prediction."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        from plan_rows import read_rows  # noqa: PLC0415

        rows = read_rows(MEASURED / f"{file}.csv")
    found = json.loads((MEASURED / f"{file}.json").read_text("utf-8"))["rows"]
    adapters = [each["case"].get("adapters", "all same") for each in found]
    ran = [
        each
        for each, how in zip(found, adapters, strict=True)
        if "failed" not in each and each["case"]["loss"] != "policy" and len(how.split()) == 2
    ]
    predicted = [predict(row.model, row.run, row.cluster) for row in rows]
    return list(zip(rows, ran, predicted, strict=True))


@pytest.fixture(scope="module")
def measured():
    return told("h100_one_gpu")


def test_adapters_liger_and_what_else_was_not_explained():
    later = told("h100_later")
    speed = [abs(found.tokens_per_s / row.tokens - 1) for row, _, found in later]
    held = [
        abs(found.memory.allocated_bytes / 2**30 / ran["allocated_gib"] - 1)
        for _, ran, found in later
    ]
    assert len(later) == 20
    assert statistics.fmean(speed) < 0.09
    assert statistics.median(speed) < 0.06
    assert statistics.fmean(held) < 0.05
    adapted = [each for each, (row, *_) in zip(speed, later, strict=True) if row.run.lora_rank]
    assert statistics.fmean(adapted) < 0.02


def test_speeds_of_57_ways_to_train(measured):
    errors = [abs(found.tokens_per_s / row.tokens - 1) for row, _, found in measured]
    assert statistics.fmean(errors) < 0.08
    outside = [
        row.label
        for row, ran, found in measured
        if not found.interval.low_s <= ran["step_s"] <= found.interval.high_s
    ]
    assert len(outside) <= 0.16 * len(measured), outside


def test_tensors_at_the_peak_of_57_ways_to_train(measured):
    errors = [
        found.memory.allocated_bytes / 2**30 / ran["allocated_gib"] - 1
        for _, ran, found in measured
    ]
    assert statistics.fmean(map(abs, errors)) < 0.03
    assert statistics.median(map(abs, errors)) < 0.01


def test_what_full_recomputation_leaves_of_the_logits_is_in_the_interval(measured):
    recomputed = [
        found.memory_interval[1] / 2**30 - found.memory.peak["context and nccl"] / 2**30
        > ran["reserved_gib"]
        for row, ran, found in measured
        if row.run.recompute is Recompute.FULL
    ]
    assert sum(recomputed) >= 0.8 * len(recomputed)


def seconds(devices=1, **changed):
    return predict(MODEL, replace(RUN, **changed), cluster_of(H100, devices)).step_s


def test_a_mask_makes_attention_take_longer_and_windows_save_nothing_beside_it():
    usual, masked = (
        predict(MODEL, replace(RUN, attention=each), cluster_of(H100, 1))
        for each in (AttentionKernel.CUDNN, AttentionKernel.MASKED)
    )
    assert masked.step_s > 1.2 * usual.step_s
    assert masked.memory.peak == usual.memory.peak
    mistral = named_model("mistral-7b")
    within, without = (
        replace(mistral, shape=replace(mistral.shape, window=window)) for window in (1024, 0)
    )
    run = replace(RUN, attention=AttentionKernel.MASKED)
    cluster = cluster_of(H100, 1)
    assert predict(within, run, cluster).step_s == predict(without, run, cluster).step_s


def test_transformers_own_attention_keeps_six_bytes_a_score():
    """The softmax in float32, and its cast; PyTorch's math kernel keeps the softmax alone.

    Both keep keys and values for all heads.
    """
    run = replace(RUN, sequence=1024, recompute=Recompute.NONE)
    shape = MODEL.shape
    scores = shape.layers * shape.heads * 1024**2
    repeated = 2 * 2 * shape.layers * 1024 * (shape.query_width - shape.kv_width)
    kernels = AttentionKernel.CUDNN, AttentionKernel.MATH, AttentionKernel.EAGER
    kept = {}
    for kernel in kernels:
        found = predict(MODEL, replace(run, attention=kernel), cluster_of(H100, 64))
        kept[kernel] = found.memory.peak["activations"]
    usual = kept[AttentionKernel.CUDNN]
    assert kept[AttentionKernel.MATH] - usual == pytest.approx(4 * scores + repeated, rel=0.05)
    assert kept[AttentionKernel.EAGER] - usual == pytest.approx(6 * scores + repeated, rel=0.05)


def test_a_loop_over_dtensors_takes_the_host_longest():
    """8.3 times as long as one over tensors, which nothing else of a step hides."""
    loop = OptimizerKernels.LOOP

    def of(engine, kernels):
        run = replace(RUN, engine=engine, optimizer_kernels=kernels)
        return predict(MODEL, run, cluster_of(H100, 64)).parts["optimizer"]

    assert of(Engine.FSDP2, loop) > 5 * of(Engine.FULLSHARD, loop)
    assert of(Engine.FSDP2, OptimizerKernels.FUSED) == of(Engine.FSDP2, None)
    assert of(Engine.FSDP2, OptimizerKernels.FOREACH) > 2 * of(Engine.FSDP2, None)


def test_an_untold_optimizer_is_given_the_room_of_a_foreach_one():
    """PyTorch's default: a temporary like the trained parameters, while a step is made."""
    few = replace(RUN, sequence=64, param_dtype="bfloat16", precision=Precision())

    def held(kernels):
        run = replace(few, optimizer_kernels=kernels)
        cluster = cluster_of(H100, 1)
        script = write_script(MODEL, run, cluster)
        return memory_timeline(script, run, cluster)[-1].bytes["optimizer"]

    fused, foreach = held(OptimizerKernels.FUSED), held(OptimizerKernels.FOREACH)
    assert foreach - fused == 2 * MODEL.spec(few).numel
    assert held(None) == foreach


def test_what_is_not_told_of_a_loop_is_later_only():
    run = replace(RUN, engine=Engine.FSDP2)
    untold = predict(MODEL, run, cluster_of(H100, 64))
    told = predict(
        MODEL,
        replace(run, optimizer_kernels=OptimizerKernels.FUSED, attention=AttentionKernel.CUDNN),
        cluster_of(H100, 64),
    )
    later = {each.name.split(":")[0] for each in untold.interval.unknowns if each.later}
    assert {
        "an optimizer that loops over parameters",
        "another kernel of attention, or a mask beside it",
    } <= later
    assert told.step_s == untold.step_s
    assert told.interval.high_s < untold.interval.high_s


def test_float32_is_no_tf32_unless_it_is_told():
    """PyTorch's default; an H100 computes 7.4 times as fast in TF32."""
    setup = Setup(RUN, cluster_of(H100, 1))
    plain, tf32 = (with_setting(setup, "precision", name) for name in ("fp32", "tf32"))
    slow, fast = (predict(MODEL, each.run, each.cluster).parts["compute"] for each in (plain, tf32))
    assert 5 < slow / fast < 7.4


def test_optimizers_on_the_host_share_its_memory():
    def optimizer_s(devices):
        setup = with_setting(Setup(RUN, cluster_of(H100, devices)), "offload", "params")
        return predict(MODEL, setup.run, setup.cluster).parts["optimizer"]

    assert optimizer_s(8) == pytest.approx(optimizer_s(1), rel=0.01)
    assert optimizer_s(16) == pytest.approx(optimizer_s(8) / 2, rel=0.01)
