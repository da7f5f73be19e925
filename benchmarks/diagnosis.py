# SPDX-License-Identifier: Apache-2.0
"""How often does a report name what is the matter with a run?

    python benchmarks/diagnosis.py [--seed 1] [--faulty 40] [--healthy 20] [--cases FILE.json]
                                   [--only CAUSE] [--out FILE.json]
    python benchmarks/diagnosis.py --advice 10 [--seed 1] [--out FILE.json]

Runs train by the real engine, recorded as any run is, with ranks as threads of this machine: blocks
that sleep as long as they would compute, a link between ranks that lets bytes through at a rate,
one collective after the other. Each run has one cause put in, or none, by parameters drawn from the
seed. A faulty run counts as found if the verdict names cause, rank and unit; a healthy one if its
verdict is that. Memory near its limit is put in by a limit that is low, not by filling the machine.

With ``--advice`` runs on slow links and without prefetch follow the advice that they get. Said are
the exposed share beside that of (step - step without a link), and the gain beside that foretold.

``--cases`` takes further runs: a list of objects with the fields of `Case`. Ends with status 1
where fewer than 95% of the faulty, or not all of the healthy, are named.
"""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from report import write_report
from rich.console import Console
from rich.table import Table
from torch import nn

from fullshard.host_memory import resident_bytes
from fullshard.report import recording
from fullshard.report.findings import CAUSES
from fullshard.report.measure import EXPOSED, Wanted
from fullshard.report.summary import report_of
from fullshard.testing import LocalWorld
from fullshard.torch import fully_shard, set_prefetch

LIMIT = "fullshard.torch.inspection.run_record._limit_bytes"
HEALTHY = "healthy"


@dataclass
class Case:
    """A run; seconds are those of one step, of one block where ``compute_s`` is meant.

    ``cause`` is put in with ``cost_s``, on ``rank`` and in ``block`` (None: all of them).
    ``gather_s`` is what the link needs for one block. ``wrap`` is "blocks" or "root".
    """

    cause: str = HEALTHY
    ranks: int = 2
    blocks: int = 5
    width: int = 64
    compute_s: float = 8e-3
    gather_s: float = 1e-3
    latency_s: float = 0.0
    data_s: float = 1e-3
    save_s: float = 4e-3
    jitter: float = 0.03
    steps: int = 10
    rank: int | None = None
    block: int | None = None
    cost_s: float = 0.0
    prefetch: bool = True
    ahead: int = 1
    keep: bool = False  # full parameters from forward to backward
    wrap: str = "blocks"
    seed: int = 0

    @property
    def expected(self):
        """Cause, rank and unit that the verdict has to name."""
        unit = None if self.block is None else f"blocks.{self.block}"
        return self.cause, self.rank, "(root)" if self.wrap == "root" else unit


def draw_case(cause, number, seed):
    """Draw the parameters of a run; of causes that have several forms, one in turn."""
    draw = random.Random(f"{seed} {cause} {number}")
    case = Case(
        cause,
        draw.choice([2, 3, 4]),
        draw.randint(4, 7),
        compute_s=draw.uniform(6e-3, 1e-2),
        jitter=draw.uniform(0.01, 0.06),
        data_s=draw.uniform(0, 2e-3),
        save_s=draw.uniform(0, 8e-3),
        seed=draw.randrange(2**30),
    )
    case.gather_s = case.compute_s * draw.uniform(0.05, 0.3)
    step_s = 3 * case.blocks * case.compute_s
    form = number % 2
    one, block = draw.randrange(case.ranks), draw.randrange(case.blocks)
    case.cost_s = step_s * draw.uniform(0.15, 0.5)
    if cause == "slow link":
        case.gather_s = case.compute_s * draw.uniform(2.5, 5)
    elif cause in ("slow rank in forward", "slow rank in backward", "slow rank"):
        case.rank, case.block = one, None if form or cause == "slow rank" else block
    elif cause == "slow data":
        case.rank, case.cost_s = None if form else one, case.cost_s * (1.5 if form else 1)
    elif cause == "host-bound":
        case.rank, case.cost_s = None if form else one, case.cost_s * (2.5 if form else 1)
    elif cause == "needless copies":
        case.rank = None if form else one
    elif cause == "bad prefetch":
        case.prefetch, case.gather_s = False, case.compute_s * draw.uniform(0.5, 0.9)
    elif cause == "bad wrapping" and form:
        case.wrap, case.gather_s = "root", case.compute_s * draw.uniform(0.7, 1.2)
    elif cause == "bad wrapping":
        case.blocks, case.width, case.compute_s = draw.randint(56, 80), 8, 4e-4
        case.latency_s = draw.uniform(4e-4, 8e-4)
    elif cause == "checkpoint stall":
        case.cost_s = step_s * draw.uniform(0.2, 0.6)
    elif cause == "memory near its limit":
        case.cost_s = 0.0
    return case


