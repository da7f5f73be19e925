# SPDX-License-Identifier: Apache-2.0
"""The engine on a simulated CUDA device: no race, no wait of the host, one order of collectives.

A few programs and faults; more in thorough runs, and all by ``FULLSHARD_TRIALS=full``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.limits import PROCESS_S
from support.sampling import FULL, THOROUGH

from device import guard

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(guard.why_not() is not None, reason=str(guard.why_not())),
]

TESTS = Path(__file__).resolve().parents[1]


def ask(kind):
    """Lines of `python -m device`, a process of its own, which loads the guard before torch."""
    inherited = os.environ.get("PYTHONPATH", "")
    environment = os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{inherited}"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "device", kind],
        env=environment,
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=2 * PROCESS_S,  # 80 s of processor time
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def answers():
    everything = ("programs", "mutants", "cost", "orders", "offloaded", "memory", "repeated")
    everything = (*everything, "captured")
    if FULL:
        return [each for kind in everything for each in ask(kind)]
    return ask("sample" if THOROUGH else "few")


@pytest.fixture(scope="module")
def runs(answers):
    return [each for each in answers if "program" in each]


def test_every_program_runs_without_a_finding(runs):
    assert len({run["program"] for run in runs}) >= (90 if FULL else 10)
    wrong = {
        (run["program"], run["rank"], run["answers"]): run["failure"] or run["findings"]
        for run in runs
        if run["failure"] or run["findings"]
    }
    assert wrong == {}


def test_the_host_waits_only_where_it_must(runs):
    unexpected = {run["program"]: run["unexpected"] for run in runs if run["unexpected"]}
    assert unexpected == {}


def test_the_host_never_asks_what_the_device_has_done(runs):
    """So nothing that the engine does depends on time, and one run stands for all.

    Between steps a record asks if what it has noted can be read.
    """
    asked = {run["program"]: run["questions"] for run in runs if run["questions"]}
    assert asked == {"recorded": 1}


def test_a_step_repeats_the_one_before_at_the_same_addresses(answers):
    """As a captured graph would replay it: no question, no wait of the host, the same kernels."""
    ours = [each for each in answers if "repeated" in each]
    assert [each["repeated"] for each in ours] == ([100, 100] if FULL else [2])
    assert [each["differs"] for each in ours] == [None] * len(ours)
    assert [(each["asked"], each["waited"]) for each in ours] == [(0, {})] * len(ours)
    assert all(each["notes"] > 500 for each in ours)


def test_a_step_can_be_captured_as_a_graph(answers):
    """Its streams are joined, its memory is the graph's, and it has the operations of a step."""
    graphs = [each for each in answers if "captured" in each]
    assert [each["captured"] for each in graphs] == (["bf16", "fp32"] if FULL else ["bf16"])
    for each in graphs:
        assert each["findings"] == []
        assert each["as without"]
        assert each["operations"] > 500
        assert each["replays"] == 2
    faults = {each["captured fault"]: each["found"] for each in answers if "captured fault" in each}
    assert len(faults) == (6 if FULL else 0)
    assert [name for name, found in faults.items() if not found] == []


def test_every_fault_fits_the_engine_as_it_is(answers):
    assert [each["unfit"] for each in answers if "unfit" in each] == [{}]


def test_ranks_issue_collectives_in_one_order(runs):
    by_program = {}
    for run in runs:
        by_program.setdefault(run["program"], []).append(run["collectives"])
    compared = {name: orders for name, orders in by_program.items() if len(orders) > 1}
    assert len(compared) == (len(by_program) if FULL else 4 if THOROUGH else 2)
    for name, orders in compared.items():
        assert all(order == orders[0] for order in orders), name


def test_gathers_have_a_communicator_of_high_priority(runs):
    by_program = {run["program"]: run["urgent"] for run in runs}
    for name in ("full over 3", "bf16 hybrid", "blocks of 2", "gathers in int8"):
        assert [True, "all_gather"] in by_program[name], name
        assert [False, "all_gather"] not in by_program[name], name
        assert [True, "reduce_scatter"] not in by_program[name], name
    one = by_program["one communicator"]
    assert [False, "all_gather"] in one
    assert [False, "reduce_scatter"] in one
    assert not any(urgent for urgent, _ in one)


def test_every_fault_is_found(answers):
    verdicts = [each for each in answers if "broken" in each]
    assert len(verdicts) >= (75 if FULL else 5)
    assert {each["mutant"]: each["broken"] for each in verdicts if each["broken"]} == {}
    missed = [each["mutant"] for each in verdicts if not each["equivalent"] and not each["found"]]
    assert missed == []
    alarms = {each["mutant"]: each["found"] for each in verdicts if each["equivalent"]}
    assert not any(alarms.values()), alarms


