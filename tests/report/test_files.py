# SPDX-License-Identifier: Apache-2.0
"""Records of runs as files: what is written is read back, and nothing else is believed."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.core.errors import ConfigurationError
from fullshard.core.schedule import OpKind
from fullshard.report import (
    Facts,
    MemoryByOwner,
    RecordedStep,
    RecordedUnit,
    RecordWriter,
    TimedOp,
    TimedOps,
    TimedSpan,
    read_rank,
    read_run,
    record_path,
)
from fullshard.report.summary import report_of

UNITS = (RecordedUnit("(root)", 10, 40, 20, 40), RecordedUnit("layers.<b>0</b>", 6, 24, 12, 24))
FACTS = Facts(
    rank=1,
    world=2,
    host="höst",
    started_at=1.7e9,
    clock_offset_s=-0.25,
    units=UNITS,
    settings={
        "strategy": "FULL_SHARD",
        "prefetch_forward": 1,
        "compiled": False,
        "lr": 1e-9,
        "dtype": None,
    },
    forecast={"step_s": 0.5},
    missing=("no memory of the device",),
)
OPS = TimedOps.of(
    [
        TimedOp("gather", 1, 1.0, 1.25, 24, 24),
        TimedOp("await_gather", 1, 1.125, 1.25, 24, 24, 0),
        TimedOp("forward", 1, 1.25, 1.5),
    ]
)
MEMORY = MemoryByOwner(1.5, 20, 20, 40, 24, 0, 200, 250, None)
STEP = RecordedStep(
    3, 1.0, 2.0, 64, 2.5, {"forward": 0.25}, (TimedSpan("data", 1.0, 1.125),), (MEMORY,), OPS
)


def write(folder: Path, *steps: RecordedStep, facts: Facts = FACTS, limit_bytes: int = 2**20):
    writer = RecordWriter(folder, facts, limit_bytes)
    for step in steps:
        writer.step(step)
    return writer


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    writer = write(tmp_path, replace(STEP, step=2, ops=None), STEP)
    writer.span(TimedSpan("checkpoint", 2.0, 3.0))
    writer.end(3.5)
    run = read_run(tmp_path)
    assert run.world == 2
    assert run.absent == (0,)
    (attempt,) = run.ranks[1].attempts
    assert attempt.facts == FACTS
    assert [step.ops and list(step.ops) for step in attempt.steps] == [None, list(OPS)]
    read = attempt.steps[1]
    assert replace(read, ops=None) == replace(STEP, ops=None)
    assert attempt.spans == (TimedSpan("checkpoint", 2.0, 3.0),)
    assert (attempt.ended_s, attempt.ending, attempt.left_out) == (3.5, "finished", 0)
    assert attempt.last_s == 3.5
    assert attempt.wall_s(1.0) == 1.7e9 + 1.25
    assert read.memory[0].activations_bytes == 200 - 104
    assert [each.op for each in attempt.trace(read)] == ["gather", "await_gather"]


def test_a_killed_run_leaves_half_a_line_and_its_restart_goes_on_behind_it(tmp_path: Path) -> None:
    write(tmp_path, STEP)
    path = record_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-30])
    write(tmp_path, STEP, facts=replace(FACTS, world=3, started_at=1.7e9 + 60)).end(4.0)
    record = read_rank(path)
    assert record.damaged == 1
    assert [len(attempt.steps) for attempt in record.attempts] == [0, 1]
    assert [attempt.ended_s for attempt in record.attempts] == [None, 4.0]
    assert read_run(tmp_path).world == 3


@pytest.mark.parametrize("limit_bytes", [4096, 20_000])
def test_a_file_stays_below_its_limit_and_says_what_was_left_out(
    tmp_path: Path, limit_bytes: int
) -> None:
    writer = write(tmp_path, *[replace(STEP, step=n) for n in range(200)], limit_bytes=limit_bytes)
    writer.end(1e6, "out of memory" * 10_000)
    path = record_path(tmp_path, 1)
    assert path.stat().st_size <= limit_bytes
    (attempt,) = read_rank(path).attempts
    detailed = [step.ops is not None for step in attempt.steps]
    assert detailed == sorted(detailed, reverse=True)
    assert any(detailed)
    assert not all(detailed)
    assert attempt.left_out == 200 - len(attempt.steps) > 0


HOSTILE = [
    b"",
    b"[]",
    b"\xff\xfe{}",
    b'{"step":{}}',
    b'{"step":{"step":1,"begin_s":2,"end_s":1}}',
    b'{"step":{"step":1,"begin_s":-1,"end_s":1}}',
    b'{"step":{"step":true,"begin_s":0,"end_s":1}}',
    b'{"step":{"step":1,"begin_s":0,"end_s":NaN}}',
    b'{"step":{"step":1,"begin_s":0,"end_s":1e999}}',
    b'{"step":{"step":1,"begin_s":0,"end_s":1,"ops":[["free"],[7],[0],[1],[0],[0],[null]]}}',
    b'{"step":{"step":1,"begin_s":0,"end_s":1,"ops":[["free"],[0],[0],[1],[0],[0],[]]}}',
    b'{"step":{"step":1,"begin_s":0,"end_s":1,"ops":[["free"],[0],[0],["x"],[0],[0],[null]]}}',
    b'{"step":{"step":1,"begin_s":0,"end_s":1,"memory":[[1,2]]}}',
    b'{"span":["data",1]}',
    b'{"span":[["data"],1,2]}',
    b'{"end":{"at_s":1}}',
    b'{"what":1}',
    b"[" * 100_000,
    b'{"step":' * 50_000,
    b'{"attempt":{"version":1,"rank":4,"world":2}}',
    b'{"span":["data",1,' + b"9" * 5000 + b"]}",
]


@pytest.mark.parametrize("line", HOSTILE, ids=range(len(HOSTILE)))
def test_a_line_that_is_no_record_is_counted_and_left_out(tmp_path: Path, line: bytes) -> None:
    write(tmp_path, STEP).end(2.0)
    path = record_path(tmp_path, 1)
    path.write_bytes(path.read_bytes() + line + b"\n")
    record = read_rank(path)
    assert record.damaged == bool(line)
    assert len(record.attempts[0].steps) == 1


@given(st.binary(max_size=60), st.integers(0, 3000))
def test_damage_raises_nothing_but_a_configuration_error(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    write(folder, STEP).end(2.0)
    path = record_path(folder, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + noise + whole[at + len(noise) :])
    with suppress(ConfigurationError):
        read_rank(path)


def test_what_is_no_run_is_refused_with_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no record: expected trace/rank-00000"):
        read_run(tmp_path)
    path = record_path(tmp_path, 0)
    path.parent.mkdir()
    path.write_text('{"attempt":{"version":2}}\n')
    with pytest.raises(ConfigurationError, match="written by a newer fullshard"):
        read_run(tmp_path)
    path.write_text("nothing\n")
    with pytest.raises(ConfigurationError, match="holds no record of a rank; 1 lines cannot"):
        read_run(tmp_path)
    path.unlink()
    write(tmp_path, STEP)
    record_path(tmp_path, 1).rename(path)
    with pytest.raises(ConfigurationError, match="is the record of rank 1"):
        read_run(tmp_path)


def test_ranks_whose_files_cannot_be_read_are_left_out_and_named(tmp_path: Path) -> None:
    write(tmp_path, STEP).end(2.0)
    record_path(tmp_path, 2).write_bytes(record_path(tmp_path, 1).read_bytes())
    record_path(tmp_path, 3).write_bytes(b"\0" * 100)
    record_path(tmp_path, 4).mkdir()
    assert list(read_run(tmp_path).ranks) == [1]
    told = [note for note in report_of(tmp_path).notes if note.startswith("left out: ")]
    for note, file, why in zip(
        told, (2, 3, 4), ("the record of rank 1", "1 lines cannot", "Is a directory"), strict=True
    ):
        assert f"rank-0000{file}.jsonl" in note
        assert why in note


def test_numbers_that_are_none_are_written_as_null(tmp_path: Path) -> None:
    write(tmp_path, replace(STEP, loss=float("nan"))).end(2.0)
    lines = record_path(tmp_path, 1).read_text().splitlines()
    assert all(json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert read_rank(record_path(tmp_path, 1)).attempts[0].steps[0].loss is None


def test_every_op_has_a_lane() -> None:
    names = [*(kind.value for kind in OpKind), "fetch", "forward"]
    lanes = {name: TimedOp(name, 0, 0.0, 0.0).lane for name in names}
    assert [op for op, lane in lanes.items() if lane == "communication"] == [
        "gather",
        "reduce",
        "all_reduce",
    ]
    assert lanes["fetch"] == "copy"
    assert lanes["forward"] == "compute"
