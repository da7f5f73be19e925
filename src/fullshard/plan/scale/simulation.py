# SPDX-License-Identifier: Apache-2.0
"""A run of many steps, event by event: steps, saves, slow hosts, failures, restarts."""

import heapq
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from fullshard.core.errors import ConfigurationError
from fullshard.plan.scale.faults import Faults

__all__ = ["Goodput", "Work", "simulate"]

_STEPS_AT_ONCE = 64  # whose jitter is drawn together


@dataclass(frozen=True)
class Work:
    """What is run: a step of ``step_s`` on every host, of which the slowest is waited for.

    Each host takes longer by an exponential time with the mean ``jitter_s``; so each doubling of
    the hosts adds ``jitter_s`` x ln 2 to a step. ``state_bytes`` is what one device saves.
    """

    step_s: float
    devices: int
    hosts: int
    state_bytes: float
    jitter_s: float = 0.0

    def __post_init__(self) -> None:
        if self.step_s <= 0 or self.devices < 1 or self.hosts < 1 or self.jitter_s < 0:
            raise ConfigurationError(
                "a run needs a step above 0 s, at least one device and host, and no negative "
                f"jitter, got {self}"
            )


@dataclass(frozen=True)
class Goodput:
    """Where the time of a run went, as shares of it; ``goodput`` is what was kept of the work.

    ``steps`` were kept, at the pace of ``Work.step_s`` with nobody to wait for. The shares of
    ``lost`` (work after the last save), ``down`` (noticing, restarting, loading), ``saving``,
    ``jitter`` and ``slow`` (waiting for slow hosts) make up the rest. ``failures`` is how many
    there were.
    """

    goodput: float
    steps: int
    failures: int
    shares: Mapping[str, float]
    interval_s: float