# Of the model of a step, see `device.cost`: launches, bytes and collectives beyond the plain model
# for two blocks. Less is better; what rises needs a reason.
LAUNCHES = {"bf16": 10, "fp32": 12}
COMPUTE_BYTES = {"bf16": 0.83e9, "fp32": 3.55e9}
COLLECTIVES = 5  # FSDP2: 6


def test_a_modelled_step_costs_no_more_than_before_and_than_fsdp2s(answers):
    costs = [each for each in answers if "cost" in each]
    found = {(c["engine"], c["blocks"], c["reduces"], c["link_gb_per_s"]): c for c in costs}
    plain = {key[1:3]: cost for key, cost in found.items() if key[0] == "plain"}
    ours = {key[1:]: cost for key, cost in found.items() if key[0] == "fullshard"}
    assert len(ours) == (30 if FULL else 3)
    for (blocks, reduces, link), mine in ours.items():
        theirs, bare = found["FSDP2", blocks, reduces, link], plain[blocks, reduces]
        assert mine["compute_bytes"] < theirs["compute_bytes"]
        assert mine["step_ms"] <= theirs["step_ms"]
        launches, their_launches = (
            each["compute_launches"] + each["other_launches"] for each in (mine, theirs)
        )
        assert launches <= their_launches
        if blocks == 2:
            assert launches - bare["compute_launches"] <= LAUNCHES[reduces]
            assert mine["compute_bytes"] - bare["compute_bytes"] <= COMPUTE_BYTES[reduces]
            assert mine["collectives"] <= COLLECTIVES


def test_changing_orders_cost_no_more_than_fsdp2s(answers):
    """To a quarter of a percent, by which a block that is dropped for the first time is longer."""
    costs = {(c["order"], c["engine"]): c["step_ms"] for c in answers if "order" in c}
    orders = {order for order, _ in costs}
    assert len(orders) == (6 if FULL else 2 if THOROUGH else 1)
    for order in orders:
        assert costs[order, "fullshard"] <= 1.0025 * costs[order, "FSDP2"], order
    # Each is replayed, though no step repeats the one before.
    assert costs["two models in turn", "fullshard"] < 0.95 * costs["two models in turn", "FSDP2"]


@pytest.mark.thorough
def test_changing_orders_take_memory_of_the_stream_of_early_gathers_alone(answers):
    """No more at a time than steps in one order; what is reserved for them stays reserved."""
    found = [c for c in answers if "memory in order" in c and c["engine"] != "FSDP2"]
    assert len(found) == (6 if FULL else 1)
    for each in found:
        assert each["allocated_units"] <= ALLOCATED_UNITS["sharded"]["bf16"]
        assert each["reserved_units"] <= each["allocated_units"] + EARLY_UNITS


@pytest.mark.thorough
def test_a_step_takes_little_more_than_its_updates_on_the_host(answers):
    """Where those take most of it: at most a tenth beside backward; see `device.cost.OFFLOADED`."""
    steps = {(c["offloaded"], *c["shape"]): c for c in answers if "offloaded" in c}
    shapes = {key[1:] for key in steps}
    assert shapes
    for shape in shapes:
        ways = ("beside backward", "beside forward", "after backward")
        early, between, late = (steps[way, *shape] for way in ways)
        for each in (early, between):
            assert each["update_ms"] == pytest.approx(late["update_ms"], rel=1e-3)
        assert early["step_ms"] <= 1.1 * max(early["update_ms"], early["copies_ms"])
        beside, exposed = (each["step_ms"] - each["update_ms"] for each in (between, late))
        assert beside <= 0.75 * exposed


EARLY_UNITS = 3.3  # reserved for gathers that begin early

# Units beyond what rests, at the peak of a step, see `device.memory`. What rises needs a reason.
ALLOCATED_UNITS = {
    "sharded": {"fp32": 3.75, "bf16": 3.4, "bf16, reduced in fp32": 4.5},
    "hybrid": {"fp32": 3.5, "bf16": 2.5, "bf16, reduced in fp32": 4.0},
    "offloaded": {"fp32": 4.25, "bf16": 4.4, "bf16, reduced in fp32": 5.5},
}


def test_a_step_holds_no_more_than_before_and_than_fsdp2s_and_leaves_nothing(answers):
    """To a hundredth of a unit."""
    found = {
        tuple(each[name] for name in ("engine", "dtypes", "reduces complete", "mode")): each
        for each in answers
        if "left_units" in each
    }
    assert {key: each["left_units"] for key, each in found.items() if each["left_units"]} == {}
    ours = {key: each for key, each in found.items() if key[0] != "FSDP2"}
    assert len(ours) == (24 if FULL else 2 if THOROUGH else 1)
    for (_, dtypes, condition, mode), mine in ours.items():
        assert mine["allocated_units"] <= ALLOCATED_UNITS[mode][dtypes]
        if mode != "offloaded":
            theirs = found["FSDP2", dtypes, condition, mode]
            assert mine["reserved_units"] <= theirs["reserved_units"]
            assert mine["allocated_units"] <= theirs["allocated_units"]
