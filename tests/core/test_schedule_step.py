# SPDX-License-Identifier: Apache-2.0
"""The machine of a step: its laws for random models, whose autograd is imitated here."""

import gc
import weakref
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import example, given, reject
from hypothesis import strategies as st

from fullshard.core.errors import UsageError
from fullshard.core.schedule import Moment, OpKind, Scheduler, UnitPolicy
from fullshard.core.schedule.step import StepMachine
from fullshard.core.schedule.unit_step import _MOVES, Phase, UnitCall, UnitStep
from fullshard.core.strategy import Prefetch

MOVES = sorted({move for move, _ in _MOVES})
BEGINS = (Moment.FORWARD_BEGIN, Moment.BACKWARD_BEGIN)
TASK = 7


def at_rest(trained=()):
    return UnitStep(set(trained), set)


# ---- the record of one unit ---------------------------------------------------------------------


@given(st.lists(st.sampled_from(MOVES), max_size=12))
def test_only_legal_moves_change_the_phase(moves):
    step = at_rest()
    for move in moves:
        before = step.phase
        if (move, before) in _MOVES:
            step.move(move)
            assert step.phase is _MOVES[move, before]
        else:
            with pytest.raises(UsageError, match=f"cannot {move} while it is {before.text}"):
                step.move(move)
            assert step.phase is before


def test_every_phase_can_end_and_be_left():
    for phase in Phase:
        assert _MOVES["end backward", phase] is Phase.AT_REST
        assert any(before is phase and after is not phase for (_, before), after in _MOVES.items())


def test_a_forgotten_step_is_at_rest_from_every_phase():
    for phase in Phase:
        step = at_rest()
        step.phase, step.running, step.begun, step.held_back = phase, 2, True, True
        step.forget()
        assert (step.phase, step.running, step.begun) == (Phase.AT_REST, 0, False)
        assert not step.held_back


def test_calls_are_those_that_live_in_order():
    step = at_rest()
    first, second, third = (UnitCall(step, None, (made_in, 0)) for made_in in (1, 2, 1))
    for call in (first, second, third):
        call.await_backward()
    assert step.calls() == [first, second, third]
    assert step.calls({1}) == [first, third]
    step.forget_call(first)
    assert not step.awaits(first)
    assert step.awaits(third)
    del second, call
    gc.collect()
    assert step.calls() == [third]
    assert len(step._calls) == 1  # or every evaluation would leave one behind


def test_first_and_last_forward_are_told_apart():
    step = at_rest()
    step.run_forward(3)
    step.run_forward(7)
    assert (step.first_begin, step.last_begin) == (3, 7)


