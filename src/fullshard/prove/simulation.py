# SPDX-License-Identifier: Apache-2.0
"""The race check of a source checkout: programs, deliberate faults and PyTorch's FSDP2 as control.

It lives with the tests (``tests/device``) and is not installed, so it runs as a process of its own,
which says a line of JSON for each program and each fault.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fullshard.prove.claims import Claim, Section
from fullshard.prove.processes import ask_python
from fullshard.prove.provenance import checkout

_TITLE = "Order on a device: races, waits, deliberate faults"
_HOW = (
    "tests/device runs the engine itself on a simulated CUDA device, with streams, events, NCCL's "
    "order and a caching allocator, and looks for reads and writes that nothing orders, memory "
    "used again too early, waits of the host, and ranks whose collectives differ. Deliberate "
    "faults (a wait, an event, a join or a keep-alive left out) must each be found; PyTorch's "
    "FSDP2 is the control that must be without a finding. It is a model of a device, not one."
)
_WHY_NOT = "from device import guard; print(guard.why_not() or '')"
_CONTROL = "FSDP2"


def prove_order(kinds: Sequence[str], timeout_s: float) -> Section:
    """Run the simulation's ``kinds`` (``sample``; or ``programs`` and ``mutants``), one by one.

    ``timeout_s`` bounds all of them together. Where it cannot run, the section says why.

    Raises:
        FullshardError: the simulation failed, or took longer.
    """
    root = checkout()
    if root is None or not (root / "tests" / "device").is_dir():
        return _not_here("tests/device is not installed with the package: run it from a checkout")
    tests, end_s = root / "tests", time.monotonic() + timeout_s
    reason = ask_python(["-c", _WHY_NOT], timeout_s, tests).strip()
    if reason:
        return _not_here(reason)
    lines = []
    for kind in kinds:
        said = ask_python(["-m", "device", kind], end_s - time.monotonic(), tests)
        lines += [json.loads(line) for line in said.splitlines()]
    data = [{name: each[name] for name in each if name != "collectives"} for each in lines]
    return Section(_TITLE, _HOW, tuple(simulation_claims(lines)), data)


def _not_here(reason: str) -> Section:
    return Section(_TITLE, _HOW, (Claim("no race on a device", "not proved", reason),))


def simulation_claims(lines: Sequence[Mapping[str, Any]]) -> Iterator[Claim]:
    """Judge the lines that the simulation has printed."""
    runs = [each for each in lines if "program" in each]
    controls = [each for each in runs if _CONTROL in each["program"]]
    ours = [each for each in runs if _CONTROL not in each["program"]]
    yield _none_in("no race, no memory used too early, no failure", ours, "findings")
    yield _none_in("the host waits only where it must", ours, "unexpected")
    by_program: dict[str, list[Any]] = {}
    for run in ours:
        by_program.setdefault(run["program"], []).append(run["collectives"])
    compared = {name: each for name, each in by_program.items() if len(each) > 1}
    apart = [name for name, each in compared.items() if any(one != each[0] for one in each)]
    yield Claim.that(
        "ranks issue collectives in one order",
        bool(compared) and not apart,
        _named(apart) or f"0 of {len(compared)} differ",
        "one order",
    )
    verdicts = [each for each in lines if "equivalent" in each]  # other lines name mutants, too
    faults = [each for each in verdicts if not each["equivalent"]]
    missed = [each["mutant"] for each in faults if not each["found"]]
    yield Claim.that(
        "every deliberate fault is found",
        bool(faults) and not missed,
        f"{len(faults) - len(missed)} of {len(faults)}{_named(missed, '; missed: ')}",
        "all",
    )
    same = [each for each in verdicts if each["equivalent"]]
    alarms = [each["mutant"] for each in same if each["found"] or each.get("broken")]
    yield Claim.that(
        "changes that are no faults raise no alarm",
        not alarms,
        f"{len(alarms)} of {len(same)}{_named(alarms, ': ')}",
        "none",
    )
    yield _none_in("control: PyTorch's FSDP2 without a finding", controls, "findings")


def _none_in(what: str, runs: Sequence[Mapping[str, Any]], key: str) -> Claim:
    wrong = [run["program"] for run in runs if run[key] or run["failure"]]
    figure = _named(wrong) or f"none in {len(runs)} runs"
    return Claim.that(what, bool(runs) and not wrong, figure, "none")


def _named(names: Sequence[str], before: str = "") -> str:
    return before + ", ".join(sorted(set(names))) if names else ""
