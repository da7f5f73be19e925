# SPDX-License-Identifier: Apache-2.0
"""Runs programs, faults and costs on a simulated device; a line of JSON for each.

`device.guard` must be loaded before."""

import inspect
import json
import random
import signal
import time
import traceback
from contextlib import contextmanager

from device import (
    around,  # noqa: F401 - has programs
    by_hand,  # noqa: F401 - has programs
    captured,
    cost,
    groups,  # noqa: F401 - has programs
    memory,
    mutations,
    optional_parts,  # noqa: F401 - has programs
    peers,  # noqa: F401 - has programs
    repeated,
    values,  # noqa: F401 - has programs
)
from device.machine import Machine
from device.mutants import EQUIVALENT, MUTANTS, applied, function_named
from device.programs import CONTROLS, PROGRAMS, run

# Some programs also with other answers to the host's questions.
OTHERWISE = (
    "full",
    "hybrid",
    "blocks dropped and in changing order",
    "blocks of 2",
    "forwards and backwards crossed",
    "two stages between hosts",
    "offload",
)
ANSWERS = ("at once", "seed 1", "seed 2")

# Enough for every day.
FEW = (
    *("full over 3", "gathers in int8", "one communicator", "recorded"),
    *("blocks dropped and in changing order", "blocks of 2"),
    "clipped, optimizer beside forward, offloaded",
)
FEW_AS_TWO = ("bf16 hybrid", "branches that only some ranks use")
# Each part of the engine is in one of them.
SAMPLE = (
    *(*FEW, "offload bf16", "reduces in int8", "NO_SHARD offloaded", "offload optimizer"),
    *("SHARD_GRAD_OP", "accumulation without reduces", "an exception in a hybrid backward"),
    *("reduces left under way", "hybrid accumulation", "optimizer in backward"),
    *("clipping at the first door", "forwards and backwards crossed", "frozen parameters"),
    *("full parameters between steps", "scaled losses", "FSDP2 bf16"),
    *("a replay after a step that was put off", "one layer on two streams, kept"),
    "gathers in int8 from the host, on two streams",
    "micro-batches on two streams in turn, reduces left under way",
)
AS_TWO = (*FEW_AS_TWO, "offload", "optional parts, again")
LEAST_BYTES = 1024  # what a step may leave: factors that divide gradients
SOME_FAULTS = {"few": 30, "sample": 10}  # of so many one is tried


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
    nothing = {"findings": [], "unexpected": [], "collectives": [], "urgent": [], "questions": 0}
    try:
        machine = run(wanted, rank, Machine(answers(kind)))
    except Exception:
        return result | nothing | {"failure": traceback.format_exc(limit=-6)}
    rest = machine.rest_bytes - wanted.kept_bytes
    left = [f"a step leaves {rest} bytes behind"] if not -LEAST_BYTES < rest < LEAST_BYTES else []
    return result | {
        "findings": list(machine.findings) + left,
        "syncs": dict(machine.syncs),
        "unexpected": unexpected(machine, wanted),
        "collectives": in_order(machine.collectives),
        "urgent": by_priority(machine),
        "questions": machine.questions,
        "rest": rest,
        "launches": len(machine.launches),
        "peak": machine.held.peak_bytes,
        "seconds": round(time.process_time() - begin, 2),
    }


def in_order(collectives):
    """Collectives with their groups numbered as they come: names differ between ranks.

    Without the sizes of an all-to-all, in which each rank sends what others have of its own.
    """
    numbers = {}
    return [
        (numbers.setdefault(group, len(numbers)), kind, what, *(rest[kind == "all_to_all" :]))
        for group, kind, what, *rest in collectives
    ]


def by_priority(machine):
    """List each kind of collective with True if it ran on a stream of high priority, else False."""
    kinds = {(machine.high_priority[group], kind) for group, kind, *_ in machine.collectives}
    return sorted([list(each) for each in kinds])


def unexpected(machine, wanted):
    """Waits of the host in other functions than the program names."""
    return [text for text in machine.syncs if not any(each in text for each in wanted.syncs)]


def requests(programs, otherwise=OTHERWISE):
    """(program, rank, answers): all as two ranks, some answered otherwise."""
    wanted = [(name, rank, "never") for name in programs for rank in (0, 1)]
    return wanted + [(name, 0, kind) for name in otherwise for kind in ANSWERS]


def judge(mutant):
    """Return the findings of its first program that has any; without the fault none has.

    An exception is none: it tells that the fault does not fit the engine any more.
    """
    for name in mutant.programs:
        PROGRAMS[name].answers()  # of ranks without the fault
        try:
            with applied(mutant):
                results = [report(name, PROGRAMS[name], rank, "never") for rank in mutant.ranks]
        except ValueError as error:
            return {"found": [], "broken": str(error)}
        found = [text for each in results for text in each["findings"] + each["unexpected"]]
        if any(each["collectives"] != results[0]["collectives"] for each in results):
            found.append("ranks issue other collectives")
        failures = [each["failure"].splitlines()[-1] for each in results if each["failure"]]
        if failures or found:
            return {"found": found[:1], "broken": failures[0] if failures else None}
    return {"found": [], "broken": None}