# ---- the machine --------------------------------------------------------------------------------


class Link:
    """A link that carries one collective after the other; times are of `time.perf_counter`."""

    def __init__(self, ranks, rate, latency_s):
        self._ranks, self._rate, self._latency_s = ranks, rate, latency_s
        self._lock, self._free_s = threading.Lock(), 0.0
        self._issued, self.done_s = {}, {}

    def issue(self, key, size):
        with self._lock:
            self._issued[key] = self._issued.get(key, 0) + 1
            if self._issued[key] == self._ranks:  # the last one
                begin = max(time.perf_counter(), self._free_s)
                self.done_s[key] = self._free_s = begin + self._latency_s + size / self._rate


class OverLink:
    """A rank's communicator over a `Link`."""

    def __init__(self, comm, link, name="0"):
        self._comm, self._link, self._name = comm, link, name
        self.rank, self.size = comm.rank, comm.size
        self._calls = self._made = 0

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def duplicate(self):
        self._made += 1
        return OverLink(self._comm.duplicate(), self._link, f"{self._name}.{self._made}")

    def all_gather(self, pairs, label=""):
        size = sum(shard.nbytes for _, shard in pairs) * self.size
        return self._over(size, self._comm.all_gather, pairs, label)

    def reduce_scatter(self, pairs, label=""):
        size = sum(shard.nbytes for shard, _ in pairs) * self.size
        return self._over(size, self._comm.reduce_scatter, pairs, label)

    def _over(self, size, issue, pairs, label):
        self._calls += 1
        key = self._name, self._calls
        self._link.issue(key, size)  # first: who has waited for all ranks asks when it is done
        return Carried(issue(pairs, label), self._link, key)


class Carried:
    """A collective that is there when the link has carried it."""

    def __init__(self, work, link, key):
        self._work, self._link, self._key = work, link, key

    def wait(self):
        self._work.wait()
        time.sleep(max(0.0, self._link.done_s[self._key] - time.perf_counter()))

    def is_completed(self):
        done_s = self._link.done_s.get(self._key)
        return done_s is not None and time.perf_counter() >= done_s and self._work.is_completed()


class Sleep(torch.autograd.Function):
    """Passes on what comes, after a while, in both directions."""

    @staticmethod
    def forward(context, x, forward_s, backward_s):
        context.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(context, grad):
        time.sleep(context.backward_s)
        return grad.clone(), None, None


class Block(nn.Module):
    """A linear layer that needs as long as ``seconds()`` says for forward and backward."""

    def __init__(self, width, seconds):
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width), seconds
        nn.init.eye_(self.linear.weight)  # random values would differ between threads
        nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        return Sleep.apply(self.linear(x), *self.seconds())


class Model(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def seconds_of(case, rank, block, draw):
    """Return a function that says how long forward and backward of a block take on a rank."""
    slow = case.rank == rank and case.block in (None, block)
    more_s = case.cost_s / (case.blocks if case.block is None else 1) if slow else 0.0
    forward_s = more_s if case.cause == "slow rank in forward" else 0.0
    backward_s = more_s if case.cause == "slow rank in backward" else 0.0
    if case.cause == "slow rank":
        forward_s, backward_s = more_s * 0.4, more_s * 0.6

    def seconds():
        times = [case.compute_s * draw.gauss(1, case.jitter) * part for part in (1, 2)]
        return max(0.0, times[0]) + forward_s, max(0.0, times[1]) + backward_s

    return seconds


def train(case, comm, link, folder):
    draw = random.Random(case.seed + comm.rank)
    model = Model(
        Block(case.width, seconds_of(case, comm.rank, number, draw))
        for number in range(case.blocks)
    )
    over = OverLink(comm, link)
    blocks = [] if case.wrap == "root" else list(model.blocks)
    for block in blocks:
        fully_shard(block, mesh=over, reshard_after_forward=not case.keep)
    fully_shard(model, mesh=over)
    set_prefetch(model, case.ahead, case.ahead)
    for block in [] if case.prefetch else [*blocks, model]:
        block.set_modules_to_forward_prefetch([])
        block.set_modules_to_backward_prefetch([])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.ones(4, case.width)
    chosen = case.rank in (None, comm.rank)

    def put_in(cause):
        time.sleep(case.cost_s if chosen and case.cause == cause else 0.0)

    with recording(folder, model, optimizer, detailed_every=2) as run:
        for number in range(case.steps):
            with run.span("data"):
                time.sleep(case.data_s)
                put_in("slow data")
            put_in("host-bound")
            if case.cause == "needless copies":
                with run.span("copy"):
                    put_in("needless copies")
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 3 == 2:
                with run.span("checkpoint"):
                    time.sleep(case.save_s)
                    for _ in range(3):
                        put_in("checkpoint stall")


def reported(case):
    """Run a case; return its report."""
    block_bytes = 4 * (case.width**2 + case.width)
    link = Link(case.ranks, block_bytes / case.gather_s, case.latency_s)
    near = case.cause == "memory near its limit"
    limit = resident_bytes()[1] * (1.02 if near else 4)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch(LIMIT, return_value=int(limit)),
    ):
        LocalWorld(case.ranks).run(lambda comm: train(case, comm, link, folder))
        return report_of(folder)


