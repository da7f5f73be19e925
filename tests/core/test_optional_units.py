# SPDX-License-Identifier: Apache-2.0
"""Units that ranks may leave out: all ranks see one order of events, whoever runs what."""

from collections import Counter

from hypothesis import assume, given
from hypothesis import strategies as st

from fullshard.core.schedule import Moment, OpKind
from fullshard.core.schedule.unit_step import Phase, UnitCall

from .test_schedule_step import Training, ends, models

RANKS = 3
BACKWARDS = ([[0]], [[0]], [[1, 0]], [[0], [1]], [[1], [0]], [[0], [2], [1]])
COLLECTIVES = (OpKind.GATHER, OpKind.REDUCE)


class Rank(Training):
    """Runs the calls that its rank runs, and takes part in those of others.

    ``runs`` gives for each forward, and for the place of a call, the ranks that run it; a place
    that is not there is one of a unit that all run. ``backwards`` are the forwards whose losses
    are added for each backward, the latest first.
    """

    def __init__(self, model, rank, runs, backwards, frozen, needs, *, unused=True):
        super().__init__(model, 0, frozen, needs)
        for unit in self.units:  # without parameter 1, which nobody uses
            unit.trained -= set() if unused else {1}
        self.me, self.all_runs, self.backwards = rank, runs, backwards
        self.optional = {node.unit for node, place in walk(model) if place in runs[0]}
        self.machine.partial = True
        for number, unit in enumerate(self.units):
            unit.optional, unit.partial = number in self.optional, number > 0

    def step_with(self, others):
        """Yields what others must know; see `together`."""
        self.events, self.again, graphs = [], [], []
        for runs in self.all_runs:
            self.runs, self.calls = runs, {}
            self.machine.root_begins()
            yield from self.forward_with(self.model, self.input_needs_grad, (), here=True)
            graphs.append(self.calls)
        for task, forwards in enumerate(self.backwards):
            self.task, begin = task, len(self.events)
            self._backward_of([graphs[forward] for forward in forwards])
            for forward in forwards:
                graphs[forward] = self.calls = None
            reduced = Counter(ends(self.events[begin:]))
            assert set(self.used) <= set(reduced)
            assert max(reduced.values(), default=0) <= len(forwards)

    def _backward_of(self, graphs):
        self.used.clear()
        for calls in graphs:
            self.calls = calls
            self.used.update(self._uses(self.model, ()))
        self.to_come = self.used.copy()
        for calls in graphs:
            self.calls = calls
            if calls[()].leads_back:
                self.backward(self.model, ())
        self.events += self.machine.backward_ends(self.task)

    def forward_with(self, node, needs_grad, place, here):
        unit = self.units[node.unit]
        here = here and self.me in self.runs.get(place, {self.me})
        self.events.append(self.machine.forward_begins(unit, with_grad=True))
        call = self.machine.new_call(unit, UnitCall) if here else None
        needs_grad = needs_grad and node.way != "constant"
        trained = bool(unit.trained)
        inner = here and (needs_grad or (trained and not node.own_last))
        if call is not None:
            call.watched = needs_grad
        for number, below in enumerate(node.calls):
            at = (*place, number)
            if self.runs.get(at, {self.me}):
                led = yield from self.forward_with(below, inner, at, here)
                inner = inner or (led and below.way != "thrown")
        inner = here and (inner or trained)
        if not place:
            inner = (yield from self.settle()) or inner
        if inner:
            call.await_backward()
        self.events.append(self.machine.forward_ends(unit))
        if here and (node.way != "thrown" or call.watched):
            self.calls[place] = call
        return inner

    def settle(self):
        """Returns True if the backward of any unit may come on any rank."""
        any_leads = False
        for unit in self.units[1:]:
            leads = yield self.machine.leads_back(unit)
            self.machine.settle(unit, leads_back=leads)
            any_leads = any_leads or leads
        return any_leads


def walk(node, place=()):
    yield node, place
    for number, call in enumerate(node.calls):
        yield from walk(call, (*place, number))


def together(ranks):
    """One step of all ranks; what one tells, all know."""
    steps = [rank.step_with(ranks) for rank in ranks]
    told = [next(step, None) for step in steps]
    while any(each is not None for each in told):
        assert None not in told, "ranks ask each other at different places"
        known = any(told)
        told = [_send(step, known) for step in steps]
    return [rank.events for rank in ranks]


def _send(step, known):
    try:
        return step.send(known)
    except StopIteration:
        return None


@st.composite
def worlds(draw):
    """A model, and who runs what: some units are optional, with all that they call."""
    model = draw(models(ways=["run", "residual", "constant", "thrown", "dropped"]))
    marked = draw(st.sets(st.integers(1, 5), min_size=1))
    inside = {}
    for node, place in walk(model):
        if any(inside.get(place[:depth]) for depth in range(len(place))) or node.unit in marked:
            inside[place] = True
    marked = {node.unit for node, place in walk(model) if inside.get(place)}
    # A unit that is optional somewhere is optional everywhere, and so is all below it.
    for _ in range(5):
        for node, place in walk(model):
            above = [place[:depth] for depth in range(len(place) + 1)]
            if node.unit in marked or any(inside.get(each) for each in above):
                inside[place] = True
                marked.add(node.unit)
    assume(marked and 0 not in marked)
    backwards = draw(st.sampled_from(BACKWARDS))
    runs = [{} for _ in range(sum(map(len, backwards)))]
    for of_forward in runs:
        for _, place in walk(model):
            if inside.get(place):
                around = of_forward.get(place[:-1], set(range(RANKS)))
                of_forward[place] = draw(st.sets(st.integers(0, RANKS - 1))) & around
    return model, runs, backwards


SETS = st.sets(st.integers(0, 5))


def steps_of(world, frozen, needs, *, unused):
    """Two steps, each as the ranks and their events."""
    ranks = [Rank(world[0], r, *world[1:], frozen, needs, unused=unused) for r in range(RANKS)]
    for _ in range(2):
        yield ranks, together(ranks)


@given(worlds(), SETS, st.booleans())
def test_all_ranks_see_the_same_events_whoever_runs_an_optional_unit(world, frozen, needs):
    for ranks, (first, *others) in steps_of(world, frozen, needs, unused=False):
        for events in others:
            assert events == first
        for rank in ranks:
            for unit in rank.units:
                assert unit.phase is Phase.AT_REST
                assert not unit.stand_ins


@given(worlds(), SETS, st.booleans())
def test_parameters_without_gradients_change_no_order_of_gathers_or_reduces(world, frozen, needs):
    for _, (first, *others) in steps_of(world, frozen, needs, unused=True):
        for events in others:
            for kind in ({Moment.FORWARD_BEGIN, Moment.BACKWARD_BEGIN}, {Moment.BACKWARD_END}):
                assert of_kind(events, kind) == of_kind(first, kind)


def of_kind(events, moments):
    return [event for event in events if event.moment in moments]
