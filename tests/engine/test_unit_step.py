# SPDX-License-Identifier: Apache-2.0
"""A unit's record of the step: phases, legal moves, calls; and the names of units in profiles."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fullshard.core.errors import UsageError
from fullshard.testing import LocalWorld
from fullshard.torch import fully_shard
from fullshard.torch.step.unit_step import _MOVES, Phase, UnitStep

MOVES = sorted({what for what, _ in _MOVES})


@given(st.lists(st.sampled_from(MOVES), max_size=12))
def test_only_legal_moves_change_the_phase(moves):
    step = UnitStep()
    for what in moves:
        before = step.phase
        if (what, before) in _MOVES:
            step.move(what)
            assert step.phase is _MOVES[what, before]
        else:
            with pytest.raises(UsageError, match=f"cannot {what} while it is {before.text}"):
                step.move(what)
            assert step.phase is before


def test_every_phase_can_end_and_be_left():
    for phase in Phase:
        assert _MOVES["end backward", phase] is Phase.AT_REST
        assert any(before is phase and after is not phase for (_, before), after in _MOVES.items())


def test_a_backward_opens_once():
    step = UnitStep()
    step.run_forward(1)
    step.begin_backward()
    with pytest.raises(UsageError, match="cannot begin backward while it is in backward"):
        step.begin_backward()


def test_a_forgotten_step_is_at_rest_from_every_phase():
    for phase in Phase:
        step = UnitStep()
        step.phase, step.running, step.begun, step.held_back = phase, 2, True, True
        step.forget()
        assert (step.phase, step.running, step.begun) == (Phase.AT_REST, 0, False)
        assert not step.held_back


class _Call:
    def __init__(self, made_in):
        self.made_in = made_in


def test_calls_are_those_that_live_in_order():
    step = UnitStep()
    first, second, third = _Call(1), _Call(2), _Call(1)
    for call in (first, second, third):
        step.add_call(call)
    assert step.calls() == [first, second, third]
    assert step.calls({1}) == [first, third]
    step.forget_call(first)
    assert not step.awaits(first)
    assert step.awaits(third)
    del second, call
    gc.collect()
    assert step.calls() == [third]


def test_first_and_last_forward_are_told_apart():
    step = UnitStep()
    step.run_forward(3)
    step.run_forward(7)
    assert (step.first_begin, step.last_begin) == (3, 7)


def _profiled_names(comm):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, mesh=comm)
    fully_shard(model, mesh=comm)
    x = torch.ones(2, 4)
    model(x).sum().backward()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as profile:
        model(x).sum().backward()
    return {event.name for event in profile.events() if event.name.startswith("fullshard: ")}


def test_a_profile_shows_units_by_name():
    names = LocalWorld(1).run(_profiled_names)[0]
    for unit in ("0", "1"):
        assert {f"fullshard: forward {unit}", f"fullshard: backward {unit}"} <= names


def _profile_of_two_ranks(comm):
    return _profiled_names(comm) if comm.rank == 0 else _without_profile(comm)


def _without_profile(comm):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, mesh=comm)
    fully_shard(model, mesh=comm)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    return set()


def test_a_profile_shows_gathers_and_reduces_by_unit():
    names = LocalWorld(2).run(_profile_of_two_ranks)[0]
    for what in ("gather", "forward", "backward", "reduce"):
        assert {f"fullshard: {what} 0", f"fullshard: {what} 1"} <= names
