# SPDX-License-Identifier: Apache-2.0
"""The table of what the other ranks are doing, and advice on a failure that is derived from it."""

import time
from collections.abc import Sequence
from typing import Any

_LEFT = "has left the process group"
_NOTHING_AWAITED = "waits for nothing"
STORE_ENDED = "the process that keeps the store has ended"


def way_out(table: str) -> str:
    """Return one more line for an error that shows the ``table`` of a watchdog, or nothing.

    A rank whose loop has ended before the others' has left, or goes on with something else.
    """
    if not any(sign in table for sign in (_LEFT, _NOTHING_AWAITED, STORE_ENDED)):
        return ""
    return (
        "\nIf ranks have unequal numbers of batches, let their loops end together: "
        "for batch in fullshard.torch.stop_together(batches), or with pad_to_longest(batches)"
    )


def lines_of(records: dict[int, dict[str, Any] | None], silent_s: float) -> list[str]:
    """Write one line for each rank, or for several in the same place, by their records."""
    now = time.time()
    alike: dict[str, tuple[list[int], list[float]]] = {}
    for rank, record in records.items():
        text, since = _state(record, now, silent_s)
        ranks, ages = alike.setdefault(text, ([], []))
        ranks.append(rank)
        ages.append(now - since)
    lines = []
    for text, (ranks, ages) in alike.items():
        least, most = f"{max(0.0, min(ages)):.1f}", f"{max(0.0, *ages, 0.0):.1f}"
        age = f"{most} s" if least == most else f"{least} to {most} s"
        names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_ranges(ranks)}"
        lines.append(f"{names}: {text.format(age=age)}")
    return lines


def _state(record: dict[str, Any] | None, now: float, silent_s: float) -> tuple[str, float]:
    """Describe a rank's activity, with ``{age}`` for its duration, and when it began."""
    if record is None:
        return "no sign of life at all", now
    safe = {
        name: (event[0].replace("{", "{{").replace("}", "}}"), event[1])
        for name, event in record.items()
        if isinstance(event, list)
    }
    if "failed" in safe:
        return f"failed in {safe['failed'][0]} {{age}} ago", safe["failed"][1]
    if record["left"]:
        return _LEFT, record["at"]
    if now - record["at"] > silent_s:
        doing = safe.get("waiting") or safe.get("issued")
        last = f", last seen in {doing[0]}" if doing else ""
        return f"no sign of life for {{age}}{last}", record["at"]
    if "calling" in safe:
        what, begin = safe["calling"]
        return f"waiting for {{age}} until all ranks call {what}", begin
    if "waiting" in safe:
        return f"in {safe['waiting'][0]} for {{age}}", safe["waiting"][1]
    issued, finished = safe.get("issued"), safe.get("finished")
    if finished is not None and issued is not None:
        last = f"last finished: {finished[0]} {{age}} ago, last issued: {issued[0]}"
        return f"{_NOTHING_AWAITED}, {last}", finished[1]
    if issued is not None:
        return f"{_NOTHING_AWAITED}, last issued: {issued[0]} {{age}} ago", issued[1]
    return "has done nothing yet", now


def _ranges(ranks: Sequence[int]) -> str:
    """0-3, 7"""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
