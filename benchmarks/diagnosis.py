# SPDX-License-Identifier: Apache-2.0
"""How often does a report name what is the matter with a run?

    python benchmarks/diagnosis.py [--seed 1] [--faulty 40] [--healthy 20] [--cases FILE.json]
                                   [--only CAUSE] [--netlab] [--out FILE.json]
    python benchmarks/diagnosis.py --advice 10 [--rounds 2] [--seed 1] [--only CAUSE] [--netlab]
                                   [--out FILE.json]

Each run (see `diagnosed_run`) has one cause put in, or none, by parameters drawn from the seed. A
faulty run counts as found if the verdict names cause, rank and unit; a healthy one if its verdict
is that. Memory near its limit is put in by a limit that is low, not by filling the machine. Ranks
are threads over a simulated link; with ``--netlab``, as root, processes on hosts of their own that
talk by Gloo and TCP over links of the rate that the case wants, in steps four times as long.

With ``--advice`` runs on slow links and without prefetch follow each advice that they get. Said are
the exposed share, waits and the issue of collectives, beside that of (step - step without a link),
on hosts (two) beside (step - step of the unsharded model), and the gain beside that foretold, all
by medians over steps; status 1 where a share is off by more than 5% of a step, or a gain by 15% of
itself.

``--cases`` takes further runs: a list of objects with the fields of `diagnosed_run.Case`. Ends with
status 1 where fewer than 95% of the faulty, or not all of the healthy, are named, with 2 where the
file is wrong or there can be no hosts.
"""

import argparse
import random
import statistics
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import netlab
import torch
from diagnosed_run import HEALTHY, Case, cases_of, for_hosts, reported
from report import write_report
from rich.console import Console
from rich.table import Table

from fullshard.core.errors import ConfigurationError
from fullshard.report.findings import CAUSES
from fullshard.report.measure import EXPOSED, Wanted


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


def diagnosed(case, hosts=False):
    """Run a case; return its verdict: cause, rank and unit, and the sentence."""
    report = reported(case, hosts)
    if not report.diagnoses:
        named = HEALTHY if report.verdict.startswith(HEALTHY) else None
        return (named, None, None), report.verdict
    first = report.diagnoses[0]
    return (first.cause, first.rank, first.unit), report.verdict


CHANGES = {  # by words in the advice
    "set_prefetch": lambda case: {"prefetch": True, "ahead": 2},
    "SHARD_GRAD_OP": lambda case: {"keep": True},
    "compression": lambda case: {"gather_s": case.gather_s / 2},
}


def advised(case, hosts, rounds):
    """Run a case as it is, without a link, and by each advice; return what was said and what came.

    The runs take turns, ``rounds`` times, so that what else the machine does meets all of them.
    """
    first = reported(case, hosts)
    said = first.diagnoses[0] if first.diagnoses else None
    told = [] if said is None else [(said.advice, said.gain_s), *said.others]
    changes = {
        advice: make(case)
        for advice, _ in told
        for words, make in CHANGES.items()
        if words in advice
    }
    if not changes:
        return [{"advice": first.verdict}]
    plain = {"sharded": False} if hosts else {"gather_s": 1e-9}
    turns = {"before": {}, "plain": plain, **changes}
    runs = {name: [first] if name == "before" else [] for name in turns}
    for number in range(rounds):
        for name, change in turns.items():
            if len(runs[name]) == number:
                runs[name].append(reported(replace(case, **change), hosts))
    step_s = {
        name: statistics.median(step.duration_s for run in made for step in run.measured.steady)
        for name, made in runs.items()
    }
    before = [run.measured for run in runs["before"]]
    waits = Wanted("issue", *EXPOSED)
    exposed = [
        run.of_step(rank, step, waits) / run.of_step(rank, step, Wanted())
        for run in before
        for rank in run.ranks
        for step in run.looked_at
    ]
    gains = [
        {change.advice: change.gain_s, **dict(change.others)}
        for change in (run.diagnoses[0] for run in runs["before"] if run.diagnoses)
    ]
    return [
        {
            "advice": advice,
            "step_s": step_s["before"],
            "exposed_share": statistics.median(exposed),
            "beyond_plain_share": 1 - step_s["plain"] / step_s["before"],
            "foretold_s": statistics.mean(said[advice] for said in gains if advice in said),
            "gained_s": step_s["before"] - step_s[advice],
        }
        for advice in changes
    ]


def follow_advice(options, console):
    """Follow the advice of drawn runs; tell if exposed shares and gains are as they were said."""
    table = Table("advice", "exposed", "beyond plain", "foretold", "gained", "of foretold")
    rows = []
    for number in range(options.advice):
        cause = options.only or ("slow link", "bad prefetch")[number % 2]
        case = draw_case(cause, number, options.seed)
        if options.netlab:
            case = replace(for_hosts(case), ranks=2)
        for said in advised(case, options.netlab, options.rounds):
            rows.append({**asdict(case), **said})
            if "foretold_s" not in said:
                table.add_row(said["advice"], *[""] * 5)
                continue
            ratio = said["gained_s"] / said["foretold_s"]
            shares = (f"{said[name]:.1%}" for name in ("exposed_share", "beyond_plain_share"))
            times = (f"{said[name] * 1e3:.1f} ms" for name in ("foretold_s", "gained_s"))
            table.add_row(said["advice"].split(":")[0], *shares, *times, f"{ratio:.0%}")
    console.print(table)
    write_report(options.out, rows)
    told = [row for row in rows if "foretold_s" in row]
    gained = sum(abs(row["gained_s"] / row["foretold_s"] - 1) <= 0.15 for row in told)
    shown = sum(abs(row["exposed_share"] - row["beyond_plain_share"]) <= 0.05 for row in told)
    console.print(f"of {len(rows)}, {gained} gain what was foretold within 15%,")
    console.print(f"and {shown} wait as long as the step is beyond computing, within 5% of it")
    return int(gained < len(rows) or shown < len(rows))


def all_cases(options):
    """The cases drawn, as they run on hosts if those are asked for, and the file's as they are."""
    faulty = [options.only] if options.only else CAUSES
    causes = [faulty[number % len(faulty)] for number in range(options.faulty)]
    healthy = [] if options.only else [HEALTHY] * options.healthy
    turns = Counter()
    cases = []
    for cause in [*causes, *healthy]:
        cases.append(draw_case(cause, turns[cause], options.seed))
        turns[cause] += 1
    if options.netlab:
        cases = [for_hosts(case) for case in cases]
    return cases + ([] if options.cases is None else cases_of(options.cases))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faulty", type=int, default=40)
    parser.add_argument("--healthy", type=int, default=20)
    parser.add_argument("--advice", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--only", choices=[*CAUSES, HEALTHY])
    parser.add_argument("--netlab", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    try:
        return judged(options)
    except (ConfigurationError, netlab.Unavailable) as why:
        print(f"diagnosis: {why}", file=sys.stderr)
        return 2


def judged(options):
    """Run what is asked for and print the tally; return the status."""
    torch.set_num_threads(1)
    console, rows = Console(), []
    if options.advice:
        return follow_advice(options, console)
    for case in all_cases(options):
        named, sentence = diagnosed(case, options.netlab)
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
