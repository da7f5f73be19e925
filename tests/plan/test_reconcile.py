# SPDX-License-Identifier: Apache-2.0
"""A run that did what was predicted reconciles to the byte; another one tells where it left."""

from dataclasses import replace

import pytest
import torch
from support.models import seeded
from support.planned_engine import DEVICE, LINK, as_among_threads
from support.stack import WIDTH, Stack, step

from fullshard.core.errors import ConfigurationError
from fullshard.core.strategy import Precision
from fullshard.core.trace import Trace
from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.measured import MeasuredModel
from fullshard.plan.memory import forecast_memory, planned_trace
from fullshard.plan.reconcile import Measured, reconcile
from fullshard.plan.run import Run
from fullshard.plan.step.script import write_script
from fullshard.testing import LocalWorld
from fullshard.torch import fully_shard, resting_bytes, tracing
from fullshard.torch.measuring import record_step


def planned():
    run, cluster = Run(align="row", precision=Precision()), Cluster(DEVICE, 2, 2, LINK, LINK)
    recording = record_step(
        Stack(), (torch.ones(2, WIDTH),), loss=lambda output: output.square().mean()
    )
    model = MeasuredModel.of("stack", recording, [f"blocks.{n}" for n in range(4)])
    script = as_among_threads(write_script(model, run, cluster))
    return forecast_memory(script, model, run, cluster), planned_trace(script, run, cluster)


def measured():
    def body(comm):
        model = seeded(Stack)
        for block in model.blocks:
            fully_shard(block, mesh=comm)
        fully_shard(model, mesh=comm)
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer)
        optimizer.zero_grad()
        with tracing(model) as trace:
            step(model)
        rest = resting_bytes(model, optimizer)
        return Measured(
            trace, rest.parameters_bytes, rest.gradients_bytes, rest.optimizer_bytes, step_s=2.0
        )

    return LocalWorld(2).run(body)[0]


def test_a_run_as_predicted():
    forecast, trace = planned()
    found = reconcile(forecast, trace, measured(), step_s=1.5)
    assert found.exact
    assert found.first_difference is None
    assert len(found.units) == 4
    assert all(each.agrees and each.waited_s >= 0 for each in found.units)
    text = str(found)
    assert max(map(len, text.splitlines())) <= 100
    assert "all 4 units did what was predicted" in text
    assert "predicted 1.5 s, measured 2 s (-25.0%)" in text


def test_what_the_allocator_has_beyond_known_state_is_activations():
    forecast, trace = planned()
    run = replace(
        measured(),
        allocated_bytes=forecast.allocated_bytes + 1000,
        reserved_bytes=forecast.allocated_bytes + 5000,
        device_bytes=forecast.allocated_bytes + 12_000,
    )
    found = {each.name: each for each in reconcile(forecast, trace, run).categories}
    assert found["activations and logits"].difference == 1000
    assert found["allocator slack"].measured == 4000
    assert found["context and nccl"].measured == 7000
    assert found["reserved at the peak"].error < 0


def test_a_run_that_left_the_plan():
    forecast, trace = planned()
    run = measured()
    records = list(run.trace)
    skipped = next(n for n, each in enumerate(records) if each.op == "reduce")
    other = replace(run, trace=Trace(records[:skipped] + records[skipped + 1 :]))
    found = reconcile(forecast, trace, other)
    assert not found.exact
    assert found.first_difference.startswith(f"op {skipped + 1}: reduce of blocks.3 was predicted")
    assert [each.unit for each in found.units if not each.agrees] == ["blocks.3"]
    assert "blocks.3" in str(found)
    ended = reconcile(forecast, trace, replace(run, trace=Trace(records[:-1])))
    assert ended.first_difference.endswith("but the trace has ended")


def test_a_run_that_held_more_is_not_exact():
    forecast, trace = planned()
    run = measured()
    assert not reconcile(forecast, trace, replace(run, gradients_bytes=1)).exact


def test_an_empty_trace_is_refused():
    forecast, trace = planned()
    with pytest.raises(ConfigurationError, match="tracing"):
        reconcile(forecast, trace, Measured(Trace()))