class _Run:
    """A run at some moment."""

    def __init__(self, work: Work, faults: Faults, interval_s: float, end: float, seed: int):
        self.work, self.faults, self.interval_s, self.end = work, faults, interval_s, end
        self.random = random.Random(seed)
        self.now = 0.0
        self.spent = dict.fromkeys(("lost", "down", "saving", "jitter", "slow"), 0.0)
        self.steps = self.failures = 0
        self.unsaved = 0
        self.unsaved_extra = {"jitter": 0.0, "slow": 0.0}
        self.save_s = faults.save_s(work.state_bytes)
        self.pending: tuple[float, int] | None = None  # a save that is under way, what it saves
        self.last_save = 0.0
        self.failure_at = self._next(faults.mtbf_s(work.devices))
        self.slow_until: list[float] = []
        rate = faults.slow_rate * work.hosts / faults.slow_s
        self.slow_gap_s = 1 / rate if rate else math.inf
        self.slow_at = self._next(self.slow_gap_s)
        self.jitters: list[float] = []

    def _next(self, mean_s: float) -> float:
        return math.inf if math.isinf(mean_s) else self.now + self.random.expovariate(1 / mean_s)

    def jitter(self) -> float:
        """How much the slowest of all hosts adds to a step: the largest of so many draws."""
        if not self.work.jitter_s:
            return 0.0
        if not self.jitters:
            for _ in range(_STEPS_AT_ONCE):
                most = self.random.random() ** (1 / self.work.hosts)
                self.jitters.append(-self.work.jitter_s * math.log1p(-min(most, 1 - 1e-16)))
        return self.jitters.pop()

    def glide(self) -> None:
        """Run many steps at once while nothing else can happen."""
        if self.slow_until or self.pending is not None:
            return
        save_at = self.last_save + self.interval_s
        ahead = min(self.end, self.failure_at, self.slow_at, save_at) - self.now
        # However many are drawn, hardly one takes 40 times as long as hosts take on average.
        longest = self.work.step_s + self.work.jitter_s * (40 + math.log(self.work.hosts))
        steps = int(ahead / longest)
        if steps < 1:
            return
        jitter = sum(self.jitter() for _ in range(steps)) if self.work.jitter_s else 0.0
        self.now += steps * self.work.step_s + jitter
        self.unsaved += steps
        self.unsaved_extra["jitter"] += jitter

    def step(self) -> None:
        """Run one step, or fail in it."""
        while self.slow_until and self.slow_until[0] <= self.now:
            heapq.heappop(self.slow_until)
        while self.slow_at <= self.now:
            length = self.random.expovariate(1 / self.faults.slow_s)
            heapq.heappush(self.slow_until, self.slow_at + length)
            self.slow_at += self.random.expovariate(1 / self.slow_gap_s)
        jitter = self.jitter()
        slow = self.work.step_s * (self.faults.slow_factor - 1) if self.slow_until else 0.0
        end = self.now + self.work.step_s + jitter + slow
        if end > self.failure_at:
            self.spent["lost"] += self.failure_at - self.now
            self.fail()
            return
        self.now = end
        self.unsaved += 1
        self.unsaved_extra["jitter"] += jitter
        self.unsaved_extra["slow"] += slow
        self.save_if_due()

    def save_if_due(self) -> None:
        """Finish a save that is written by now; begin one when it is time."""
        if self.pending is not None and self.now >= self.pending[0]:
            self._keep(self.pending[1])
            self.pending = None
        if self.pending is None and self.now - self.last_save >= self.interval_s:
            blocked = self.save_s * self.faults.blocking_share
            if self.now + blocked > self.failure_at:
                self.spent["lost"] += self.failure_at - self.now
                self.fail()
                return
            self.now += blocked
            self.spent["saving"] += blocked
            self.last_save = self.now
            self.pending = self.now + self.save_s - blocked, self.unsaved

    def _keep(self, steps: int) -> None:
        share = steps / self.unsaved if self.unsaved else 0.0
        for name, extra in self.unsaved_extra.items():
            self.spent[name] += extra * share
            self.unsaved_extra[name] = extra * (1 - share)
        self.steps += steps
        self.unsaved -= steps

    def fail(self) -> None:
        """Lose what is not saved, notice it, begin again and load; that may fail, too."""
        if self.pending is not None and self.failure_at >= self.pending[0]:
            self._keep(self.pending[1])
        self.spent["lost"] += self.unsaved * self.work.step_s + sum(self.unsaved_extra.values())
        self.unsaved, self.pending = 0, None
        self.unsaved_extra = dict.fromkeys(self.unsaved_extra, 0.0)
        self.failures += 1
        self.now = self.failure_at
        down = self.faults.detect_s + self.faults.restart_s + self.save_s
        mtbf = self.faults.mtbf_s(self.work.devices)
        while (again := self.random.expovariate(1 / mtbf)) < down:
            self.failures += 1
            self.spent["down"] += again
            self.now += again
        self.spent["down"] += down
        self.now += down
        self.last_save = self.now
        self.failure_at = self._next(mtbf)


def simulate(
    work: Work,
    faults: Faults | None = None,
    *,
    hours: float = 24.0 * 30,
    interval_s: float | None = None,
    seed: int = 0,
) -> Goodput:
    """Simulate a run of ``hours``, saved every ``interval_s`` seconds (None: the best by rule).

    Equal seeds give equal runs. Raises `ConfigurationError` for times that are not above 0.
    """
    faults = faults or Faults()
    if interval_s is None:
        interval_s = faults.best_interval_s(work.devices, work.state_bytes)
    if hours <= 0 or interval_s <= 0:
        raise ConfigurationError(
            f"hours and the seconds between saves must be above 0, got {hours} and {interval_s}"
        )
    run = _Run(work, faults, interval_s, hours * 3600.0, seed)
    while run.now < run.end:
        run.glide()
        if run.now < run.end:
            run.step()
    run._keep(run.unsaved)  # the last save is made when the run ends
    shares = {name: spent / run.now for name, spent in run.spent.items()}
    kept = run.steps * work.step_s / run.now
    return Goodput(kept, run.steps, run.failures, shares, interval_s)
