# SPDX-License-Identifier: Apache-2.0
"""Records as Chrome's trace events: every name and time of the record, and nothing that breaks."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.core.errors import ConfigurationError
from fullshard.report import (
    Attempt,
    Facts,
    MemoryByOwner,
    RankRecord,
    RecordedStep,
    RecordedUnit,
    RecordWriter,
    RunRecord,
    TimedOp,
    TimedOps,
    TimedSpan,
    write_trace_events,
)
from fullshard.report.command import main


def a_run(*names):
    units = tuple(RecordedUnit(name, 1, 4, 4, 4) for name in names)
    ops = TimedOps.of(
        [
            op
            for number in range(len(names))
            for op in (
                TimedOp("gather", number, 1.0, 1.5, 4, 4),
                TimedOp("await_gather", number, 1.25, 1.5, 4, 4, 0),
                TimedOp("forward", number, 1.5, 2.0),
            )
        ]
    )
    memory = MemoryByOwner(1.75, 4, 4, 8, 4, 0, 100)
    step = RecordedStep(0, 1.0, 3.0, 8, 0.5, {"data": 0.1}, (TimedSpan("data", 1, 1.1),), (memory,))
    attempts = [
        Attempt(
            Facts(rank, 2, "<host>", 100.0 + rank, float(rank), units=units),
            (step, RecordedStep(1, 3.0, 4.0, ops=ops)),
            (TimedSpan("start", 0.0, 1.0),),
        )
        for rank in range(2)
    ]
    return RunRecord({rank: RankRecord(rank, (each,)) for rank, each in enumerate(attempts)})


def events_of(run, path):
    write_trace_events(run, path)
    return json.loads(path.read_text(), parse_constant=pytest.fail)["traceEvents"]


@given(names=st.lists(st.text(max_size=12), min_size=1, max_size=4, unique=True))
def test_names_survive_whatever_is_in_them(tmp_path_factory, names):
    odd = [*names, '</script><b>"x"\\', "", "\u2028 \ud800"]
    events = events_of(a_run(*odd), tmp_path_factory.mktemp("run") / "events.json")
    told = {event["args"]["unit"] for event in events if "unit" in event.get("args", {})}
    assert told == set(odd)


def test_all_of_a_record_is_there_on_one_clock(tmp_path):
    events = events_of(a_run("(root)", "layers.0"), tmp_path / "events.json")
    for rank in range(2):
        mine = [event for event in events if event["pid"] == rank]
        kinds = Counter(event["ph"] for event in mine)
        # 5 tracks and a process; 3 spans, 2 steps, 2 waits and 2 forwards, less one span.
        assert kinds == {"M": 6, "X": 8, "b": 2, "e": 2, "C": 1}
        gathers = [event for event in mine if event["ph"] in "be"]
        assert len({event["id"] for event in gathers}) == 2
        assert [event["ts"] for event in gathers] == [1e6, 1.5e6] * 2  # clocks were 1 s apart
        (waits,) = {event["tid"] for event in mine if event["name"].startswith("await")}
        (track,) = (e for e in mine if e["ph"] == "M" and e["args"]["name"] == "waits")
        assert waits == track["tid"]
        (memory,) = (event for event in mine if event["ph"] == "C")
        assert sum(memory["args"].values()) == 100


def test_the_command_writes_them(tmp_path, capsys):
    write = RecordWriter(tmp_path, Facts(0, 1, "host", 1.0))
    write.step(RecordedStep(0, 0.0, 1.0, 8, 0.5))
    write.end(1.0)
    events = tmp_path / "events.json"
    assert main([str(tmp_path), "--events", str(events)]) == 0
    assert "step 0" in {event["name"] for event in json.loads(events.read_text())["traceEvents"]}
    with pytest.raises(ConfigurationError, match="is a folder"):
        main([str(tmp_path), "--events", str(tmp_path)])
