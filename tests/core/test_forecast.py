# SPDX-License-Identifier: Apache-2.0
"""A step's cost by hand; that the engine really costs so is tested in tests/engine."""

from fullshard.core.forecast import HeldUnits, Sent, UnitCost, forecast, step_events
from fullshard.core.schedule import Event, Moment, UnitPolicy
from fullshard.core.schedule.rules import Op, OpKind
from fullshard.core.strategy import Prefetch

FB, FE = Moment.FORWARD_BEGIN, Moment.FORWARD_END
BB, BE = Moment.BACKWARD_BEGIN, Moment.BACKWARD_END


def as_pairs(events):
    return [(moment, unit) for moment, unit in events[:-1]]


def test_backward_is_forward_in_reverse():
    events = step_events([None, 0, 0], [True, True, True])
    forward = [(FB, 0), (FB, 1), (FE, 1), (FB, 2), (FE, 2), (FE, 0)]
    backward = [(BB, 0), (BB, 2), (BE, 2), (BB, 1), (BE, 1), (BE, 0)]
    assert as_pairs(events) == forward + backward
    assert events[-1] == Event(Moment.STEP_END)


def test_nothing_asks_for_gradients_before_the_first_trained_unit():
    events = as_pairs(step_events([None, 0, 0, 0], [False, False, True, False]))
    assert [unit for moment, unit in events if moment is BB] == [0, 3, 2]
    untrained = as_pairs(step_events([None, 0], [False, False]))
    assert all(moment in (FB, FE) for moment, _ in untrained)


def test_three_units_by_hand():
    costs = {n: UnitCost(100, 50, gather_bytes=75, reduce_bytes=40) for n in range(3)}
    policies = {n: UnitPolicy() for n in range(3)}
    events = step_events([None] * 3, [True] * 3)
    found = forecast(events, policies, costs, Prefetch())
    assert [found.sent[n] for n in range(2)] == [Sent(75, 75, 40, 0)] * 2
    assert found.sent[2] == Sent(75, 0, 40, 0)  # its backward follows its forward
    # two units full, the gradients of one, and those of the one whose reduce is under way
    assert found.peak_bytes == 2 * 100 + 2 * 50
    kept = {n: UnitPolicy(reshard_after_forward=False) for n in range(3)}
    found = forecast(events, kept, costs, Prefetch())
    assert all(sent == Sent(75, 0, 40, 0) for sent in found.sent.values())
    assert found.peak_bytes == 3 * 100 + 50
    held_back = {n: UnitPolicy(reduced=False) for n in range(3)}
    found = forecast(events, held_back, costs, Prefetch(0, 0))
    assert all(sent == Sent(75, 75) for sent in found.sent.values())
    assert found.peak_bytes == 100 + 3 * 50


def test_a_shrunk_unit_gathers_from_its_part():
    cost = UnitCost(100, 0, part_bytes=25, gather_bytes=90, part_gather_bytes=30)
    policies = {n: UnitPolicy(shrunk=True, reduced=False) for n in range(2)}
    events = step_events([None, None], [True, True])
    found = forecast(events, policies, {0: cost, 1: cost}, Prefetch(0, 0))
    assert found.sent == {0: Sent(90, 30), 1: Sent(90, 30)}
    assert found.peak_bytes == 100 + 25 + 25  # the part is there until its gather is
    held = HeldUnits({0: cost})
    shrunk, buffers = [OpKind.GATHER, OpKind.AWAIT_GATHER, OpKind.SHRINK], []
    for kind in [*shrunk, *shrunk, OpKind.FREE]:
        held.carry_out(Op(kind, 0))
        buffers.append(held.buffers)
    assert buffers == [100, 100, 25, 125, 100, 25, 0]  # it goes, too, if nobody gathers from it
