# SPDX-License-Identifier: Apache-2.0
"""`python -m device KIND`: lines of JSON, see `device.runner`.

KIND is one of programs, mutants, cost, orders, offloaded, memory, repeated, captured, few and
sample of all these, mutate, which plants faults at random (``--seed S --count N``), and table,
which makes the table of costs in `docs/performance.md`.
"""

import argparse

from device import guard

guard.load()

from device.runner import main  # noqa: E402 - torch is imported after the guard

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m device", description=__doc__)
    parser.add_argument("kind")
    parser.add_argument("--seed", type=int, default=0, help="of the faults that are drawn")
    parser.add_argument("--count", type=int, default=30, help="faults to draw")
    given = parser.parse_args()
    main(given.kind, seed=given.seed, count=given.count)
