# SPDX-License-Identifier: Apache-2.0
"""Bytes, counted by hand, from storages and by the profiler's record of the allocator."""

import weakref

import pytest
import torch
from support.stack import LAYERS, WIDTH, shard_stack, step
from support.threads import without_collector
from support.world import on_processes

from fullshard.core.layout import ALIGN_NUMEL, lay_out
from fullshard.core.spec import ParamSpec
from fullshard.testing import LocalComm, LocalWorld
from fullshard.torch import resting_bytes, tracing
from fullshard.torch.step.managed import managed_unit_of


def block_layout(shards):
    specs = [ParamSpec(f"{layer}.weight", (WIDTH, WIDTH)) for layer in (0, 2)]
    specs += [ParamSpec(f"{layer}.bias", (WIDTH,)) for layer in (0, 2)]
    return lay_out(specs, shards)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_bytes_at_rest_are_the_layouts(world):
    def body(comm):
        model = shard_stack(comm, align="element")
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer)
        spans = sum(p.span.numel for p in model.parameters())
        return resting_bytes(model, optimizer), spans, len(list(model.parameters()))

    shard = LAYERS * block_layout(world).shard_bytes
    for rest, span_numel, count in LocalWorld(world).run(body):
        assert rest.parameters_bytes == shard
        assert rest.gradients_bytes == shard
        # exp_avg and exp_avg_sq for this rank's elements, and Adam's step of each parameter
        assert rest.optimizer_bytes == 2 * 4 * span_numel + 4 * count
    # Padding: less than the alignment for each slot and for each rank's slice of each block.
    payload = LAYERS * 2 * (WIDTH * WIDTH + WIDTH) * 4
    assert payload <= shard * world <= payload + LAYERS * (4 + world) * ALIGN_NUMEL * 4


def test_gradients_are_gone_after_zero_grad():
    def body(comm):
        model = shard_stack(comm, align="element")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model)
        optimizer.zero_grad()
        return resting_bytes(model, optimizer).gradients_bytes

    assert LocalWorld(2).run(body) == [0, 0]


def unit_bytes_from_allocator(run, sizes):
    """Peak and rest of live bytes in allocations of the given sizes, as the profiler saw them."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, profile_memory=True, acc_events=True
    ) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    live = peak = seen = 0
    for event in events:
        if abs(event.nbytes()) in sizes:
            live += event.nbytes()
            peak = max(peak, live)
            seen += 1
    assert seen, "the profiler saw no allocation of a unit's size"
    return peak, live


@pytest.mark.parametrize(
    ("eager", "forward_units", "backward_units"),
    [(True, 2, 3), (False, 2, 4)],
    ids=["reduces complete at once", "one reduce in flight"],
)
def test_transient_peak_in_units(eager, forward_units, backward_units):
    """Measured from the allocator on one rank, and equal to the engine's own trace.

    The most is held when a unit has its last gradient. They are as autograd made them then, without
    padding; when they are copied to be sent, the parameters are gone.
    """
    unit = block_layout(2).full_bytes
    made = 2 * sum(-(-numel * 4 // 32) * 32 for numel in (WIDTH * WIDTH, WIDTH))
    found = {}

    def body(comm):
        model = shard_stack(comm, align="element")
        step(model)
        model.zero_grad()
        with tracing(model) as trace:
            if comm.rank:
                model(torch.ones(2, WIDTH)).square().mean().backward()
            else:
                measure(model)
        found[comm.rank] = trace

    def measure(model):
        outputs = []
        found["forward"] = unit_bytes_from_allocator(
            lambda: outputs.append(model(torch.ones(2, WIDTH)).square().mean()), {unit}
        )
        found["backward"] = unit_bytes_from_allocator(lambda: outputs.pop().backward(), {unit})

    LocalWorld(2, eager=eager).run(body)
    trace = found[0]
    gathers = [i for i, record in enumerate(trace) if record.op == "gather"]
    in_forward = max(
        record.live_bytes for record in trace.records[: gathers[LAYERS]]
    )  # of backward
    assert in_forward == forward_units * unit
    assert trace.peak_bytes == (backward_units - 1) * unit + made
    # The profiler sees this rank's thread alone.
    # The last block stays for its backward, where the profiler has not seen it come.
    assert found["forward"] == (in_forward, unit)
    assert found["backward"] == ((backward_units - 2) * unit, -unit)
    assert trace.records[-1].live_bytes == 0


def test_a_deleted_model_gives_everything_back():
    def body(comm):
        with without_collector():
            model = shard_stack(comm, align="element")
            optimizer = torch.optim.AdamW(model.parameters())
            step(model, optimizer)
            alive = [weakref.ref(managed_unit_of(block).unit) for block in model.blocks]
            storages = [weakref.ref(p.local) for p in model.parameters()]
            del model, optimizer
            return [reference() for reference in (*alive, *storages)]

    LocalWorld(1).run(body)  # what the first step of a process imports keeps its callers
    for world in (1, 3):
        assert LocalWorld(world).run(body) == [[None] * LAYERS * 5] * world


def test_a_gather_writes_where_the_parameters_are(monkeypatch):
    """Zero copy: the collective's output is the storage of the parameters that the modules use."""
    gathered_into = []
    original = LocalComm.all_gather

    def all_gather(comm, pairs, label=""):
        gathered_into.extend(full.untyped_storage().data_ptr() for full, _ in pairs)
        return original(comm, pairs, label)

    monkeypatch.setattr(LocalComm, "all_gather", all_gather)

    def body(comm):
        model = shard_stack(comm, align="element")
        used = []
        for block in model.blocks:
            for layer in (block[0], block[2]):
                layer.register_forward_pre_hook(
                    lambda m, _: used.append(m.weight.untyped_storage().data_ptr())
                )
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
        return used

    (used,) = LocalWorld(1).run(body)
    assert len(used) == 2 * LAYERS
    for used in LocalWorld(2, eager=True).run(body):
        assert set(used) <= set(gathered_into)


@on_processes(2)
def test_a_gather_copies_nothing_but_the_own_slice(group):
    """Counted by the profiler in processes: the rest arrives where the parameters are."""
    model = shard_stack(group, align="element")
    cpu = [torch.profiler.ProfilerActivity.CPU]
    told = {"activities": cpu, "record_shapes": True, "acc_events": True}
    with torch.no_grad(), torch.profiler.profile(**told) as profile:
        model(torch.ones(2, WIDTH))
    copied = [
        torch.Size(event.input_shapes[0]).numel()
        for event in profile.events()
        if event.name in ("aten::copy_", "aten::clone", "aten::cat", "aten::_to_copy")
    ]
    slice_numel = block_layout(2).segments[0].slice_numel
    assert [numel for numel in copied if numel > 2 * WIDTH] == [slice_numel] * LAYERS
