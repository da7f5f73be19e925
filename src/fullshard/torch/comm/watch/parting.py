# SPDX-License-Identifier: Apache-2.0
"""Ranks that part: one calls what the others do not. All learn it at once, not at a time limit.

Every rank keeps the last calls of each process group, with their numbers. One that stands in a call
compares them with a few others': where two ranks gave one number to different calls, or wait for
each other in two groups, no patience helps. It then says so to all, and wakes those that wait in
Gloo.
"""

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fullshard.torch.comm.sibling_groups import backend_of

PARTED = "the ranks have parted: "
_KEPT = 64  # calls: more than are ever under way, and enough to see what came next before

_WAY_OUT = (
    "All ranks must run the same units in the same order: let a rank that has nothing for a unit "
    "run it on any input, and add 0 times its result to the loss"
)

_Calls = Sequence[Sequence[Any]]  # (number, what), the newest last
Waiting = Sequence[Any]
"""What a rank waits for, since when by its clock (s), and the name of the process group."""


class CallLog:
    """The newest calls of this rank in one process group. One thread writes, another may read."""

    def __init__(self) -> None:
        self.count: int = 0
        self.newest: deque[tuple[int, str]] = deque(maxlen=_KEPT)

    def note(self, what: str) -> None:
        """Note that ``what`` is called now."""
        self.count += 1
        self.newest.append((self.count, what))


def parting(rank: int, calls: _Calls, peer: int, its_calls: _Calls) -> str | None:
    """Return where ``rank`` and ``peer`` called different things, and who left out what, or None.

    A rank that is only late has called the first of the same.
    """
    mine, its = ({number: str(what) for number, what in each} for each in (calls, its_calls))
    for number in sorted(mine.keys() & its.keys()):
        if mine[number] != its[number]:
            break
    else:
        return None
    usual = _usual_after([what for at, what in calls if at < number])
    left_out = {peer: mine[number], rank: its[number]}
    culprits = [who for who, what in left_out.items() if what == usual] or [peer, rank]
    guess = ", or ".join(f"rank {who} has left out {left_out[who]}" for who in culprits)
    return (
        f"{PARTED}as call {number} of their group rank {rank} calls {mine[number]}, and rank "
        f"{peer} {its[number]}; {guess}. {_WAY_OUT}"
    )


def deadlock(
    rank: int,
    waits: Waiting | None,
    calls: Mapping[str, _Calls],
    peer: int,
    its_wait: Waiting | None,
    its_calls: Mapping[str, _Calls],
) -> str | None:
    """Return in what ``rank`` and ``peer`` wait for each other, each in another group; or None.

    ``calls`` are by group. A wait ends when both have called the same, and neither calls anything
    while it waits.
    """
    if waits is None or its_wait is None:
        return None
    (mine, _, group), (its, _, its_group) = waits, its_wait
    both = calls.keys() & its_calls.keys()
    if group not in both or its_group not in both:
        return None
    ahead = _number_of(mine, calls[group]) > _newest(its_calls[group])
    if not ahead or _number_of(its, its_calls[its_group]) <= _newest(calls[its_group]):
        return None
    return (
        f"{PARTED}rank {rank} waits in {mine}, which rank {peer} has not called, and rank {peer} "
        f"in {its}, which rank {rank} has not. Often one of them has left out a backward, or a "
        f"forward. {_WAY_OUT}"
    )


def _number_of(what: str, calls: _Calls) -> int:
    return max((number for number, each in calls if each == what), default=0)


def _newest(calls: _Calls) -> int:
    return calls[-1][0] if calls else 0


def _usual_after(before: Sequence[str]) -> str | None:
    """Return what has followed on calls like the last ones ``before``: on the longest such row."""
    best, usual = 0, None
    for end in range(1, len(before)):
        alike = 0
        while alike < end and before[end - 1 - alike] == before[-1 - alike]:
            alike += 1
        if alike >= max(best, 1):
            best, usual = alike, before[end]
    return usual


def wake(group: dist.ProcessGroup, rank: int, members: Sequence[int]) -> None:
    """Let whoever waits in ``group`` fail now, here and on the other ranks, if Gloo carries it.

    A receive that is given up closes all connections of its group; there is no other way to end a
    wait of Gloo from outside.
    """
    if backend_of(group, "cpu") == dist.Backend.GLOO:
        source = next(place for place, member in enumerate(members) if member != rank)
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1, device="cpu")], source, 0).wait(timedelta(milliseconds=1))
