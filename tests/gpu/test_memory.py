# SPDX-License-Identifier: Apache-2.0
"""What CUDA's caching allocator has handed out, against layouts and traces, to the byte.

``requested_bytes`` counts what was asked for, ``allocated_bytes`` what that was rounded up to.
"""

import gc

import pytest
import torch
from support.stack import Stack
from torch import nn

from fullshard.torch import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    resting_bytes,
    tracing,
)
from fullshard.torch.comm.protocol import SoloComm
from fullshard.torch.step.managed import managed_unit_of
from fullshard.torch.step.profiling import OpRecorder

WIDTH, LAYERS = 256, 4
BF16 = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
# One gradient in bf16 lives beside the buffer while it is copied there; activations of one sample.
SLACK_BYTES = WIDTH * WIDTH * 2 + 64 * WIDTH * 4


def requested(gpu, which="current"):
    return torch.cuda.memory_stats(gpu)[f"requested_bytes.all.{which}"]


def sharded(device, **options):
    """Bf16 full parameters, so that one rank gathers and frees like many."""
    model = Stack(LAYERS, WIDTH).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=SoloComm(), mp_policy=BF16, **options)
    return fully_shard(model, mesh=SoloComm(), mp_policy=BF16, **options)


def step(model, device, optimizer=None):
    x = torch.ones(1, WIDTH, dtype=torch.bfloat16, device=device)
    model(x).square().mean().backward()
    if optimizer is not None:
        optimizer.step()


@pytest.fixture
def warm(gpu):
    """The bytes in use when the libraries that torch calls have their workspaces."""
    for dtype in (torch.float32, torch.bfloat16):
        model = Stack(2, WIDTH).to(gpu, dtype)
        model(torch.ones(1, WIDTH, dtype=dtype, device=gpu)).square().mean().backward()
        del model
    gc.collect()
    torch.cuda.synchronize()
    return requested(gpu)


def test_one_rank_gathers_and_frees(device):
    """The premise of this file, on any device."""
    model = sharded(device)
    step(model, device)
    with tracing(model) as trace:
        step(model, device)
    unit = managed_unit_of(model.blocks[0]).unit
    assert not unit.resident
    assert trace.count("gather") == 2 * LAYERS - 1  # the last stays for its backward
    # Two units and the gradients of one, and on a GPU, which is not asked whether a reduce is
    # over, the first gradient of the next: that of a bias in bf16.
    held = 2 * unit.layout.full_bytes + unit.layout.grad_full_bytes
    assert trace.peak_bytes == held + (0 if device.type == "cpu" else 2 * WIDTH)
    assert trace.records[-1].live_bytes == 0


def test_at_rest_and_when_deleted(gpu, warm):
    model = sharded(gpu)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        step(model, gpu, optimizer)
    rest = resting_bytes(model, optimizer)
    stubs = 4 * len(list(model.parameters()))  # of what users had before: a number each
    held = requested(gpu) - warm - stubs
    assert held == rest.parameters_bytes + rest.gradients_bytes + rest.optimizer_bytes
    optimizer.zero_grad()
    assert requested(gpu) - warm - stubs == rest.parameters_bytes + rest.optimizer_bytes
    del model, optimizer
    gc.collect()
    assert requested(gpu) == warm


def test_every_op_of_a_trace(gpu, warm, monkeypatch):
    """At every op the allocator holds what the trace says, within less than one unit."""
    model = sharded(gpu)
    step(model, gpu)  # gradients are there from now on, so that later ones add no memory
    before, measured, reduced = requested(gpu), [], []
    note = OpRecorder.note

    def noted(recorder, op, unit, *others):
        note(recorder, op, unit, *others)
        if op == "reduce":
            reduced.append(unit.layout.grad_full_bytes)  # on one rank it is the reduced one now
        elif op == "await_reduce":
            reduced.pop(0)
        measured.append((op, requested(gpu) - before, recorder.notes[-1][4] + sum(reduced)))

    monkeypatch.setattr(OpRecorder, "note", noted)
    unit_bytes = managed_unit_of(model.blocks[0]).unit.layout.full_bytes
    assert unit_bytes > SLACK_BYTES
    with tracing(model) as trace:
        step(model, gpu)
    assert len(measured) == len(trace) > 4 * LAYERS
    for op, held, live in measured:
        assert 0 <= held - live <= SLACK_BYTES, op
    assert max(live for _, _, live in measured) >= trace.peak_bytes


def peak_of(run, gpu):
    """Bytes by which ``run`` exceeds for a moment what was there before it."""
    before = requested(gpu)
    torch.cuda.reset_peak_memory_stats(gpu)
    run()
    return requested(gpu, "peak") - before


def test_the_peak_of_a_step(gpu, warm):
    plain = Stack(LAYERS, WIDTH).to(gpu, torch.bfloat16)
    step(plain, gpu)
    # Activations, a gradient on its way, and what kernels use for themselves.
    beside = peak_of(lambda: step(plain, gpu), gpu)
    model = sharded(gpu)
    for _ in range(2):
        step(model, gpu)
    before = requested(gpu)
    with tracing(model) as trace:
        peak = peak_of(lambda: step(model, gpu), gpu)
    resting = managed_unit_of(model.blocks[0]).unit.layout.shard_bytes  # a gradient in fp32
    assert trace.peak_bytes <= peak <= trace.peak_bytes + resting + beside
    assert requested(gpu) == before


def allocations(run, gpu, size):
    """Most and last number of live allocations of ``size`` bytes, from the allocator's history."""
    torch.cuda.memory._record_memory_history(enabled="all", context=None)
    try:
        run()
        events = torch.cuda.memory._snapshot()["device_traces"][gpu.index]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    live = most = 0
    for event in events:
        if event["size"] == size:
            live += (event["action"] == "alloc") - (event["action"] == "free_requested")
            most = max(most, live)
    return most, live


def test_allocations_of_a_units_size(gpu, warm):
    model = sharded(gpu)
    for _ in range(2):
        step(model, gpu)
    size = managed_unit_of(model.blocks[0]).unit.layout.full_bytes

    def evaluate():
        with torch.no_grad():
            model(torch.ones(1, WIDTH, dtype=torch.bfloat16, device=gpu))

    evaluate()  # its order is another than that of a step
    assert allocations(evaluate, gpu, size) == (2, 0)
    assert allocations(lambda: step(model, gpu), gpu, size) == (3, 0)


def test_offload_leaves_no_shards_on_the_device(gpu, warm):
    model = sharded(gpu, offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        step(model, gpu, optimizer)
    assert requested(gpu) == warm + 4 * len(list(model.parameters()))  # stubs


def test_offload_holds_the_gradients_of_a_few_units_only(gpu, warm):
    """Gradients leave the device while backward goes on, not when it is over."""
    layers = 12
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(layers))).to(gpu)
    for layer in model:
        fully_shard(layer, mesh=SoloComm(), offload_policy=CPUOffloadPolicy())
    fully_shard(model, mesh=SoloComm(), offload_policy=CPUOffloadPolicy())
    x = torch.ones(1, 512, device=gpu)
    for _ in range(2):
        model(x).sum().backward()
        model.zero_grad()
    size = managed_unit_of(model[0]).unit.layout.full_bytes
    most, left = allocations(lambda: model(x).sum().backward(), gpu, size)
    # Two units; the gradients of one as they come and of two on their way.
    assert 3 <= most < 7 < layers
    assert left == 0