def diagnosed(case):
    """Run a case; return its verdict: cause, rank and unit, and the sentence."""
    report = reported(case)
    if not report.diagnoses:
        return (HEALTHY, None, None), report.verdict
    first = report.diagnoses[0]
    return (first.cause, first.rank, first.unit), report.verdict


CHANGES = {  # by words in the advice
    "set_prefetch": lambda case: {"prefetch": True, "ahead": 2},
    "SHARD_GRAD_OP": lambda case: {"keep": True},
    "compression": lambda case: {"gather_s": case.gather_s / 2},
}


def advised(case):
    """Run a case as it is, without a link, and as advised; return what was said and what came."""
    before = reported(case)
    if not before.diagnoses:
        return {"advice": before.verdict}
    first, measured = before.diagnoses[0], before.measured
    change = next((make(case) for words, make in CHANGES.items() if words in first.advice), None)
    if change is None:
        return {"advice": before.verdict}
    plain_s = reported(replace(case, gather_s=1e-9)).measured.step.value
    after_s = reported(replace(case, **change)).measured.step.value
    step_s = measured.step.value
    return {
        "advice": first.advice,
        "step_s": step_s,
        "exposed_share": measured.mean_s(Wanted(*EXPOSED)) / measured.mean_step_s,
        "beyond_plain_share": 1 - plain_s / step_s,
        "foretold_s": first.gain_s,
        "gained_s": step_s - after_s,
    }


def follow_advice(options, console):
    """Follow the advice of drawn runs; return the number of those that gain what it says."""
    table = Table("advice", "exposed", "beyond plain", "foretold", "gained", "of foretold")
    rows = []
    for number in range(options.advice):
        cause = ("slow link", "bad prefetch")[number % 2]
        case = draw_case(cause, number, options.seed)
        rows.append({**asdict(case), **(said := advised(case))})
        if "foretold_s" not in said:
            table.add_row(said["advice"], *[""] * 5)
            continue
        ratio = said["gained_s"] / said["foretold_s"]
        shares = (f"{said[name]:.1%}" for name in ("exposed_share", "beyond_plain_share"))
        times = (f"{said[name] * 1e3:.1f} ms" for name in ("foretold_s", "gained_s"))
        table.add_row(said["advice"].split(":")[0], *shares, *times, f"{ratio:.0%}")
    console.print(table)
    write_report(options.out, rows)
    return sum(abs(row.get("gained_s", 0) / row.get("foretold_s", 1) - 1) <= 0.15 for row in rows)


def all_cases(options):
    if options.only:
        return [draw_case(options.only, number, options.seed) for number in range(options.faulty)]
    causes = [CAUSES[number % len(CAUSES)] for number in range(options.faulty)]
    turns = Counter()
    cases = []
    for cause in [*causes, *[HEALTHY] * options.healthy]:
        cases.append(draw_case(cause, turns[cause], options.seed))
        turns[cause] += 1
    if options.cases is not None:
        cases += [Case(**fields) for fields in json.loads(options.cases.read_text("utf-8"))]
    return cases


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faulty", type=int, default=40)
    parser.add_argument("--healthy", type=int, default=20)
    parser.add_argument("--advice", type=int, default=0)
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--only", choices=[*CAUSES, HEALTHY])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    console, rows = Console(), []
    if options.advice:
        right = follow_advice(options, console)
        console.print(f"{right} of {options.advice} gain what was foretold within 15%")
        return int(right < options.advice)
    for case in all_cases(options):
        named, sentence = diagnosed(case)
        right = named == case.expected
        rows.append({**asdict(case), "named": named, "right": right, "verdict": sentence})
        if not right:
            console.print(f"expected {case.expected}, got {sentence}", markup=False)
    table = Table("cause", "runs", "named right")
    for cause in dict.fromkeys(row["cause"] for row in rows):
        mine = [row["right"] for row in rows if row["cause"] == cause]
        table.add_row(cause, str(len(mine)), str(sum(mine)))
    console.print(table)
    write_report(options.out, rows)
    faulty = [row["right"] for row in rows if row["cause"] != HEALTHY]
    healthy = [row["right"] for row in rows if row["cause"] == HEALTHY]
    console.print(f"{sum(faulty)} of {len(faulty)} named, {sum(healthy)} of {len(healthy)} healthy")
    return int(sum(faulty) < 0.95 * len(faulty) or not all(healthy))


if __name__ == "__main__":
    sys.exit(main())