# ---- random models ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """One call of a unit's module, with the calls that its forward makes, and how it is made.

    "run" is ``x = f(x)``, "residual" ``x = x + f(x)``, "constant" ``x = x + f(1)``; "thrown" is
    ``f(x)`` alone, "recomputed" a checkpoint without reentrance. The output of "dropped" is kept,
    and in the loss of rank 0 alone.
    """

    unit: int
    way: str
    own_last: bool
    calls: tuple["Node", ...] = ()


USED = ["run", "run", "residual", "recomputed", "constant"]
WAYS = [*USED, "thrown", "dropped"]


def nodes(units, ways):
    leaves = st.builds(Node, units, st.sampled_from(ways), st.booleans())
    return st.recursive(
        leaves,
        lambda below: st.builds(
            Node,
            units,
            st.sampled_from(ways),
            st.booleans(),
            st.lists(below, max_size=3).map(tuple),
        ),
        max_leaves=8,
    )


UNITS = st.integers(1, 5)


def models(units=UNITS, ways=WAYS):
    roots = st.builds(
        Node,
        st.just(0),
        st.just("run"),
        st.booleans(),
        st.lists(nodes(units, ways), min_size=1, max_size=4).map(tuple),
    )
    # A unit that calls itself hears of the outermost call alone.
    return roots.filter(lambda root: not _calls_itself(root, ()))


def _calls_itself(node, around):
    return node.unit in around or any(_calls_itself(c, (*around, node.unit)) for c in node.calls)


class Training:
    """Runs steps of a model, and checks what the machine says when it says it.

    Each unit has parameter 0, which its forward uses, and parameter 1, which nobody uses.
    """

    def __init__(self, model, rank=0, frozen=(), input_needs_grad=False):
        self.model, self.rank, self.input_needs_grad = model, rank, input_needs_grad
        count = 1 + max(each.unit for each in self._all(model))
        self.units = [
            UnitStep(set() if unit in frozen else {0, 1}, lambda unit=unit: self._absent(unit))
            for unit in range(count)
        ]
        self.machine = StepMachine(self.units)
        self.events = []
        self.used = Counter()
        self.task = TASK

    def _all(self, node):
        yield node
        for call in node.calls:
            yield from self._all(call)

    def _absent(self, unit):
        absent = {1} if unit in self.used else {0, 1}
        return absent & self.units[unit].trained

    def step(self):
        """One forward and backward; returns its events."""
        self.events, self.calls, self.again = [], {}, []
        self.machine.root_begins()
        self.forward(self.model, self.input_needs_grad, ())
        self.used = Counter(self._uses(self.model, ()))
        self.to_come = Counter(self.used)
        if not self.calls[()].leads_back:
            reject()  # nobody calls backward
        self.backward(self.model, ())
        self.events += self.machine.backward_ends(self.task)
        return self.events

    def reaches(self, node, place):
        if node.way == "thrown" or (node.way == "dropped" and self.rank):
            return False
        return place in self.calls and self.calls[place].leads_back

    def _uses(self, node, place):
        if self.units[node.unit].trained and self.reaches(node, place):
            yield node.unit
        for number, call in enumerate(node.calls):
            if self.reaches(node, place):
                yield from self._uses(call, (*place, number))

    def forward(self, node, needs_grad, place, again=False):
        """Returns True if the output needs a gradient."""
        unit = self.units[node.unit]
        self.events.append(self.machine.forward_begins(unit, with_grad=not again))
        call = self.machine.new_call(unit, UnitCall)
        needs_grad = call.watched = needs_grad and node.way != "constant"
        trained = bool(unit.trained)
        inner = needs_grad or (trained and not node.own_last)
        for number, below in enumerate(node.calls):
            led = self.forward(below, inner, (*place, number), again)
            inner = inner or (led and below.way != "thrown")
        inner = inner or trained
        if inner:
            call.await_backward()
        self.events.append(self.machine.forward_ends(unit))
        if again:
            self.again.append(call)  # until its unit's backward needs it no more
        elif node.way != "thrown" or call.watched:
            self.calls[place] = call
        return inner

    def hear(self, events):
        self.events += events

    def backward(self, node, place):
        call, unit = self.calls[place], self.units[node.unit]
        for begun in self.machine.begun_by(call, self.task):
            self.hear(self.machine.call_begins(begun, self.task))
        assert unit.phase.open, "backward runs in a unit that is not full"
        if node.way == "recomputed":
            self.forward(node, bool(call.watched), place, again=True)
            self.again.clear()
        if node.own_last:
            self.accumulate(node)
        for number, below in reversed(list(enumerate(node.calls))):
            if self.reaches(below, (*place, number)):
                self.backward(below, (*place, number))
            elif (*place, number) in self.calls and self.calls[*place, number].watched:
                self.hear(self.machine.input_arrives(self.calls[*place, number], self.task))
        if not node.own_last:
            self.accumulate(node)
        if call.watched:
            assert unit.phase.open, "a unit's parameters are gone before its inputs' gradients"
            self.hear(self.machine.input_arrives(call, self.task))

    def accumulate(self, node):
        unit = self.units[node.unit]
        if not unit.trained:
            return
        self.to_come[node.unit] -= 1
        if not self.to_come[node.unit]:
            assert unit.phase.open, "a gradient comes after its unit was reduced"
            self.hear(self.machine.gradient_arrives(unit, 0, self.task))


def ends(events):
    return [unit for moment, unit in events if moment is Moment.BACKWARD_END]


def check_steps(training):
    """Run two steps; the gradients of every unit used are reduced once, when all are there."""
    for _ in range(2):
        events = training.step()
        reduced = Counter(ends(events))
        assert set(training.used) <= set(reduced)
        assert set(reduced.values()) <= {1}
        assert all(unit.phase is Phase.AT_REST for unit in training.units)
        running = Counter()
        for moment, unit in events:
            running[unit] += 0 if moment is Moment.STEP_END else 1 if moment in BEGINS else -1
            assert running[unit] >= 0
        assert not +running


SETS = st.sets(st.integers(0, 5))
SHARED_BY_A_RECOMPUTED_PART = Node(
    0,
    "run",
    True,
    (Node(2, "recomputed", True, (Node(1, "thrown", True),)), Node(1, "run", True)),
)


@given(models(), SETS, st.booleans())
@example(SHARED_BY_A_RECOMPUTED_PART, set(), False)
def test_every_unit_used_is_reduced_once_when_all_its_gradients_are_there(model, frozen, needs):
    check_steps(Training(model, frozen=frozen, input_needs_grad=needs))


@given(models(), SETS, st.booleans())
def test_ranks_that_do_not_use_a_unit_keep_the_order_of_those_that_do(model, frozen, needs):
    here, there = (Training(model, rank, frozen, needs) for rank in (0, 1))
    for _ in range(2):
        assert ends(here.step()) == ends(there.step())


@given(models(), SETS, st.booleans(), st.integers(0, 2), st.integers(0, 2))
def test_what_is_told_makes_a_legal_schedule(model, frozen, needs, forward, backward):
    """Units are full while they run, and reduced when their backward is over."""
    training = Training(model, frozen=frozen, input_needs_grad=needs)
    policies = {
        number: UnitPolicy(reduced=bool(unit.trained)) for number, unit in enumerate(training.units)
    }
    scheduler = Scheduler(policies, Prefetch(forward, backward))
    for _ in range(3):
        full, reduced = set(), Counter()
        for event in training.step():
            for kind, unit in scheduler.on(event):
                if kind is OpKind.AWAIT_GATHER:
                    full.add(unit)
                elif kind is OpKind.FREE:
                    full.discard(unit)
                elif kind is OpKind.REDUCE:
                    reduced[unit] += 1
            assert event.moment not in BEGINS or event.unit in full
        assert not full
        assert scheduler.idle
        assert reduced == Counter(n for n in ends(training.events) if training.units[n].trained)


def test_gradients_held_back_are_reduced_by_the_backward_that_syncs():
    training = Training(Node(0, "run", False, (Node(1, "run", False), Node(2, "thrown", False))))
    for unit in training.units:
        unit.requires_gradient_sync = False
    training.step()
    assert [unit.held_back for unit in training.units] == [True, True, True]
    for unit in training.units:
        unit.requires_gradient_sync = True
    assert set(ends(training.step())) == {0, 1, 2}
    assert not any(unit.held_back for unit in training.units)


def test_units_and_calls_live_as_long_as_the_feeder_keeps_them():
    training = Training(Node(0, "run", False, (Node(1, "run", False),)))
    training.step()
    unit = weakref.ref(training.units.pop())
    training.calls.clear()
    gc.collect()
    assert unit() is None
    assert training.machine._alive() == training.units
