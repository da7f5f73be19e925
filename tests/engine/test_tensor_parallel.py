# SPDX-License-Identifier: Apache-2.0
"""Parameters that are DTensors along a tensor axis, sharded over the other axis of a mesh."""

import itertools
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from support.tensor_parallel_workers import (
    MAX_NORM,
    PLANS,
    batches,
    loss_of,
    refusals,
    state_dicts,
    thawed,
    train,
    values,
    whole,
)
from torch import nn

from fullshard.torch import CPUOffload, ShardingStrategy

DOORS = ("wrapper", "function")


@cache
def in_one_process():
    model, norms = whole(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for inputs, targets in batches():
        loss_of(model(inputs), targets).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: param.detach() for name, param in model.named_parameters()}


def check(runs):
    expected_norms, expected = in_one_process()
    assert min(expected_norms) > MAX_NORM, "clipping must do something"
    for norms, params, shapes, _ in runs:
        assert norms == pytest.approx(expected_norms, abs=1e-12)
        assert shapes == {name: tuple(value.shape) for name, value in expected.items()}
        for name, value in expected.items():
            torch.testing.assert_close(params[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("plan", "door"), [*zip(PLANS, itertools.cycle(DOORS))])
def test_steps_are_those_of_one_process(gloo_world, plan, door):
    """Two ranks share each half of the batch; norms are global over both axes."""
    check(gloo_world.run(4, train, plan, door))


@pytest.mark.parametrize(
    ("door", "start", "options"),
    [
        ("wrapper", "values", {"sharding_strategy": ShardingStrategy.NO_SHARD}),
        ("wrapper", "values", {"hybrid": True}),
        ("function", "values", {"hybrid": True}),
        ("wrapper", "values", {"cpu_offload": CPUOffload(offload_params=True)}),
        ("wrapper", "first rank", {"sync_module_states": True}),
        ("function", "values", {"reshard_after_forward": False}),
        ("function", "plain tensors", {}),
        ("function", "dtensors", {}),
    ],
    ids=[
        *("no shard", "hybrid, wrapper", "hybrid", "offload", "first rank", "kept full"),
        *("plain tensors", "dtensors"),
    ],
)
def test_modes_and_sources_of_values(gloo_world, door, start, options):
    check(gloo_world.run(4, train, "sequence", door, start, **options))


def test_a_rank_holds_a_quarter_of_what_both_axes_cut(gloo_world):
    numels = {name: param.numel() for name, param in whole().named_parameters()}
    cut = sum(n for name, n in numels.items() if ".up." in name or name.endswith("down.weight"))
    rest = sum(numels.values()) - cut
    held = [held for *_, held in gloo_world.run(4, train, "column and row", "function")]
    assert sum(held) == cut + 2 * rest


@pytest.mark.parametrize(("plan", "door"), [("embedding", "wrapper"), ("sequence", "function")])
def test_values_are_whole_outside_of_steps(gloo_world, plan, door, tmp_path):
    path = tmp_path / "weights.safetensors"
    raised = {name: value + 1 for name, value in whole().state_dict().items()}
    model = whole()
    torch.manual_seed(5)
    for param in model.parameters():
        nn.init.normal_(param)
    drawn_here = dict(model.named_parameters())
    for loaded, summoned, doubled, drawn in gloo_world.run(4, values, plan, door, str(path)):
        assert loaded.keys() == summoned.keys() == doubled.keys() == raised.keys()
        for name, value in raised.items():
            assert torch.equal(loaded[name], value), name
            assert torch.equal(summoned[name], value), name
            assert torch.equal(doubled[name], 2 * value), name
            assert torch.equal(drawn[name], drawn_here[name]), name
    saved = load_file(path)
    assert saved.keys() == raised.keys()
    for name, value in raised.items():
        assert torch.equal(saved[name], value), name


def test_what_needs_the_whole_is_refused(gloo_world):
    for errors in gloo_world.run(4, refusals):
        row, view, total, placement = errors
        for error in (row, view, total):
            assert "up.weight' of shape (12, 6)" in error
        assert "'weight' is a DTensor placed as" in placement


def test_frozen_and_thawed(gloo_world):
    model = whole()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (inputs, targets) in enumerate(batches()):
        model.layers[0].requires_grad_(number > 0)
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    for params in gloo_world.run(4, thawed):
        for name, param in model.named_parameters():
            torch.testing.assert_close(params[name], param.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("door", "plan"), [*zip(itertools.cycle(DOORS), PLANS)])
def test_state_dicts_are_placed_on_both_axes(gloo_world, plan, door):
    found = gloo_world.run(4, state_dicts, plan, door)
    assert all(each == found[0] for each in found)
    assert any("_StridedShard" in each for each in found[0].values())
