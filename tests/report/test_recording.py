# SPDX-License-Identifier: Apache-2.0
"""Recorded runs: what ranks did, as it was, by both interfaces; and training as without."""

import copy
import json
import re
import time

import pytest
import torch
from support import recording_workers
from support.beside import grid, shard
from support.stack import WIDTH, Stack, step
from torch import nn

from fullshard.core.errors import ConfigurationError, UsageError
from fullshard.report import MemoryByOwner, read_run, record_path, recording
from fullshard.testing import LocalWorld
from fullshard.torch import ShardingStrategy, tracing
from fullshard.torch.comm.protocol import SoloComm
from fullshard.torch.inspection.run_record import live_table
from fullshard.torch.inspection.traffic import tracker_to_record
from fullshard.torch.step.managed import managed_units

PLAIN = Stack(3)


def by_function(comm):
    return shard(copy.deepcopy(PLAIN), comm, units=[nn.Sequential])


def by_wrapper(comm, **options):
    return shard(copy.deepcopy(PLAIN), comm, "wrapper", [nn.Sequential], **options)


def in_pairs(comm):
    return by_wrapper(grid(comm), sharding_strategy=ShardingStrategy.HYBRID_SHARD)


SHARDED = {"function": by_function, "wrapper": by_wrapper, "hybrid": in_pairs}


