# SPDX-License-Identifier: Apache-2.0
"""Records in the format of Chrome's trace events, which Perfetto (ui.perfetto.dev) opens."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fullshard.core.text import whole_file
from fullshard.report.record import Attempt, RecordedStep, RunRecord, TimedOp

# Complete events ("X") of a track must lie within each other, so those that need not are apart.
_TRACKS = ("steps", "forward", "backward", "waits", "memory")
_MEMORY = ("parameters", "gradients", "optimizer", "gathered", "gradient_buffers", "activations")


def write_trace_events(run: RunRecord, path: str | Path) -> None:
    """Write a run as one JSON file of trace events, for ``ui.perfetto.dev``.

    A rank is a process, with tracks for its steps, its units' forward and backward, and what they
    waited for; a gather or reduce is an asynchronous event. Times are those of rank 0's clock,
    from the earliest attempt on. Raises `OSError` if ``path`` cannot be written.
    """
    origin = min(a.facts.started_at for record in run.ranks.values() for a in record.attempts)
    with whole_file(path) as staged, open(staged, "w", encoding="ascii") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        between = ""
        for event in _events(run, origin):
            file.write(between + json.dumps(event, separators=(",", ":")))
            between = ",\n"
        file.write("\n]}\n")


def _events(run: RunRecord, origin: float) -> Iterator[dict[str, Any]]:
    for rank, record in run.ranks.items():
        host = record.attempts[-1].facts.host
        yield _about("process_name", rank, 0, f"rank {rank} on {host}")
        for number, track in enumerate(_TRACKS):
            yield _about("thread_name", rank, number, track)
        for attempt in record.attempts:
            for event in _attempt_events(attempt):
                at_s = attempt.wall_s(event.pop("at_s")) - origin
                yield {**event, "ts": round(at_s * 1e6, 1), "pid": rank}


def _about(what: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": track, "args": {"name": name}}


def _attempt_events(attempt: Attempt) -> Iterator[dict[str, Any]]:
    for span in attempt.spans:
        yield _complete(span.what, "steps", span.begin_s, span.end_s, {})
    for number, step in enumerate(attempt.steps):
        args = {"loss": step.loss, "tokens": step.tokens, "seconds": dict(step.sums_s)}
        yield _complete(f"step {step.step}", "steps", step.begin_s, step.end_s, args)
        for span in step.spans:
            yield _complete(span.what, "steps", span.begin_s, span.end_s, {})
        for place, op in enumerate(step.ops or ()):
            yield from _op_events(attempt, op, f"{attempt.facts.rank}.{number}.{place}")
        yield from _memory_events(step)


def _op_events(attempt: Attempt, op: TimedOp, number: str) -> Iterator[dict[str, Any]]:
    units = attempt.facts.units
    name = f"{op.op} {units[op.unit].name}"
    args: dict[str, Any] = {"unit": units[op.unit].name, "bytes": op.bytes}
    if op.waiter is not None:
        args["waiter"] = units[op.waiter].name
    if op.lane == "compute":
        track = op.op if op.op in _TRACKS else "waits"
        yield _complete(name, track, op.begin_s, op.end_s, args)
        return
    alike = {"cat": op.lane, "name": name, "id": number, "tid": 0}
    yield {"ph": "b", "at_s": op.begin_s, **alike, "args": args}
    yield {"ph": "e", "at_s": op.end_s, **alike}


def _memory_events(step: RecordedStep) -> Iterator[dict[str, Any]]:
    for memory in step.memory:
        sizes = {owner: getattr(memory, f"{owner}_bytes") or 0 for owner in _MEMORY}
        yield {
            "ph": "C",
            "name": "memory",
            "tid": _TRACKS.index("memory"),
            "at_s": memory.at_s,
            "args": sizes,
        }


def _complete(
    name: str, track: str, begin_s: float, end_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    lasts = {"at_s": begin_s, "dur": round((end_s - begin_s) * 1e6, 1)}
    return {"ph": "X", "name": name, "tid": _TRACKS.index(track), **lasts, "args": args}
