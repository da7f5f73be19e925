# SPDX-License-Identifier: Apache-2.0
"""Predicted memory against what torchtitan has published of FSDP2 (December 2024, H100 96 GB).

Llama 3.1 8B, 8,192 tokens, 2 samples a device, selective recomputation: peak reserved GiB on 8 and
on 128 devices; from benchmarks/llama3_h100_202412_torchtitan.md in pytorch/torchtitan.
"""

from dataclasses import replace

import pytest

from fullshard.plan.cluster.devices import cluster_of, named_device
from fullshard.plan.memory import forecast_memory
from fullshard.plan.model.named import named_model
from fullshard.plan.run import Engine, Loss, Recompute, Run
from fullshard.plan.step.script import write_script

PUBLISHED = {"eager": (82.4, 67.0), "compiled": (77.0, 62.0), "compiled, float8": (76.8, 61.8)}
RUN = Run(
    micro_batch=2,
    sequence=8192,
    recompute=Recompute.SELECTIVE,
    fused_norms=False,
    loss=Loss.FREED,
)
THEIRS = replace(RUN, engine=Engine.FSDP2, expandable_segments=True)


def reserved_gib(run, devices):
    model, cluster = named_model("llama3-8b"), cluster_of(named_device("h100-96"), devices)
    script = write_script(model, run, cluster)
    return forecast_memory(script, model, run, cluster).reserved_bytes / 2**30


@pytest.mark.parametrize("how", PUBLISHED)
def test_memory_on_8_and_on_128_devices(how):
    run = replace(THEIRS, compiled=how != "eager", fp8="float8" in how)
    on_8, on_128 = reserved_gib(run, 8), reserved_gib(run, 128)
    published_8, published_128 = PUBLISHED[how]
    assert on_8 == pytest.approx(published_8, rel=0.1)
    assert on_8 - on_128 == pytest.approx(published_8 - published_128, abs=1.0)


def test_fullshard_reserves_less_than_fsdp2():
    model, cluster = named_model("llama3-8b"), cluster_of(named_device("h100-96"), 8)
    script = write_script(model, RUN, cluster)
    ours = forecast_memory(script, model, RUN, cluster)
    theirs = forecast_memory(script, model, THEIRS, cluster)
    assert ours.peak["unit buffers"] < theirs.peak["unit buffers"]
    assert ours.peak["parameters"] == theirs.peak["parameters"]
