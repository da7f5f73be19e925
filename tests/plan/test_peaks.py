# SPDX-License-Identifier: Apache-2.0
"""The predicted peak of a step is that of a run on this host, activations included.

Of each kind of model one that keeps and one that recomputes, the quickest of several sizes; all of
them with FULLSHARD_ALL_CASES=1 in the environment.
"""

import os

import pytest
import torch.distributed as dist
from support.measured_peak import (
    convolutions,
    encoder_decoder,
    gpt,
    measured_peak_bytes,
    token_loss,
)
from support.planned_engine import DEVICE, LINK, as_among_threads
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard.core.strategy import Precision
from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.measured import MeasuredModel
from fullshard.plan.memory import forecast_memory
from fullshard.plan.run import Run
from fullshard.plan.step.script import write_script
from fullshard.torch.measuring import record_step

pytestmark = pytest.mark.long

CASES = {
    "gpt": gpt(3, 64, 4, 64),
    "gpt, long": gpt(2, 64, 1, 256),
    "gpt, wide": gpt(2, 192, 2, 32),
    "gpt, deep": gpt(6, 32, 8, 32),
    "convolutions": convolutions(16, 3, 8, 32),
    "convolutions, wide": convolutions(64, 2, 4, 16),
    "convolutions, large images": convolutions(8, 2, 2, 64),
    "encoder and decoder": encoder_decoder(64, 2, 4, 64),
    "encoder and decoder, wide": encoder_decoder(128, 1, 4, 32),
    "encoder and decoder, deep": encoder_decoder(32, 3, 8, 32),
}


ALL = [(name, recomputes) for name in CASES for recomputes in (False, True)]
SAMPLE = [
    *(("gpt, long", True), ("convolutions, large images", False), ("encoder and decoder", True)),
]


@pytest.mark.parametrize(
    ("name", "recomputes"),
    ALL if os.environ.get("FULLSHARD_ALL_CASES") else SAMPLE,
    ids=lambda value: value if isinstance(value, str) else ("recomputed" if value else "kept"),
)
def test_peak_is_within_3_percent_of_a_run(name, recomputes):
    case, world = CASES[name], 4
    build = case.recomputing if recomputes else case.build
    recording = record_step(build(), case.inputs, loss=token_loss)
    model = MeasuredModel.of(name, recording, case.blocks)
    run, cluster = Run(precision=Precision()), Cluster(DEVICE, world, world, LINK, LINK)
    script = as_among_threads(write_script(model, run, cluster))
    forecast = forecast_memory(script, model, run, cluster)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        measured = measured_peak_bytes(build, case, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    assert forecast.allocated_bytes == pytest.approx(measured, rel=0.03)
