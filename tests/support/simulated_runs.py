# SPDX-License-Identifier: Apache-2.0
"""Records of runs that nobody ran: core's schedule by a small clock, with a cause put in."""

import random
from dataclasses import dataclass, field, replace

from fullshard.core.forecast import step_events
from fullshard.core.schedule import UnitPolicy
from fullshard.core.strategy import Prefetch
from fullshard.report.files import RecordWriter
from fullshard.report.record import (
    Attempt,
    Facts,
    MemoryByOwner,
    RankRecord,
    RecordedStep,
    RecordedUnit,
    RunRecord,
    TimedOps,
    TimedSpan,
)
from fullshard.report.replay import Costs, RankWork, Setting, replay
from fullshard.report.shares import shares_of

MIB = 2**20


@dataclass
class Simulated:
    """A run of ``blocks`` equal units and a root; times in seconds."""

    world: int = 4
    blocks: int = 6
    steps: int = 8
    compute_s: float = 4e-3  # of a unit's forward; its backward takes twice as long
    link_s: float = 1e-3  # of a unit's gather or reduce
    unit_bytes: int = 8 * MIB
    root_bytes: int = MIB
    data_s: float = 1e-3
    host_s: float = 1e-3
    optimizer_s: float = 2e-3
    issue_s: float = 0.0
    checkpoint_s: float = 0.0
    checkpoint_every: int = 4
    spans: dict = field(default_factory=dict)  # of all ranks, by word, at the end of a step
    slow: dict = field(default_factory=dict)  # seconds by (rank, what, unit or None)
    slow_every: int = 1  # in each of so many steps, the last one of them
    memory: float = 0.5
    memory_of: dict = field(default_factory=dict)
    prefetch: Prefetch = field(default_factory=Prefetch)
    strategy: str = "FULL_SHARD"
    jitter: float = 0.02
    detailed_every: int = 1
    seed: int = 0
    started_at: float = 1000.0
    first_step: int = 0

    def attempts(self):
        rng, count = random.Random(self.seed), self.blocks + 1
        names = ["(root)", *(f"blocks.{number}" for number in range(self.blocks))]
        sizes = [self.root_bytes, *[self.unit_bytes] * self.blocks]
        units = tuple(
            RecordedUnit(name, size // 4, size, size // self.world, size)
            for name, size in zip(names, sizes, strict=True)
        )
        kept = self.strategy == "SHARD_GRAD_OP"
        setting = Setting(
            {
                number: UnitPolicy(reshard_after_forward=number > 0 and not kept, full_bytes=size)
                for number, size in enumerate(sizes)
            },
            self.prefetch,
        )
        events = step_events([None, *[0] * self.blocks], [True] * count)
        link = [self.link_s * size / self.unit_bytes for size in sizes]
        now = [0.1] * self.world
        steps = [[] for _ in now]
        spans = [[TimedSpan("start", 0.0, 0.1)] for _ in now]
        for number in range(self.first_step, self.first_step + self.steps):
            begins = list(now)
            at, inner = list(now), [[] for _ in now]
            slow = {} if (number + 1) % self.slow_every else self.slow

            def spend(rank, what, seconds, at=at, inner=inner, slow=slow):
                more = slow.get((rank, what, None), 0.0) + seconds * rng.gauss(1, self.jitter)
                begin, at[rank] = at[rank], at[rank] + max(0.0, more)
                if what != "host" and more > 0:
                    inner[rank].append(TimedSpan(what, begin, at[rank]))

            work = []
            for rank in range(self.world):
                spend(rank, "data", self.data_s)
                spend(rank, "host", self.host_s)
                work.append(self._work(rng, rank, sizes, slow))
            offsets = [each - min(at) for each in at]
            ops, base = replay(events, setting, Costs(work, link, link), offsets), min(at)
            for rank, of_rank in enumerate(ops):
                timed = [
                    op._replace(
                        begin_s=base + op.begin_s, end_s=base + op.end_s, bytes=sizes[op.unit]
                    )
                    for op in of_rank
                ]
                steps[rank].append((number, timed, max(op.end_s for op in timed)))
            for rank in range(self.world):
                at[rank] = steps[rank][-1][2]
                for what, seconds in {"optimizer": self.optimizer_s, **self.spans}.items():
                    spend(rank, what, seconds)
                steps[rank][-1] = self._step(
                    steps[rank][-1], begins[rank], at[rank], inner[rank], rank, sizes
                )
                now[rank] = at[rank]
                if self.checkpoint_s and (number + 1) % self.checkpoint_every == 0:
                    span = TimedSpan("checkpoint", now[rank], now[rank] + self.checkpoint_s)
                    spans[rank].append(span)
                    now[rank] = span.end_s
        settings = {
            "strategy": self.strategy,
            "shards": self.world,
            "prefetch_forward": self.prefetch.forward,
            "prefetch_backward": self.prefetch.backward,
            "reduces_in_flight": self.prefetch.reduces_in_flight,
        }
        for rank in range(self.world):
            facts = Facts(rank, self.world, "host", self.started_at, units=units, settings=settings)
            yield Attempt(facts, tuple(steps[rank]), tuple(spans[rank]), now[rank], "finished")

    def _work(self, rng, rank, sizes, slow):
        def seconds(what, unit, plain):
            more = slow.get((rank, what, unit), 0.0)
            more += slow.get((rank, what, None), 0.0) / len(sizes)
            return max(0.0, more + plain * rng.gauss(1, self.jitter))

        plain = [self.compute_s / 4, *[self.compute_s] * self.blocks]
        return RankWork(
            [seconds("forward", unit, each) for unit, each in enumerate(plain)],
            [seconds("backward", unit, 2 * each) for unit, each in enumerate(plain)],
            self.issue_s,
        )

    def _step(self, done, begin_s, end_s, spans, rank, sizes):
        number, ops, _ = done
        whole = RecordedStep(number, begin_s, end_s, spans=tuple(spans), ops=TimedOps.of(ops))
        sums: dict[str, float] = {}
        for (what, _), seconds in shares_of(whole).items():
            sums[what] = sums.get(what, 0.0) + seconds
        issue_s = self.issue_s * sum(op.op in ("gather", "reduce") for op in ops)
        sums |= {"issue": issue_s, "backward": max(0.0, sums.get("backward", 0.0) - issue_s)}
        sums.pop("host", None)
        rest, limit = sum(sizes) // self.world, 2**34
        peak = int(limit * self.memory_of.get(rank, self.memory))
        memory = [
            MemoryByOwner(at, rest, rest, 2 * rest, full, 0, rest * 4 + full + MIB, peak, limit)
            for at, full in ((begin_s, 0), ((begin_s + end_s) / 2, sizes[-1]), (end_s, 0))
        ]
        detailed = number % self.detailed_every == 0
        return RecordedStep(
            number,
            begin_s,
            end_s,
            1024,
            4.0 / (1 + number),
            sums,
            tuple(spans),
            tuple(memory),
            TimedOps.of(ops) if detailed else None,
        )

    def run(self):
        return RunRecord({n: RankRecord(n, (each,)) for n, each in enumerate(self.attempts())})


def write(run, folder):
    """Write a run in the files that its ranks would write; return the folder's name."""
    for attempt in (attempt for record in run.ranks.values() for attempt in record.attempts):
        writer = RecordWriter(folder, attempt.facts)
        for step in attempt.steps:
            writer.step(step)
        for span in attempt.spans:
            writer.span(span)
        if attempt.ended_s is not None:
            writer.end(attempt.ended_s)
    return str(folder)


def restarted(first, second, gap_s):
    """Return the record of a run that was killed and went on after ``gap_s``."""
    ranks = {}
    before = list(first.attempts())
    over = max(each.wall_s(each.last_s) for each in before)
    after = replace(second, started_at=over + gap_s)
    for rank, (one, other) in enumerate(zip(before, after.attempts(), strict=True)):
        ranks[rank] = RankRecord(rank, (replace(one, ended_s=None, ending=""), other), 1)
    return RunRecord(ranks)
