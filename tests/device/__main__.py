# SPDX-License-Identifier: Apache-2.0
"""Runs programs on a simulated device and writes what was found, a line of JSON for each."""

import json
import random
import sys
import time
import traceback

from device import guard


def answers(kind):
    """How the host's questions whether something is completed are answered."""
    if kind == "never":
        return lambda: False
    if kind == "at once":
        return lambda: True
    coin = random.Random(kind)
    return lambda: coin.random() < 0.5


def report(name, wanted, rank, kind, run):
    begin = time.process_time()
    result = {"program": name, "rank": rank, "answers": kind, "failure": None}
    try:
        machine = run(wanted, rank, answers(kind))
    except Exception:
        return result | {"failure": traceback.format_exc(limit=-6), "findings": [], "syncs": {}}
    return result | {
        "findings": list(machine.findings),
        "syncs": dict(machine.syncs),
        "collectives": machine.collectives,
        "questions": machine.questions,
        "launches": len(machine.launches),
        "seconds": round(time.process_time() - begin, 2),
    }


def main(wanted):
    from device.programs import CONTROLS, PROGRAMS, run

    for line in wanted:
        name, rank, kind = line
        chosen = (PROGRAMS | CONTROLS)[name]
        print(json.dumps(report(name, chosen, rank, kind, run)), flush=True)


if __name__ == "__main__":
    guard.load()
    main(json.loads(sys.argv[1]))
