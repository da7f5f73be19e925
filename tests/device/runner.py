# SPDX-License-Identifier: Apache-2.0
"""Runs programs on a simulated device and writes what was found, a line of JSON for each.

`device.guard` must be loaded before."""

import json
import random
import time
import traceback

from device.mutants import EQUIVALENT, MUTANTS, applied
from device.programs import CONTROLS, PROGRAMS, run

# Some programs also as another rank, and with other answers to the host's questions.
OTHERWISE = ("full", "hybrid", "blocks of 2", "several forwards", "offload")
SEEDS = ("at once", "seed 1", "seed 2")


def answers(kind):
    """How the host's questions whether something is completed are answered."""
    if kind == "never":
        return lambda: False
    if kind == "at once":
        return lambda: True
    coin = random.Random(kind)
    return lambda: coin.random() < 0.5


def report(name, wanted, rank, kind):
    begin = time.process_time()
    result = {"program": name, "rank": rank, "answers": kind, "failure": None}
    try:
        machine = run(wanted, rank, answers(kind))
    except Exception:
        return result | {
            "failure": traceback.format_exc(limit=-6),
            "findings": [],
            "unexpected": [],
        }
    return result | {
        "findings": list(machine.findings),
        "syncs": dict(machine.syncs),
        "unexpected": unexpected(machine, wanted),
        "collectives": machine.collectives,
        "questions": machine.questions,
        "launches": len(machine.launches),
        "seconds": round(time.process_time() - begin, 2),
    }


def unexpected(machine, wanted):
    """Waits of the host in other functions than the program names."""
    return [text for text in machine.syncs if not any(each in text for each in wanted.syncs)]


def requests(programs, otherwise):
    """(program, rank, answers): all as rank 0, some as another one and answered otherwise."""
    wanted = [(name, 0, "never") for name in programs]
    for name in otherwise:
        wanted += [(name, 1, "never"), *((name, 0, kind) for kind in SEEDS)]
    return wanted


def judge(mutant):
    """What the first of its programs finds that it does not find without the fault."""
    for name in mutant.programs:
        with applied(mutant):
            result = report(name, PROGRAMS[name], 0, "never")
        found = result["failure"] or result["findings"] or result["unexpected"]
        if found:
            return found[:1] if isinstance(found, list) else found.splitlines()[-1:]
    return []


def main(kind):
    if kind == "programs":
        known = PROGRAMS | CONTROLS
        for name, rank, answered in requests(known, OTHERWISE):
            print(json.dumps(report(name, known[name], rank, answered)), flush=True)
        return
    every = [(name, mutant, False) for name, mutant in MUTANTS.items()]
    every += [(name, mutant, True) for name, (mutant, _) in EQUIVALENT.items()]
    for name, mutant, equivalent in every:
        verdict = {"mutant": name, "equivalent": equivalent, "found": judge(mutant)}
        print(json.dumps(verdict), flush=True)
