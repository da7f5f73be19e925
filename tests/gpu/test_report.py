# SPDX-License-Identifier: Apache-2.0
"""A recorded run: times by events of the device's streams, which add up, and a verdict."""

import itertools

import pytest
import torch
from gpu.stream_world import StreamWorld
from support.models import seeded
from support.stack import Stack

from fullshard.report import read_run, recording
from fullshard.report.shares import shares_of
from fullshard.report.summary import report_of
from fullshard.torch import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, tracing
from fullshard.torch.comm.protocol import SoloComm

WIDTH, LAYERS, STEPS = 256, 4, 12
BF16 = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
OFFLOAD = {"offload_policy": CPUOffloadPolicy()}


def sharded(comm, device, **options):
    model = seeded(lambda: Stack(LAYERS, WIDTH)).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=comm, mp_policy=BF16, **options)
    return fully_shard(model, mesh=comm, mp_policy=BF16, **options)


def train(model, optimizer, device, run=None):
    x = torch.ones(64, WIDTH, dtype=torch.bfloat16, device=device)
    losses = []
    for _ in range(STEPS):
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if run is not None:
            run.note(loss=loss, tokens=64)
    return torch.stack(losses).tolist()


@pytest.mark.parametrize("options", [{}, OFFLOAD], ids=["on the device", "offload"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_record_adds_up_and_changes_nothing(size, options, device, tmp_path):
    def body(comm):
        comm = comm if size > 1 else SoloComm()
        without = sharded(comm, device, **options)
        expected = train(without, torch.optim.AdamW(without.parameters(), lr=1e-3), device)
        model = sharded(comm, device, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with recording(tmp_path, model, optimizer, detailed_every=4) as run:
            found = train(model, optimizer, device, run)
        return expected, found

    for expected, found in StreamWorld(size, device, cycles=200_000).run(body):
        assert found == expected
    for rank in range(size):
        (attempt,) = read_run(tmp_path).ranks[rank].attempts
        assert len(attempt.steps) == STEPS
        assert [step.loss for step in attempt.steps] == pytest.approx(expected, rel=1e-5)
        detailed = [step for step in attempt.steps if step.ops is not None]
        assert len(detailed) >= 4
        for step in detailed:
            ops = list(step.ops)
            assert {"gather", "await_gather", "forward", "backward", "reduce"} <= {
                op.op for op in ops
            }
            # By the device's clock, which is read in milliseconds of 32 bits.
            for op in ops:
                assert step.begin_s - 1e-4 <= op.begin_s <= op.end_s <= step.end_s + 1e-4, op
            shares = shares_of(step)
            assert min(shares.values()) >= 0
            assert sum(shares.values()) == pytest.approx(step.duration_s, rel=1e-6)
        for before, after in itertools.pairwise(attempt.steps):
            assert before.end_s <= after.begin_s + 1e-4
    assert report_of(tmp_path).verdict


def test_the_time_of_a_layer_is_the_devices(gpu, tmp_path):
    """A block that takes long on the device takes long in the record, though the host goes on."""
    model = sharded(SoloComm(), gpu)
    model.blocks[2][1].register_forward_hook(lambda *_: torch.cuda._sleep(30_000_000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with recording(tmp_path, model, optimizer, detailed_every=1) as run:
        train(model, optimizer, gpu, run)
    (attempt,) = read_run(tmp_path).ranks[0].attempts
    step = attempt.steps[-1]
    took = {op.unit: op.end_s - op.begin_s for op in step.ops if op.op == "forward" and op.unit > 0}
    (slow,) = [unit for unit, seconds in took.items() if seconds > 5e-3]
    assert attempt.facts.units[slow].name == "blocks.2"
    assert step.duration_s > took[slow]


def test_a_traces_times_are_those_of_the_device(gpu):
    """A trace of a step that sleeps on the device is as long as that, and in order."""
    model = sharded(SoloComm(), gpu)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, gpu)
    model.blocks[1].register_forward_hook(lambda *_: torch.cuda._sleep(30_000_000))
    with tracing(model) as trace:
        model(torch.ones(64, WIDTH, dtype=torch.bfloat16, device=gpu)).sum().backward()
    times = [record.at_s for record in trace.records]
    assert times == sorted(times)
    assert max(after - before for before, after in itertools.pairwise(times)) > 5e-3