def train(model, steps=5, folder=None, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if folder is None:
        for _ in range(steps):
            step(model, optimizer)
            optimizer.zero_grad()
        return
    with recording(folder, model, optimizer, **options) as run:
        for number in range(steps):
            assert run.step == number
            with run.span("data"):
                pass
            step(model, optimizer)
            run.note(loss=torch.tensor([0.5 + number], requires_grad=True), tokens=2)
            optimizer.zero_grad()


def values(model):
    return [param.local.clone() for unit in managed_units(model) for param in unit.unit.sharded]


@pytest.mark.parametrize("name", SHARDED)
def test_a_record_has_the_ops_of_the_trace_and_changes_no_bit(tmp_path, name):
    def body(comm):
        other = SHARDED[name](comm)
        train(other)
        model = SHARDED[name](comm)
        train(model, folder=tmp_path, detailed_every=4)
        assert tracker_to_record(model).executor.recorders == ()
        for mine, plain in zip(values(model), values(other), strict=True):
            assert torch.equal(mine, plain)
        with tracing(model) as trace:
            step(model)
        return trace

    traces = LocalWorld(4).run(body)
    run = read_run(tmp_path)
    assert run.world == 4
    assert run.absent == ()
    for rank, record in run.ranks.items():
        (attempt,) = record.attempts
        assert record.damaged == 0
        assert [unit.name for unit in attempt.facts.units] == [
            "(root)",
            *(f"blocks.{number}" for number in range(3)),
        ]
        assert [each.step for each in attempt.steps] == [0, 1, 2, 3, 4]
        assert [each.loss for each in attempt.steps] == [0.5, 1.5, 2.5, 3.5, 4.5]
        assert [each.tokens for each in attempt.steps] == [2] * 5
        assert [each.ops is not None for each in attempt.steps] == [True, True, True, False, True]
        for earlier, later in zip(attempt.steps, attempt.steps[1:], strict=False):
            assert earlier.end_s == later.begin_s
        for each in attempt.steps:
            assert {"await_gather", "await_reduce", "forward", "backward", "issue"} <= set(
                each.sums_s
            )
            assert [span.what for span in each.spans] == ["data", "optimizer"]
            assert sum(each.sums_s.values()) <= each.duration_s + 1e-5
        ops = [
            (each.op, each.unit, each.bytes, each.live_bytes)
            for each in traces[rank]
            if each.op != "fill"
        ]
        recorded = [
            (each.op, each.unit, each.bytes, each.live_bytes)
            for each in attempt.trace(attempt.steps[-1])
        ]
        # The trace has no op for the wait that comes before a sum over replicas.
        assert [each for each in recorded if name != "hybrid"] == (ops if name != "hybrid" else [])


def test_times_of_ops_are_in_order_and_waits_name_who_waited(tmp_path):
    LocalWorld(2).run(lambda comm: train(by_function(comm), 4, tmp_path))
    for record in read_run(tmp_path).ranks.values():
        for each in record.attempts[0].steps[1:3]:
            ops = list(each.ops)
            for op in ops:
                assert each.begin_s <= op.begin_s <= op.end_s <= each.end_s
            gathers = [op for op in ops if op.op == "gather"]
            waits = [op for op in ops if op.op == "await_gather"]
            assert [(op.unit, op.end_s) for op in gathers] == [(op.unit, op.end_s) for op in waits]
            assert all(op.waiter == op.unit for op in waits)
            reduces = {op.unit: op.end_s for op in ops if op.op == "reduce"}
            assert reduces == {op.unit: op.end_s for op in ops if op.op == "await_reduce"}
            passes = [(op.op, op.unit) for op in ops if op.op in ("forward", "backward")]
            assert [unit for what, unit in passes if what == "forward"] == [1, 2, 3, 0]
            assert [unit for what, unit in passes if what == "backward"][:3] == [3, 2, 1]
            assert each.memory[-1].parameters_bytes > 0
            assert each.memory[-1].optimizer_bytes > each.memory[-1].parameters_bytes


def test_what_comes_between_steps_belongs_to_none(tmp_path):
    def body(comm):
        model = by_wrapper(comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [torch.ones(2, WIDTH)] * 3
        with recording(tmp_path, model, optimizer) as run:
            run.goes_on_from(7)
            for batch in run.data(batches):
                model(batch).sum().backward()
                optimizer.step()
                with run.span("evaluation"), torch.no_grad():
                    model(batch)
                with run.span("checkpoint"):
                    pass

    LocalWorld(2).run(body)
    (attempt,) = read_run(tmp_path).ranks[1].attempts
    between = [span.what for span in attempt.spans]
    assert between == ["start", *["evaluation", "checkpoint"] * 3]
    assert [each.step for each in attempt.steps] == [7, 8, 9]
    for number, each in enumerate(attempt.steps):
        assert [span.what for span in each.spans] == ["data", "optimizer"]
        assert all(span.end_s <= each.begin_s for span in attempt.spans[: 2 * number + 1])
        assert all(span.begin_s >= each.end_s for span in attempt.spans[2 * number + 1 :])


def test_without_an_optimizer_a_forward_behind_a_backward_begins_a_step(tmp_path):
    def body(comm):
        model = by_function(comm)
        with recording(tmp_path, model) as run:
            for _ in range(3):
                with torch.no_grad():
                    model(torch.ones(2, WIDTH))
                step(model)
            run.end_step()

    LocalWorld(2).run(body)
    (attempt,) = read_run(tmp_path).ranks[0].attempts
    assert len(attempt.steps) == 3
    for each in attempt.steps:
        whats = [(op.op, op.unit) for op in each.ops]
        assert whats.count(("forward", 0)) == 2
        assert whats.count(("backward", 1)) == 1


def test_time_counts_once_if_a_closure_computes_within_the_optimizers_step(tmp_path):
    def body(comm):
        model = by_function(comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure():
            with run.span("mine"):
                optimizer.zero_grad()
            loss = model(torch.ones(2, WIDTH)).square().mean()
            loss.backward()
            return loss

        with recording(tmp_path, model, optimizer) as run:
            for _ in range(4):
                optimizer.step(closure)

    LocalWorld(2).run(body)
    (attempt,) = read_run(tmp_path).ranks[0].attempts
    for each in attempt.steps:
        assert {"forward", "backward", "optimizer", "mine"} <= each.sums_s.keys()
        assert sum(each.sums_s.values()) <= each.duration_s + 1e-5


def test_a_run_that_fails_says_so_and_its_restart_is_a_second_attempt(tmp_path):
    def body(comm):
        model = by_function(comm)
        with pytest.raises(ZeroDivisionError), recording(tmp_path, model):
            raise ZeroDivisionError("<no> zero\nhere")
        train(model, 2, tmp_path)

    LocalWorld(2).run(body)
    first, second = read_run(tmp_path).ranks[1].attempts
    assert first.ending == "ZeroDivisionError: <no> zero"
    assert first.steps == ()
    assert (second.ending, len(second.steps)) == ("finished", 2)


def test_a_step_that_fails_leaves_nothing_open(tmp_path):
    def body(comm):
        model = by_function(comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with recording(tmp_path, model, optimizer):
            step(model, optimizer)
            with pytest.raises(RuntimeError):
                model(torch.ones(2, WIDTH + 1))
            step(model, optimizer)

    LocalWorld(2).run(body)
    (attempt,) = read_run(tmp_path).ranks[0].attempts
    passes = [op.unit for op in attempt.steps[1].ops if op.op == "forward"]
    assert passes[-4:] == [1, 2, 3, 0]


def test_when_memory_runs_out_the_error_says_what_is_live(tmp_path):
    def greedy(*_):
        torch.empty(2**60, dtype=torch.uint8)

    def body(comm):
        model = by_function(comm)
        optimizer = torch.optim.AdamW(model.parameters())

        def two_steps():
            with recording(tmp_path, model, optimizer):
                step(model, optimizer)
                model.blocks[1][0].register_forward_hook(greedy)
                step(model, optimizer)

        with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as caught:
            two_steps()
        (note,) = caught.value.__notes__
        return note

    notes = LocalWorld(2).run(body)
    shard = 2 * (WIDTH * WIDTH + WIDTH) * 4  # of 2 ranks, without padding
    for rank, note in enumerate(notes):
        assert note.startswith(f"Out of memory on rank {rank}.")
        sizes = dict(re.findall(r"^(.*?)  +([\d.]+ \w+)$", note, re.MULTILINE))
        assert sizes["parameters, sharded"] == sizes["gradients, sharded"]
        assert float(sizes["parameters, sharded"].split()[0]) * 1024 >= 3 * shard / 2
        assert re.search(r"^blocks\.2 +11\.\d+ KiB +0 B$", note, re.MULTILINE)  # gathered ahead
        assert "blocks.1 " not in note  # freed as the error came out of it
        left = record_path(tmp_path, rank).with_name(f"memory-rank-{rank:05d}.txt")
        assert left.read_text() == f"{note}\n\n"
    (attempt,) = read_run(tmp_path).ranks[1].attempts
    assert attempt.ending.startswith("RuntimeError: ")
    assert len(attempt.steps) == 1


def test_what_is_live_is_written_by_owner_and_by_unit():
    memory = MemoryByOwner(0.5, 2048, 1024, 4096, 512, 256, 8192, 2**14, 2**20)
    units = {"idle": (0, 0), "small": (0, 256), "large": (512, 0)}
    units |= {f"more.{number}": (64, 0) for number in range(7)}
    first, *lines, last = live_table(3, memory, units).splitlines()
    assert first == "Out of memory on rank 3."
    assert [tuple(re.split("  +", line)) for line in lines if line[0] != "-"] == [
        ("live as the error came out", "bytes"),
        ("parameters, sharded", "2.00 KiB"),
        ("gradients, sharded", "1.00 KiB"),
        ("optimizer state", "4.00 KiB"),
        ("full parameters of units", "512 B"),
        ("full gradients of units", "256 B"),
        ("activations and all else", "256 B"),
        ("together", "8.00 KiB"),
        ("the most so far", "16.00 KiB"),
        ("there is", "1.00 MiB"),
        ("unit", "full parameters", "full gradients"),
        ("large", "512 B", "0 B"),
        ("small", "0 B", "256 B"),
        *((f"more.{number}", "64 B", "0 B") for number in range(6)),
        ("(and 1 more)",),
    ]
    assert "fullshard plan" in last


def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path):
    model, folder = nn.Linear(2, 2), tmp_path / "run"
    for options in (
        {"detailed_every": 0},
        {"detailed_every": True},
        {"limit_bytes": 10},
        {"settings": {"device": torch.device("cpu")}},
        {"optimizer": [torch.optim.SGD(model.parameters()), model]},
    ):
        with pytest.raises(ConfigurationError, match="must be"):
            recording(folder, model, **options).__enter__()
    assert not folder.exists()
    folder.write_text("a file")
    with pytest.raises(ConfigurationError, match="cannot write"):
        recording(folder, model).__enter__()
    folder.unlink()

    with recording(tmp_path, model) as run:
        for noted in ({"loss": torch.ones(2)}, {"tokens": -1}):
            with pytest.raises(ConfigurationError, match="a loss of one element"):
                run.note(**noted)

        with pytest.raises(UsageError, match="a folder of its own"):
            recording(tmp_path, nn.Linear(2, 2)).__enter__()

    def body(comm):
        model = by_function(comm)
        with recording(folder, model), pytest.raises(UsageError, match="being recorded already"):
            recording(folder, model).__enter__()

    LocalWorld(2).run(body)


def test_a_full_disk_ends_the_record_and_not_the_training(tmp_path, monkeypatch):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    def body():
        with recording(tmp_path, model, optimizer):
            monkeypatch.setattr("fullshard.report.files.RecordWriter._write", full)
            for _ in range(4):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()

    with pytest.warns(UserWarning, match="so the record ends.*No space left") as warned:
        body()
    assert len(warned) == 1


def test_a_plain_model_is_recorded_as_one_unit(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(tmp_path, model, optimizer, settings={"name": "<b>", "lr": 0.1}):
        for _ in range(2):
            model(torch.ones(1, 2, requires_grad=True)).sum().backward()
            optimizer.step()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    (attempt,) = read_run(tmp_path).ranks[0].attempts
    assert attempt.facts.engine == "plain"
    assert attempt.facts.settings["name"] == "<b>"
    assert attempt.facts.units == (("(root)", 12, 48, 48, 48),)
    passes = [op.op for op in attempt.steps[1].ops]
    assert passes == ["forward", "backward"]
    assert "memory of gather buffers" in attempt.facts.missing[0]


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_backward_whose_inputs_have_no_gradients_ends_with_all_of_it(tmp_path, accumulated):
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(tmp_path, model, optimizer, detailed_every=1):
        for _ in range(4):
            for _ in range(accumulated):
                model(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
    (attempt,) = read_run(tmp_path).ranks[0].attempts
    for each in attempt.steps:
        assert [op.op for op in each.ops] == ["forward", "backward"] * accumulated
        assert each.sums_s["backward"] > 0


def test_a_step_of_several_optimizers_ends_when_all_have_stepped(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.AdamW(model[1].parameters(), lr=0.1)
    with recording(tmp_path, model, [first, second]):
        for turn in range(3):
            model(torch.ones(1, 2)).sum().backward()
            for optimizer in [first, second][:: -1 if turn else 1]:
                optimizer.step()
    (attempt,) = read_run(tmp_path).ranks[0].attempts
    assert [step.step for step in attempt.steps] == [0, 1, 2]
    assert [span.what for step in attempt.steps for span in step.spans] == ["optimizer"] * 6
    assert attempt.steps[-1].memory[-1].optimizer_bytes == 2 * 24 + 2 * 4  # AdamW's of six values


def test_pytorchs_fsdp2_is_recorded_as_far_as_its_hooks_tell(tmp_path, gloo_world):
    gloo_world.run_joined(2, recording_workers.train_fsdp2, str(tmp_path))
    run = read_run(tmp_path)
    assert run.absent == ()
    for record in run.ranks.values():
        (attempt,) = record.attempts
        assert attempt.facts.engine == "torch.distributed.fsdp"
        assert [unit.name for unit in attempt.facts.units] == ["(root)", "blocks.0", "blocks.1"]
        assert len(attempt.facts.missing) == 2
        block = attempt.facts.units[1]
        assert block.numel == 2 * (WIDTH * WIDTH + WIDTH)
        assert block.shard_bytes < block.full_bytes
        ops = [(op.op, op.unit) for op in attempt.steps[1].ops]
        assert {("await_gather", 1), ("forward", 2), ("backward", 2)} <= set(ops)
        assert {("backward", 0), ("await_reduce", 1), ("await_reduce", 2)} <= set(ops)
        behind = ops[ops.index(("forward", 0)) :]  # of the root, which ends last
        assert ("await_gather", 2) in behind
        assert attempt.steps[2].sums_s["await_gather"] > 0


def test_ranks_that_are_processes_write_under_their_own_numbers(tmp_path, gloo_world):
    gloo_world.run_joined(3, recording_workers.train_ours, str(tmp_path))
    run = read_run(tmp_path)
    assert (run.world, run.absent) == (3, ())
    for rank, record in run.ranks.items():
        assert record.attempts[0].facts.rank == rank
        assert record.attempts[0].facts.clock_offset_s == 0.0  # they share a host
        lines = record_path(tmp_path, rank).read_text().splitlines()
        assert {next(iter(json.loads(line))) for line in lines} == {
            "attempt",
            "span",
            "step",
            "end",
        }


class Event:
    """An event of a device that is behind its host, and counts who asks it."""

    asked = 0

    def __init__(self, device):
        self.device, self.at = device, time.perf_counter()

    def query(self):
        Event.asked += 1
        return self.device.reached >= self.at

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3

    def synchronize(self):
        self.device.reached = max(self.device.reached, self.at)


class LateClock:
    """A `DeviceClock` of a device; what its tests have not let it reach, it has not reached."""

    def __init__(self, device):
        self.on_host, self.reached = False, 0.0
        self.start = self.mark()

    def mark(self):
        return Event(self)

    def elapsed_s(self, begin, end):
        assert self.reached >= end.at, "asks for a time that would have to be waited for"
        return begin.elapsed_time(end) / 1e3


def test_on_a_device_nothing_is_asked_in_a_step_and_steps_are_written_as_they_are_reached(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("fullshard.torch.step.profiling.DeviceClock", LateClock)
    model = by_function(SoloComm())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = record_path(tmp_path, 0)
    with recording(tmp_path, model, optimizer, detailed_every=4) as run:
        clock = run._clock
        for number in range(8):
            Event.asked = 0
            model(torch.ones(2, WIDTH)).square().mean().backward()
            assert Event.asked == 0
            optimizer.step()
            assert Event.asked == (6 if number == 6 else number > 0)  # between steps
            run.note(loss=float(number))
            if number == 5:
                assert path.read_text().count('"step":{') == 0
                clock.reached = time.perf_counter()
        # Those before the newest were written when the device had got there.
        assert path.read_text().count('"step":{') == 6
        clock.reached = time.perf_counter()
    (attempt,) = read_run(tmp_path).ranks[0].attempts
    assert [each.loss for each in attempt.steps] == list(map(float, range(8)))
    assert [each.ops is not None for each in attempt.steps] == [n < 3 or n == 4 for n in range(8)]
    for earlier, later in zip(attempt.steps, attempt.steps[1:], strict=False):
        assert later.begin_s == pytest.approx(earlier.end_s, abs=1e-6)
    for each in attempt.steps:
        assert ("await_reduce" in each.sums_s) == (each.ops is not None)
        for op in each.ops or ():
            assert each.begin_s <= op.begin_s <= op.end_s <= each.end_s
