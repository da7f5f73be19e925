# SPDX-License-Identifier: Apache-2.0
"""To look at a model, or at a part of one, changes neither its names nor its schedule nor its root.

Every public function that takes a module is either tried here or known to change something.
"""

import contextlib
import inspect

import pytest
import torch
from support.beside import shard
from support.stack import WIDTH, Stack
from support.threads import on_ranks
from torch import nn

import fullshard.torch
from fullshard.core.errors import UsageError
from fullshard.core.strategy import Prefetch
from fullshard.testing import LocalWorld
from fullshard.torch import (
    FullyShardedDataParallel,
    inspection,
    load_full_weights,
    save_full_weights,
    set_prefetch,
    summon_full_params,
)
from fullshard.torch.step.managed import managed_units


def enter(context):
    with context:
        pass


# By name: a function that asks, called with (module, optimizer, folder).
ASKING = {
    "communication": lambda module, *_: inspection.communication(module),
    "describe": lambda module, *_: inspection.describe(module),
    "memory_summary": lambda module, optimizer, _: inspection.memory_summary(module, optimizer),
    "resting_bytes": lambda module, optimizer, _: inspection.resting_bytes(module, optimizer),
    "tracing": lambda module, *_: enter(inspection.tracing(module)),
    "save_full_weights": lambda module, _, folder: save_full_weights(module, folder / "weights"),
    "load_full_weights": lambda module, _, folder: (
        save_full_weights(module, folder / "weights"),
        load_full_weights(module, folder / "weights"),
    ),
    "summon_full_params": lambda module, *_: enter(summon_full_params(module)),
    "state_dict": lambda module, *_: module.state_dict(),
    "load_state_dict": lambda module, *_: module.load_state_dict(module.state_dict()),
    "named_parameters": lambda module, *_: list(module.named_parameters()),
    "repr": lambda module, *_: repr(module),
}
# These are asked of a module that has a unit of its own.
ASKING_UNITS = {
    "wrapper": {
        "check_is_root": lambda module: module.check_is_root(),
        "fsdp_modules": lambda module: FullyShardedDataParallel.fsdp_modules(module),
        "get_state_dict_type": lambda module: FullyShardedDataParallel.get_state_dict_type(module),
        "no_sync": lambda module: enter(module.no_sync()),
    },
    "function": {
        "unshard and reshard": lambda module: (module.unshard(), module.reshard()),
        "reset_iter_state": lambda module: refused_or_not(module.reset_iter_state),
    },
}
# They are called in order to do or change something: steps, schedules, modules, optimizers.
ACTING = {
    "capture_step",
    "fully_shard",
    "keep_for_double_backward",
    "overlap_optimizer",
    "register_fsdp_forward_method",
    "set_prefetch",
    "set_separate_reduce_scatter_group",
    "shard_experts",
    "use_memory_pool",
    "using",
}


def sharded(comm, door, layers=3):
    """A stack of ``layers`` units and the root's, behind either interface."""
    return shard(Stack(layers), comm, door, [nn.Sequential])


def refused_or_not(method):
    with contextlib.suppress(UsageError):
        method()


def train(model, optimizer):
    """One step and its ops."""
    with inspection.tracing(model) as trace:
        model(torch.ones(2, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return [(record.op, record.unit) for record in trace]


def standing(model):
    """All that looking must not change."""
    units = list(managed_units(model))
    trackers = {id(managed.tracker) for managed in units}
    prefetch = units[0].tracker.prefetch
    return [(managed.unit.name, managed.number) for managed in units], trackers, prefetch


def parts_of(model):
    """The root, a container without a unit of its own, and one unit."""
    return {"root": model, "container": model.blocks, "unit": model.blocks[1]}


def check(door, part, ask, folder):
    def body(comm):
        model = sharded(comm, door)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        set_prefetch(model, 2, 0)
        train(model, optimizer)
        ops, before = train(model, optimizer), standing(model)
        ask(parts_of(model)[part], optimizer, folder)
        assert standing(model) == before
        assert train(model, optimizer) == ops
        return before

    for names, _, prefetch in LocalWorld(2).run(body):
        assert [name for name, _ in names][1:] == ["blocks.0", "blocks.1", "blocks.2"]
        assert prefetch == Prefetch(2, 0)


@pytest.mark.parametrize("door", ["wrapper", "function"])
@pytest.mark.parametrize("part", ["root", "container", "unit"])
@pytest.mark.parametrize("name", ASKING)
def test_asking_changes_nothing(door, part, name, tmp_path):
    check(door, part, ASKING[name], tmp_path)


@pytest.mark.parametrize(
    ("door", "name"), [(door, name) for door, asked in ASKING_UNITS.items() for name in asked]
)
@pytest.mark.parametrize("part", ["root", "unit"])
def test_asking_a_unit_changes_nothing(door, part, name, tmp_path):
    check(door, part, lambda module, *_: ASKING_UNITS[door][name](module), tmp_path)


def test_every_public_function_of_a_module_is_known():
    homes = (fullshard.torch, inspection, fullshard.torch.fsdp1, fullshard.torch.fsdp2)
    public = {name: getattr(home, name) for home in homes for name in home.__all__}
    taking = {
        name
        for name, function in public.items()
        if inspect.isfunction(function)
        and next(iter(inspect.signature(function).parameters), "") in ("model", "module")
    }
    assert taking <= ASKING.keys() | ACTING, "neither tried nor known to change something"
    assert taking >= ACTING


@on_ranks(2)
def test_parts_with_steps_of_their_own_are_not_traced_together(comm):
    pair = nn.ModuleList(sharded(comm, "function", 1) for _ in range(2))
    for model in pair:
        model(torch.ones(2, WIDTH))
    with pytest.raises(UsageError, match="steps of their own; record each"):
        enter(inspection.tracing(pair))
    assert [managed.number for managed in managed_units(pair)] == [0, 1] * 2
