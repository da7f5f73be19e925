# SPDX-License-Identifier: Apache-2.0
"""The schedule: pinned for a model of three units, and its laws for random ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.core.errors import ConfigurationError, UsageError
from fullshard.core.layout import lay_out
from fullshard.core.schedule import (
    Event,
    Moment,
    Op,
    OpKind,
    Scheduler,
    UnitPolicy,
    compile_step,
    rules,
    unit_policy,
)
from fullshard.core.schedule.record import needed_before
from fullshard.core.spec import ParamSpec
from fullshard.core.strategy import Precision, Prefetch

F_BEGIN, F_END = Moment.FORWARD_BEGIN, Moment.FORWARD_END
B_BEGIN, B_END = Moment.BACKWARD_BEGIN, Moment.BACKWARD_END
END = Event(Moment.STEP_END)


def short(ops):
    signs = {
        OpKind.GATHER: "G",
        OpKind.AWAIT_GATHER: "g",
        OpKind.FREE: "F",
        OpKind.SHRINK: "S",
        OpKind.REDUCE: "R",
        OpKind.ALL_REDUCE: "A",
        OpKind.AWAIT_REDUCE: "r",
    }
    return " ".join(f"{signs[op.kind]}{op.unit}" for op in ops)


def chain(count):
    """A root (unit 0) without parameters of its own around units 1..count, one after the other."""
    units = range(1, count + 1)
    forward = [Event(moment, unit) for unit in units for moment in (F_BEGIN, F_END)]
    backward = [Event(moment, unit) for unit in reversed(units) for moment in (B_BEGIN, B_END)]
    return [Event(F_BEGIN, 0), *forward, Event(F_END, 0), Event(B_BEGIN, 0), *backward, END]


POLICIES = {0: UnitPolicy(gathered=False, reduced=False)} | {n: UnitPolicy() for n in (1, 2, 3)}

# One column an event: root, 1, /1, 2, /2, 3, /3, /root; backward root, 3, /3, 2, /2, 1, /1; end.
PINNED = {
    0: " | G1 g1 | F1 | G2 g2 | F2 | G3 g3 | F3 | "
    "| | G3 g3 | F3 R3 | G2 g2 | F2 R2 r3 | G1 g1 | F1 R1 r2 | r1",
    1: "G1 | g1 G2 | F1 | g2 G3 | F2 | g3 | | "
    "| | G2 | F3 R3 | g2 G1 | F2 R2 r3 | g1 | F1 R1 r2 | r1",
    2: "G1 G2 | g1 G3 | F1 | g2 | | g3 | | | | G1 | F3 R3 | | F2 R2 r3 | g1 | F1 R1 r2 | r1",
}
PINNED = {depth: [each.strip() for each in text.split("|")] for depth, text in PINNED.items()}


@pytest.mark.parametrize("depth", PINNED)
def test_ops_of_three_units_are_pinned(depth):
    ops = compile_step(chain(3), POLICIES, Prefetch(depth, depth))
    assert [short(each) for each in ops] == PINNED[depth]


@pytest.mark.parametrize("depth", PINNED)
def test_the_first_step_foresees_backward_and_the_second_replays(depth):
    scheduler = Scheduler(POLICIES, Prefetch(depth, depth))
    first = [short(scheduler.on(event)) for event in chain(3)]
    second = [short(scheduler.on(event)) for event in chain(3)]
    assert first[:8] == PINNED[0][:8]  # the record does not tell yet what follows
    if depth == 0:  # else backward is foreseen, but from its first unit on
        assert first[9:] == PINNED[0][9:]
    assert second == PINNED[depth]
    assert scheduler.idle


def test_without_resharding_units_stay_until_their_backward_is_over():
    policies = {n: UnitPolicy(reshard_after_forward=False) for n in (1, 2)}
    policies[0] = POLICIES[0]
    ops = compile_step(chain(2), policies, Prefetch(1, 1))
    assert [short(each) for each in ops] == (
        ["G1", "g1 G2", "", "g2", "", "", "", "", "F2 R2", "", "F1 R1 r2", "r1"]
    )


def steps_of(count=3, prefetch=Prefetch(1, 1), **policy):  # noqa: B008 - frozen
    policies = {n: UnitPolicy(**policy) for n in range(1, count + 1)} | {0: POLICIES[0]}
    return [short(each) for each in compile_step(chain(count), policies, prefetch)]


def test_a_unit_is_kept_for_a_backward_that_follows_at_once():
    events = [Event(F_BEGIN, 0), Event(F_BEGIN, 1), Event(F_BEGIN, 2), Event(F_END, 2)]
    events += [Event(F_END, 1), Event(F_END, 0)]
    events += [Event(moment, unit) for unit in (0, 1, 2) for moment in (B_BEGIN,)]
    events += [Event(B_END, 2), Event(B_END, 1), END]
    ops = [short(each) for each in compile_step(events, POLICIES, Prefetch(1, 1))]
    assert ops == ["G1", "g1 G2", "g2", "", "", "", "", "", "", "F2 R2", "F1 R1 r2", "r1"]
    recomputed = [*chain(2)[:7], *(Event(m, 2) for m in (F_BEGIN, F_END)), *chain(2)[7:]]
    ops = [short(each) for each in compile_step(recomputed, POLICIES, Prefetch(1, 1))]
    assert ops == ["G1", "g1 G2", "F1", "g2", "", "", "", "G1", "", "", "F2 R2", "g1", *ops[12:]]
    assert compile_step(chain(2), POLICIES, Prefetch(1, 0))[4] == (Op(OpKind.FREE, 2),)


@pytest.mark.parametrize(
    ("second", "prefetch"),
    [
        ({"reshard_after_forward": False}, Prefetch(1, 1)),
        ({"reshard_after_forward": False}, Prefetch(0, 1)),
        ({"unshard_in_backward": False}, Prefetch(0, 2)),
        ({"unshard_in_backward": False}, Prefetch(1, 0, least_bytes=5)),
        ({"prefetch_backward": ()}, Prefetch(2, 2)),
    ],
)
def test_nothing_is_kept_that_backward_would_not_hold_from_its_begin_on(second, prefetch):
    policies = POLICIES | {1: UnitPolicy(full_bytes=10), 2: UnitPolicy(full_bytes=1, **second)}
    ops = compile_step(chain(2), policies, prefetch)
    assert Op(OpKind.FREE, 1) in ops[2]


def test_what_backward_needs_before_is_seen_without_looking_at_the_whole_step():
    class Seen(list):
        looks = 0

        def __getitem__(self, place):
            self.looks += 1
            return super().__getitem__(place)

    events = Seen(chain(200))
    found = [needed_before(events, position, 2) for position in range(len(events))]
    assert found[398:402] == [[0, 200], None, [], []]
    assert events.looks < 8 * len(events)


def test_what_was_kept_for_a_backward_is_freed_if_a_forward_comes():
    scheduler = Scheduler(POLICIES, Prefetch(1, 1))
    for event in chain(2):
        scheduler.on(event)
    again = [*chain(2)[:6], *chain(2)]
    ops = [short(scheduler.on(event)) for event in again]
    assert ops[4:8] == ["", "", "F2 G1", "g1 G2"]


def test_shrunk_units_keep_a_part_from_forward_to_backward():
    ops = steps_of(2, shrunk=True)
    assert ops[:6] == ["G1", "g1 G2", "S1", "g2", "", ""]
    assert " ".join(ops[6:]).split() == ["G1", "F2", "R2", "g1", "F1", "R1", "r2", "r1"]


def test_what_is_shrunk_is_freed_if_no_backward_comes():
    policies = {n: UnitPolicy(shrunk=True) for n in (1, 2)} | {0: POLICIES[0]}
    events = [*chain(2)[:6], END]
    assert short(compile_step(events, policies, Prefetch(0, 0))[-1]) == "F1 F2"


def test_sums_over_replicas_run_beside_the_next_reduce():
    ops = " ".join(steps_of(3, replicated=True)).split()
    sums = [op for op in ops if op[0] in "RAr"]
    assert sums == ["R3", "R2", "A3", "R1", "r3", "A2", "A1", "r2", "r1"]


def test_parameters_may_stay_after_backward():
    ops = " ".join(steps_of(2, reshard_after_backward=False)).split()
    assert [op for op in ops if op[0] == "F"] == ["F1"]  # after forward, but for the last


def test_backward_may_need_no_parameters():
    policies = {n: UnitPolicy() for n in (2, 3)} | {0: POLICIES[0]}
    policies[1] = UnitPolicy(unshard_in_backward=False)
    ops = [short(each) for each in compile_step(chain(3), policies, Prefetch(1, 1))]
    backward = " ".join(ops[8:]).split()
    assert "G1" not in backward
    assert "R1" in backward


def test_lists_of_units_to_gather_ahead():
    policies = {n: UnitPolicy() for n in (1, 2, 3)} | {0: POLICIES[0]}
    policies[1] = UnitPolicy(prefetch_forward=(3, 2))
    policies[2] = UnitPolicy(prefetch_forward=())
    policies[3] = UnitPolicy(prefetch_backward=(2, 1))
    ops = [short(each) for each in compile_step(chain(3), policies, Prefetch(1, 1))]
    assert ops[1] == "g1 G3 G2"
    assert ops[3] == "g2"
    assert ops[9] == "G2 G1"


def test_small_units_are_gathered_ahead_and_reduced_until_there_are_bytes_enough():
    sizes = {1: 1, 2: 1, 3: 1, 4: 4, 5: 1}
    policies = {n: UnitPolicy(full_bytes=size) for n, size in sizes.items()} | {0: POLICIES[0]}
    prefetch = Prefetch(1, 1, least_bytes=3)
    ops = [short(each) for each in compile_step(chain(5), policies, prefetch)]
    assert ops[:4] == ["G1 G2 G3", "g1 G4", "F1", "g2"]
    ends = [each for each in ops if "R" in each]
    assert ends == ["F5 R5", "F4 R4 r5", "F3 R3", "F2 R2", "F1 R1 r4"]


def test_replicated_units_are_only_reduced():
    policies = {n: UnitPolicy(gathered=False) for n in (1, 2)} | {0: POLICIES[0]}
    ops = compile_step(chain(2), policies, Prefetch(1, 1))
    assert [short(each) for each in ops if each] == ["R2", "R1 r2", "r1"]


def test_another_order_falls_back_and_is_recorded_anew():
    scheduler = Scheduler(POLICIES, Prefetch(1, 1))
    for event in chain(3):
        scheduler.on(event)
    swapped = [Event(F_BEGIN, 0), *(Event(m, u) for u in (2, 1, 3) for m in (F_BEGIN, F_END))]
    swapped += [Event(F_END, 0), Event(B_BEGIN, 0)]
    swapped += [*(Event(m, u) for u in (3, 1, 2) for m in (B_BEGIN, B_END)), END]
    fallen = [short(scheduler.on(event)) for event in swapped]
    # 3 used to follow 2, so 1, which had been gathered ahead, makes room for it.
    assert fallen[:7] == ["G1", "G2 g2 g1 F1 G3", "F2", "G1 g1", "F1", "g3", ""]
    assert scheduler.idle
    again = [short(scheduler.on(event)) for event in swapped]
    assert again == [short(ops) for ops in compile_step(swapped, POLICIES, Prefetch(1, 1))]


def run(scheduler, *units):
    """The ops of a step in which these units run, one after the other."""
    forward = [Event(m, u) for u in units for m in (F_BEGIN, F_END)]
    backward = [Event(m, u) for u in reversed(units) for m in (B_BEGIN, B_END)]
    events = [Event(F_BEGIN, 0), *forward, Event(F_END, 0), Event(B_BEGIN, 0), *backward, END]
    return [short(scheduler.on(event)) for event in events]


def of_units(count, **policy):
    return {n: UnitPolicy(**policy) for n in range(1, count + 1)} | {0: POLICIES[0]}


def test_what_used_to_follow_is_gathered_ahead_when_layers_are_dropped():
    scheduler = Scheduler(of_units(5), Prefetch(1, 1))
    for _ in range(2):
        run(scheduler, 1, 2, 3, 4, 5)
    # 2 was gathered ahead in vain and makes room; 5 turns around, as it used to.
    dropped = run(scheduler, 1, 3, 4, 5)
    assert dropped[:5] == ["G1", "g1 G2", "F1", "G3 g3 g2 F2 G4", "F3"]
    assert dropped[5:10] == ["g4 G5", "F4", "g5", "", ""]
    backward = ["", "G4", "F5 R5", "g4 G3", "F4 R4 r5", "g3 G1", "F3 R3 r4", "g1", "F1 R1 r3", "r1"]
    assert dropped[10:] == backward
    back = run(scheduler, 1, 2, 3, 4, 5)
    assert back[1:6] == ["g1 G2", "F1", "g2 G3", "F2", "g3 G4"]  # two of three steps were that
    # What was gathered for the end of forward in vain is gone as soon as backward begins.
    last_dropped = run(scheduler, 1, 2, 3, 4)
    assert last_dropped[7:11] == ["g4 G5", "F4", "", "g5 F5 G4"]


def test_without_a_majority_nothing_is_foreseen():
    scheduler = Scheduler(of_units(4), Prefetch(1, 1))
    for order in ((1, 2, 3, 4), (3, 1, 4, 2), (4, 3, 2, 1)):
        run(scheduler, *order)
    # 4 is what the step before began with: it stays until its turn, as nobody needs its place.
    assert run(scheduler, 2, 1, 3, 4)[:8] == [
        "G4",
        "G2 g2",
        "F2",
        "G1 g1",
        "F1",
        "G3 g3",
        "F3",
        "g4",
    ]


def test_gathers_that_nobody_foresaw_begin_before_the_unit_before_is_freed():
    bound = []

    def bind_early(op):
        bound.extend([op] if op.kind is OpKind.GATHER else [])
        return op

    scheduler = Scheduler(of_units(4), Prefetch(1, 1), bind_early=bind_early)
    for _ in range(2):
        run(scheduler, 1, 2, 3, 4)
    assert bound == []  # not in the first step, nor in one that is replayed
    swapped = run(scheduler, 1, 3, 2, 4)
    # 2 was foreseen and stays for once; then 4 is gathered ahead and not 3, which has run.
    assert swapped[:5] == ["G1", "g1 G2", "F1", "G3 g3", ""]
    assert swapped[5:10] == ["g2 F3 G4", "", "g4 F2", "", ""]
    # At the turnaround two are gathered ahead; what comes after a backward waits as usual.
    assert swapped[10:14] == ["G2", "G3", "F4 R4", "g2"]
    assert bound == [Op(OpKind.GATHER, unit) for unit in (3, 4, 2, 3)]
    bound.clear()
    # Nobody knows which unit is the last: each stays until another one begins.
    # What was foreseen, and has been passed over once, makes room for what used to follow.
    assert run(scheduler, 4, 2)[:5] == ["G1", "G4 g4", "", "G2 g2 F4 g1 F1 G3", ""]
    assert bound == [Op(OpKind.GATHER, unit) for unit in (4, 2, 3, 4)]


def test_two_models_in_turn_are_each_foreseen():
    scheduler = Scheduler(of_units(6), Prefetch(1, 1))
    for _ in range(2):
        run(scheduler, 1, 2, 3)
        run(scheduler, 4, 5, 6)
    first = run(scheduler, 1, 2, 3)
    assert first[:7] == ["G1", "g1 G2", "F1", "g2 G3", "F2", "g3", ""]
    second = run(scheduler, 4, 5, 6)
    assert second[:7] == ["G4", "g4 G5", "F4", "g5 G6", "F5", "g6", ""]


def test_what_was_gathered_ahead_in_vain_is_freed_at_the_end():
    scheduler = Scheduler(POLICIES, Prefetch(1, 1))
    for event in chain(3):
        scheduler.on(event)
    cut = [Event(F_BEGIN, 0), Event(F_BEGIN, 1), Event(F_END, 1), Event(F_END, 0), END]
    assert [short(scheduler.on(event)) for event in cut] == ["G1", "g1 G2", "F1", "", "g2 F2"]


def test_a_unit_called_twice_is_gathered_for_each_forward():
    calls = [Event(m, 1) for _ in range(2) for m in (F_BEGIN, F_END)]
    ops = compile_step([*calls, *chain(1)[-3:]], {1: UnitPolicy()}, Prefetch(1, 1))
    assert [short(each) for each in ops] == ["G1 g1", "F1", "G1 g1", "", "", "F1 R1", "r1"]


def test_recomputation_does_not_free_what_backward_needs_next():
    events = [Event(B_BEGIN, 0), Event(F_BEGIN, 1), Event(F_END, 1), Event(B_BEGIN, 1)]
    events += [Event(B_END, 1), END]
    ops = compile_step(events, POLICIES, Prefetch(0, 0))
    assert [short(each) for each in ops] == ["", "G1 g1", "", "", "F1 R1", "r1"]


def test_bad_input():
    with pytest.raises(ConfigurationError, match="forward must be a whole number of at least 0"):
        Prefetch(forward=-1)
    with pytest.raises(UsageError, match="unit 7 is not known"):
        Scheduler(POLICIES, Prefetch()).on(Event(F_BEGIN, 7))


# ---- laws -------------------------------------------------------------------------------------


@st.composite
def steps(draw):
    """Random trees of units run in a random order, some twice: their events and policies."""
    count = draw(st.integers(1, 7))
    policies = {
        unit: UnitPolicy(
            gathered=draw(st.booleans()) or unit > 2,
            reduced=draw(st.booleans()),
            reshard_after_forward=draw(st.booleans()) and unit > 0,
            full_bytes=draw(st.integers(0, 4)),
        )
        for unit in range(count)
    }
    return tree(draw, draw(st.permutations(range(count)))), policies


def tree(draw, order):
    """The events of a step in which ``order`` runs, some units within others."""
    forward, backward = [], []

    def visit(units):
        if not units:
            return
        unit, rest = units[0], units[1:]
        cut = draw(st.integers(0, len(rest)))
        forward.append(Event(F_BEGIN, unit))
        end_of_backward = Event(B_END, unit)
        backward.insert(0, end_of_backward)
        visit(rest[:cut])
        forward.append(Event(F_END, unit))
        backward.insert(0, Event(B_BEGIN, unit))
        visit(rest[cut:])

    visit(order)
    return [*forward, *backward, END]


prefetches = st.builds(
    Prefetch, st.integers(0, 3), st.integers(0, 3), st.integers(1, 2), st.sampled_from((0, 5))
)


def check_ops(events, ops_by_event, policies, prefetch, early=0):
    """Carry the ops out on a model of the units and check every law on the way.

    So many units more may be held because gathers begin ``early``.
    """
    gathering, full, reducing, open_units = set(), set(), [], []
    gathers, frees, turning = [], [], set()
    for event, ops in zip(events, ops_by_event, strict=True):
        begins = event.moment in (F_BEGIN, B_BEGIN)
        if begins:
            open_units.append(event.unit)
        elif event.moment in (F_END, B_END):
            open_units.remove(event.unit)
        if event.moment is F_BEGIN:
            # All of them full: some may be kept for their backward, nested ones together, and those
            # of the unit before stay while gathers begin early.
            turning = set(open_units) | (turning if early else set())
        elif event.moment is B_END:
            turning = set()
        for kind, unit in ops:
            if kind is OpKind.GATHER:
                assert unit not in gathering | full
                gathering.add(unit)
                gathers.append(unit)
            elif kind is OpKind.AWAIT_GATHER:
                assert unit in gathering
                gathering.remove(unit)
                full.add(unit)
            elif kind is OpKind.FREE:
                assert unit in full
                full.remove(unit)
                frees.append(unit)
            elif kind is OpKind.REDUCE:
                assert unit not in reducing
                reducing.append(unit)
            else:
                reducing.remove(unit)
            kept = {u for u, policy in policies.items() if not policy.reshard_after_forward}
            others = (gathering | full) - kept - turning - set(open_units)
            extra = sorted(policies[u].full_bytes for u in others)
            if sum(extra[: -1 - early]) >= prefetch.least_bytes:
                assert len(extra) <= max(prefetch.forward, prefetch.backward) + early
        if event.moment is F_BEGIN:
            turning = set(open_units)
        in_flight = sum(policies[unit].full_bytes for unit in reducing[1:])
        if in_flight >= prefetch.least_bytes:
            assert len(reducing) <= prefetch.reduces_in_flight
        if begins and policies[event.unit].gathered:
            assert event.unit in full, "a unit in use must be full"
    assert sorted(gathers) == sorted(frees), "every gather has one free"
    assert not gathering
    assert not full
    assert not reducing


@given(steps(), prefetches)
def test_laws_hold_for_compiled_steps(step, prefetch):
    events, policies = step
    check_ops(events, compile_step(events, policies, prefetch), policies, prefetch)


@given(steps(), prefetches, st.data())
def test_laws_hold_on_demand_in_replay_and_after_a_cut(step, prefetch, data):
    events, policies = step
    scheduler = Scheduler(policies, prefetch)
    whole = [scheduler.on(event) for event in events]
    check_ops(events, whole, policies, prefetch)
    replayed = [tuple(scheduler.on(event)) for event in events]
    assert replayed == list(compile_step(events, policies, prefetch))
    cut = [*events[: data.draw(st.integers(1, len(events) - 1))], END]
    check_ops(cut, [scheduler.on(event) for event in cut], policies, prefetch)
    assert scheduler.idle


@st.composite
def changing(draw):
    """Steps over the same units, each of some of them, nested and in an order of its own."""
    first, policies = draw(steps())
    units = sorted(policies)
    several = [first]
    for _ in range(draw(st.integers(1, 5))):
        chosen = draw(st.permutations(units))[: draw(st.integers(1, len(units)))]
        several.append(
            draw(st.sampled_from(several)) if draw(st.booleans()) else tree(draw, chosen)
        )
    return several, policies


@given(changing(), prefetches)
def test_laws_hold_in_whatever_order_units_run(changing, prefetch):
    """No step gathers more ahead than it may, none ends with what it cannot free."""
    several, policies = changing
    scheduler, other = Scheduler(policies, prefetch), Scheduler(policies, prefetch)
    for events in several:
        ops = [scheduler.on(event) for event in events]
        check_ops(events, ops, policies, prefetch)
        assert ops == [other.on(event) for event in events], "ranks differ"


@given(changing(), prefetches)
def test_early_gathers_take_one_unit_more_in_steps_that_leave_their_record(changing, prefetch):
    several, policies = changing
    schedulers = [Scheduler(policies, prefetch, bind_early=lambda op: op) for _ in range(2)]
    for events in several:
        ops, same = ([each.on(event) for event in events] for each in schedulers)
        check_ops(events, ops, policies, prefetch, early=1)
        assert ops == same, "ranks differ"


def most_held(events, policies, prefetch):
    """The most bytes of full parameters, and of them with the gradients of what is in backward."""
    held, filled, most = set(), set(), [0, 0]
    for event, ops in zip(events, compile_step(events, policies, prefetch), strict=True):
        for kind, unit in ops:
            change = {OpKind.GATHER: held.add, OpKind.FREE: held.discard}.get(kind)
            if change is not None:
                change(unit)
            if kind is OpKind.AWAIT_REDUCE:
                filled.discard(unit)
            full = sum(policies[each].full_bytes for each in held)
            grads = sum(policies[each].full_bytes for each in filled)
            most = [max(most[0], full), max(most[1], full + grads)]
        if event.moment is B_BEGIN and policies[event.unit].reduced:
            filled.add(event.unit)
            most[1] = max(most[1], sum(policies[each].full_bytes for each in [*held, *filled]))
    return most


@given(steps(), prefetches)
def test_keeping_units_for_their_backward_raises_no_peak(step, prefetch):
    events, policies = step
    kept = most_held(events, policies, prefetch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "needed_before", lambda events, position, most: None)
        freed = most_held(events, policies, prefetch)
    assert kept[0] <= freed[0]
    assert kept[1] <= freed[1]


@given(steps(), prefetches)
def test_each_trainable_unit_is_reduced_once(step, prefetch):
    events, policies = step
    ops = [op for each in compile_step(events, policies, prefetch) for op in each]
    for unit, policy in policies.items():
        assert ops.count(Op(OpKind.REDUCE, unit)) == policy.reduced
        assert ops.count(Op(OpKind.AWAIT_REDUCE, unit)) == policy.reduced


@pytest.mark.parametrize(
    ("choices", "setting", "value"),
    [
        ({}, "reshard_after_forward", True),
        ({"root": True}, "reshard_after_forward", False),
        ({"root": True, "reshard_after_forward": True}, "reshard_after_forward", True),
        ({"reshard_after_forward": False}, "reshard_after_forward", False),
        ({}, "gathered", True),
        ({"resident": True}, "gathered", False),
        ({"params": ()}, "gathered", False),
        ({}, "replicated", False),
        ({"replicas": 2}, "replicated", True),
        ({"replicas": 2, "shards": 1}, "replicated", False),
        ({}, "widened", False),
        ({"precision": Precision("bfloat16", "float32")}, "widened", True),
        ({"precision": Precision("bfloat16", "float32"), "on_cpu": True}, "widened", False),
    ],
)
def test_a_units_policy_follows_from_its_layout(choices, setting, value):
    choices = dict(choices)
    params = choices.pop("params", (ParamSpec("weight", (64, 64), "float32"),))
    precision = choices.pop("precision", Precision())
    layout = lay_out(params, choices.pop("shards", 4), precision, "element")
    unset = {"root": False, "resident": False, "reduced": True, "reshard_after_forward": None}
    policy = unit_policy(layout, **{**unset, "replicas": 1, "on_cpu": False, **choices})
    assert getattr(policy, setting) is value
    assert policy.full_bytes == layout.full_bytes