def unfit():
    """Return the faults that do not fit the engine any more, with the reason."""
    found = {}
    for name, mutant in (MUTANTS | {name: each for name, (each, _) in EQUIVALENT.items()}).items():
        try:
            with applied(mutant):
                pass
        except ValueError as error:
            found[name] = str(error)
    return found


def hunt(mutant, usual):
    """Return the program that finds the fault, and how; ``ran`` programs came to its function.

    The likeliest come first. ``usual`` keeps what programs report without faults, and the lines
    that they run. An exception finds a fault, too, and so does a program that does not end.
    """
    text, first = inspect.getsourcelines(function := function_named(mutant.edits[0][0]))
    lines_of_function = range(first, first + len(text))
    verdict = {"program": None, "found": None, "ran": 0}
    for name in sorted(PROGRAMS, key=lambda name: name not in (*AS_TWO, *SAMPLE)):
        for rank in (0, 1):
            if (name, rank) not in usual:
                with mutations.lines_run() as ran:
                    usual[name, rank] = report(name, PROGRAMS[name], rank, "never"), ran
            before, ran = usual[name, rank]
            if ran[function.__code__.co_filename].isdisjoint(lines_of_function):
                continue
            verdict["ran"] += 1
            with applied(mutant), _limited():
                told = report(name, PROGRAMS[name], rank, "never")
            found = [told["failure"].splitlines()[-1]] if told["failure"] else []
            found += told["findings"] + told["unexpected"]
            kinds = ("collectives", "launches", "peak")
            found += [f"other {kind}" for kind in kinds if not found and told[kind] != before[kind]]
            if found:
                return verdict | {"program": name, "found": found[0][:150]}
    return verdict


@contextmanager
def _limited():
    """Within, `TimeoutError` after a minute, where a program takes less than two seconds."""

    def end(*_):
        raise TimeoutError("the program does not end")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main(kind, *, seed=0, count=30):
    if kind == "mutate":
        usual = {}
        for mutant in mutations.draw(seed, count):
            print(json.dumps({"edit": mutant.edits[0]} | hunt(mutant, usual)), flush=True)
    sampled = kind in ("few", "sample")
    if kind == "programs" or sampled:
        known = PROGRAMS | CONTROLS
        wanted = requests(known)
        if sampled:
            once, twice = (FEW, FEW_AS_TWO) if kind == "few" else (SAMPLE, AS_TWO)
            wanted = [(name, 0, "never") for name in once] + [("hybrid", 0, "seed 1")]
            wanted += [(name, rank, "never") for name in twice for rank in (0, 1)]
        for name, rank, answered in wanted:
            print(json.dumps(report(name, known[name], rank, answered)), flush=True)
    if kind == "mutants" or sampled:
        every = [(name, mutant, False) for name, mutant in MUTANTS.items()]
        every += [(name, mutant, True) for name, (mutant, _) in EQUIVALENT.items()]
        for name, mutant, equivalent in every[:: SOME_FAULTS.get(kind, 1)]:
            verdict = {"mutant": name, "equivalent": equivalent} | judge(mutant)
            print(json.dumps(verdict), flush=True)
        print(json.dumps({"unfit": unfit()}), flush=True)
    if kind == "cost" or sampled:
        for line in cost.lines(cost.CASES if kind == "cost" else cost.FEW_CASES):
            print(json.dumps(line), flush=True)
    if kind == "orders" or sampled:
        some = {
            "few": ("two models in turn",),
            "sample": ("two models in turn", "two blocks swapped"),
        }
        names = some.get(kind, cost.ORDERS)
        for line in cost.orders(names):
            print(json.dumps(line), flush=True)
    if kind in ("offloaded", "sample"):
        for line in cost.offloaded(cost.OFFLOADED if kind == "offloaded" else cost.OFFLOADED[2:]):
            print(json.dumps(line), flush=True)
    if kind == "repeated" or sampled:
        for reduces in cost.REDUCES if kind == "repeated" else ["bf16"]:
            found = repeated.repeated(reduces, 100 if kind == "repeated" else 2)
            print(json.dumps(found), flush=True)
    if kind == "captured" or sampled:
        for reduces in cost.REDUCES if kind == "captured" else ["bf16"]:
            print(json.dumps(captured.captured(reduces)), flush=True)
        for line in captured.faults() if kind == "captured" else ():
            print(json.dumps(line), flush=True)
    if kind == "memory" or sampled:
        some = {"few": memory.FEW_CASES[2:], "sample": memory.FEW_CASES}
        for case in some.get(kind, memory.CASES):
            print(json.dumps(memory.memory_of(*case)), flush=True)
    if kind in ("memory", "sample"):
        few = (["two blocks swapped"], ["fullshard, by row"])
        for line in memory.changed(*few if sampled else ()):
            print(json.dumps(line), flush=True)
    if kind == "table":
        print(cost.table(list(cost.lines(cost.CASES))))
