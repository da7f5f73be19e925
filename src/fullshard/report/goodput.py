# SPDX-License-Identifier: Apache-2.0
"""The wall time of a run by cause, through kills and restarts: shares that add up to it."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fullshard.report.measure import EXPOSED, MeasuredRun
from fullshard.report.record import Attempt, RecordedStep, RunRecord
from fullshard.report.shares import Bid, deal, summed_shares

_CAUSES = {"fetch": "copies", "evict": "copies", "issue": "exposed communication"}
GOOD = ("forward", "backward", "optimizer", "step")  # the last where one call does all
"""The shares that bring a model forward; all others are badput, by cause."""


@dataclass(frozen=True)
class WallTime:
    """``seconds`` by cause, the mean over ranks; they add up to ``wall_s``.

    The causes are those of `GOOD` and start, data, compile, checkpoint, evaluation, "exposed
    communication", "stragglers", "host", copies, users' own words, "lost work" (steps that were
    done again after a restart) and "down" (from an attempt's last word to the next one).
    """

    wall_s: float
    seconds: Mapping[str, float]

    @property
    def good(self) -> list[tuple[str, float]]:
        """The seconds of those causes of `GOOD` that there are."""
        return [(cause, self.seconds[cause]) for cause in GOOD if self.seconds.get(cause)]

    @property
    def share(self) -> float:
        """The part of the wall time that was good."""
        return sum(seconds for _, seconds in self.good) / (self.wall_s or 1.0)

    @property
    def badput(self) -> list[tuple[str, float]]:
        """The causes of the rest, the largest first."""
        bad = [each for each in self.seconds.items() if each[0] not in GOOD and each[1] > 0]
        return sorted(bad, key=lambda each: -each[1])


def goodput(run: RunRecord, measured: MeasuredRun) -> WallTime:
    """Deal out the wall time of ``run``.

    A rank counts from the run's begin until its own end, or the run's if it was there until then.
    Of waits as much is for stragglers as in the steps that were ``measured`` op by op, and steps of
    which nothing but spans is known are dealt out as those are.
    """
    attempts = [each for record in run.ranks.values() for each in record.attempts]
    begin_s = min(each.wall_s(0.0) for each in attempts)
    end_s = max(each.wall_s(each.last_s) for each in attempts)
    newest_s = max(each.wall_s(0.0) for each in attempts)
    sums: defaultdict[str, float] = defaultdict(float)
    for record in run.ranks.values():
        last = record.attempts[-1]
        stays = last.wall_s(last.last_s) > newest_s
        until_s = end_s if stays else last.wall_s(last.last_s)
        for cause, seconds in _of_rank(record.attempts, attempts, (begin_s, until_s), measured):
            sums[cause] += seconds
    count = len(run.ranks)
    means = {cause: total / count for cause, total in sums.items()}
    return WallTime(sum(means.values()), means)


def _of_rank(
    mine: Sequence[Attempt],
    everyone: Sequence[Attempt],
    between: tuple[float, float],
    measured: MeasuredRun,
) -> Iterator[tuple[str, float]]:
    bids: list[Bid] = []
    steps: list[RecordedStep] = []
    for attempt in mine:
        begin_s, end_s = attempt.wall_s(0.0), attempt.wall_s(attempt.last_s)
        bids.append(Bid(begin_s, end_s, 0, ("other", None)))
        for what, begin_s, end_s in attempt.spans:
            bids.append(Bid(attempt.wall_s(begin_s), attempt.wall_s(end_s), 2, (what, None)))
        again = _resumed(attempt, everyone)
        for step in attempt.steps:
            lost = again is not None and step.step >= again
            share = ("lost work", None) if lost else ("step", len(steps))
            steps.append(step)
            begin_s, end_s = attempt.wall_s(step.begin_s), attempt.wall_s(step.end_s)
            bids.append(Bid(begin_s, end_s, 1, share))
    for part in deal(bids, *between):
        (what, number), seconds = part.share, part.end_s - part.begin_s
        if number is not None:
            yield from _of_step(steps[number], seconds, measured)
        elif what == "host":  # no attempt was there
            yield ("start" if part.begin_s < mine[0].wall_s(0.0) else "down"), seconds
        else:
            yield ("host" if what == "other" else what), seconds


def _of_step(
    step: RecordedStep, seconds: float, measured: MeasuredRun
) -> Iterator[tuple[str, float]]:
    """Deal out ``seconds`` of a step, which are all of it unless spans lie in between."""
    shares = {what: share_s for (what, _), share_s in summed_shares(step).items()}
    if "forward" not in shares and measured.by_op:
        rest_s = shares.pop("host")
        typical = {what: each for what, each in measured.mean_shares.items() if what not in shares}
        scale = rest_s / (sum(typical.values()) or 1.0)
        shares |= {what: each * scale for what, each in typical.items()}
    scale = seconds / (sum(shares.values()) or 1.0)
    for what, share_s in shares.items():
        if what in EXPOSED:
            yield "stragglers", share_s * scale * measured.late_share
            yield "exposed communication", share_s * scale * (1 - measured.late_share)
        else:
            yield _CAUSES.get(what, what), share_s * scale


def _resumed(attempt: Attempt, everyone: Sequence[Attempt]) -> int | None:
    """Return the first step that attempts begun after ``attempt`` do, on any rank."""
    over_s = attempt.wall_s(attempt.last_s)
    firsts = [each.steps[0].step for each in everyone if each.steps and each.wall_s(0.0) >= over_s]
    return min(firsts, default=None)
