# SPDX-License-Identifier: Apache-2.0
"""The names of units in torch's profiles."""

import torch
from torch import nn

from fullshard.testing import LocalWorld
from fullshard.torch import fully_shard


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
