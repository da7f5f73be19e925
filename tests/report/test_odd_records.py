# SPDX-License-Identifier: Apache-2.0
"""Records that are right in form and odd in content are reported on, or refused; nothing fails."""

import io
import json
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fullshard.core.errors import ConfigurationError
from fullshard.report.command import print_report
from fullshard.report.page import write_page
from fullshard.report.record import (
    Attempt,
    Facts,
    MemoryByOwner,
    RankRecord,
    RecordedStep,
    RecordedUnit,
    RunRecord,
    TimedOp,
    TimedOps,
    TimedSpan,
)
from fullshard.report.summary import judge

TIMES = st.sampled_from([0.0, 0.0, 1e-9, 0.5, 1.0, 1.5, 2.0, 1e6])
SIZES = st.sampled_from([0, 1, 2**20, 2**61])
WORDS = st.sampled_from(
    ["data", "checkpoint", "copy", "host", "step", "down", "<b>", "[red]", "forward", "", "x" * 999]
)
OPS = st.sampled_from(
    [
        *("gather", "await_gather", "reduce", "all_reduce", "await_reduce", "fetch", "free"),
        *("forward", "backward", "odd"),
    ]
)
UNITS = 2


def ordered(one, other):
    return sorted((one, other))


SPANS = st.builds(lambda what, a, b: TimedSpan(what, *ordered(a, b)), WORDS, TIMES, TIMES)
ONE_OP = st.builds(
    lambda op, unit, a, b, size, waiter: TimedOp(op, unit, *ordered(a, b), size, size, waiter),
    OPS,
    st.integers(0, UNITS - 1),
    TIMES,
    TIMES,
    SIZES,
    st.none() | st.integers(0, UNITS - 1),
)
MEMORY = st.builds(MemoryByOwner, TIMES, *[SIZES] * 5, *[st.none() | SIZES] * 3)
STEPS = st.builds(
    lambda number, a, b, tokens, loss, sums, spans, memory, ops: RecordedStep(
        number, *ordered(a, b), tokens, loss, sums, spans, memory, ops and TimedOps.of(ops)
    ),
    st.integers(0, 5),
    TIMES,
    TIMES,
    st.none() | st.integers(0, 9),
    st.none() | st.floats(-1e9, 1e9),
    st.dictionaries(WORDS | OPS | st.just("issue"), TIMES, max_size=4),
    st.lists(SPANS, max_size=2),
    st.lists(MEMORY, max_size=2),
    st.none() | st.lists(ONE_OP, min_size=1, max_size=8),
)


@st.composite
def records(draw):
    world = draw(st.integers(1, 3))
    ranks = {}
    for rank in draw(st.lists(st.integers(0, world - 1), min_size=1, max_size=3, unique=True)):
        attempts = []
        for started in sorted(draw(st.lists(TIMES, min_size=1, max_size=2))):
            units = tuple(
                RecordedUnit(draw(WORDS), *(draw(SIZES) for _ in range(4))) for _ in range(UNITS)
            )
            settings = {"shards": draw(st.sampled_from([None, 0, 1, 2, "x", True]))}
            forecast = {"step_s": draw(st.sampled_from([0.0, 1.0])), "peak_bytes": 0.0}
            offset = draw(st.sampled_from([0.0, -5.0]))
            facts = Facts(
                *(rank, world, "h", started, offset, "torch", "cpu", units, settings, forecast)
            )
            steps = tuple(draw(st.lists(STEPS, max_size=4)))
            spans = tuple(draw(st.lists(SPANS, max_size=2)))
            attempts.append(Attempt(facts, steps, spans, draw(st.none() | TIMES)))
        ranks[rank] = RankRecord(rank, tuple(attempts))
    return RunRecord(ranks)


@settings(deadline=None, max_examples=60)
@given(records())
def test_odd_records_are_reported_on_or_refused(tmp_path_factory, run):
    try:
        report = judge(run)
    except ConfigurationError:
        return
    console = Console(file=io.StringIO(), width=80)
    print_report(report, console, report)
    json.dumps(report.as_json(report), allow_nan=False)
    with mock.patch("fullshard.report.page.get_plotlyjs", return_value=""):  # 5 MB
        write_page(report, tmp_path_factory.getbasetemp() / "odd.html", report)
