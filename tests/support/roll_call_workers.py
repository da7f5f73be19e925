# SPDX-License-Identifier: Apache-2.0
"""Ranks that call the roll alone, late, for different things, or as they should."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from support.stack import shard_stack, step
from torch.distributed import distributed_c10d as c10d

from fullshard.core.errors import UsageError
from fullshard.torch import (
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    save_full_weights,
    summon_full_params,
)
from fullshard.torch.comm.process_group import ProcessGroupComm
from fullshard.torch.comm.watch.roll_call import call_roll

INSTEAD = "call it on every rank"


def attempt(comms, what="look()"):
    """The error's text (None if all came), and how long it took."""
    begin = time.monotonic()
    try:
        call_roll(comms, what, INSTEAD)
    except UsageError as error:
        return str(error), time.monotonic() - begin
    return None, time.monotonic() - begin


def enter_summon(model):
    with summon_full_params(model):
        pass


MISHAPS = {
    1: lambda model: model.state_dict(),
    2: lambda model: save_full_weights(model, "never"),
    3: enter_summon,
    4: lambda model: next(model.parameters()).full_tensor(),
}


def training_with_mishaps(group, mishaps):
    """Before some steps rank 0 alone does what all must do. The weights in the end."""
    torch.manual_seed(0)
    model = shard_stack(group, align="element")  # DTensors are handed out without a roll call
    optimizer = torch.optim.AdamW(model.parameters())
    told = []
    for number in range(5):
        if number in MISHAPS and mishaps and group.rank() == 0:
            begin = time.monotonic()
            try:
                MISHAPS[number](model)
            except UsageError as error:
                told.append((str(error), time.monotonic() - begin))
        optimizer.zero_grad()
        step(model, optimizer)
    weights = {name: each.full_tensor() for name, each in model.state_dict().items()}
    return told, weights


def late(group):
    """Ranks that are far apart, with a collective under way, call the same rolls."""
    comm = ProcessGroupComm(group)
    found = []
    for turn in range(2):
        full = torch.empty(comm.size)
        work = comm.all_gather([(full, torch.tensor([float(comm.rank)]))], label="ahead")
        time.sleep(0.7 * (comm.rank if turn else comm.size - 1 - comm.rank))
        found.append(attempt([comm, comm.duplicate()])[0])
        work.wait()
    return found


def for_different_things(group):
    """Half of the ranks save, half look; then all look."""
    comm = ProcessGroupComm(group)
    what = "look()" if comm.rank % 2 else "save()"
    first = attempt(comm, what)
    # Who is told first must not be gone, unseen, before the others have looked.
    with comm.witness.watchdog.calling(what, [comm.witness.family]):
        dist.barrier(group)
    return first, attempt(comm)


def nobody_comes(group):
    """Rank 0 waits for others that are in a barrier of torch's own; then all come."""
    few = dist.new_group(range(group.size()), timeout=timedelta(seconds=3))
    comm = ProcessGroupComm(few)
    first = attempt(comm) if comm.rank == 0 else None
    dist.barrier(group)
    return first, attempt(comm)


def two_halves(group):
    """Pairs of ranks call rolls of their own; then each rank those of two groups at once."""
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    row = ProcessGroupComm(rows[group.rank() // 2])
    column = ProcessGroupComm(columns[group.rank() % 2])
    if group.rank() < 2:
        alone = attempt(row)[0]
        dist.barrier(group)
        # These call what all must call, while the others are in a collective of their columns.
        crossed = attempt([row, column])[0]
        column.all_reduce([torch.ones(1)], label="sum of a column").wait()
    else:
        dist.barrier(group)
        column.all_reduce([torch.ones(1)], label="sum of a column").wait()
        alone, crossed = attempt(row)[0], None
    both = attempt([column, row] if group.rank() % 2 else [row, column])[0]
    return alone, crossed, both


def peer_has_left():
    """Return what rank 0 is told when rank 1 has left the group after a roll call and a sum."""
    dist.init_process_group("gloo")
    comm = ProcessGroupComm(dist.group.WORLD)
    call_roll(comm, "look()", INSTEAD)
    comm.all_reduce([torch.ones(1)]).wait()
    told = attempt(comm)[0] if comm.rank == 0 else None
    dist.destroy_process_group()
    return told


def keys_after(group, calls):
    """How many keys the default store has before and after so many roll calls."""
    comm = ProcessGroupComm(group)
    store = c10d._get_default_store()
    attempt(comm)
    dist.barrier(group)
    time.sleep(0.1)
    before = store.num_keys()
    dist.barrier(group)
    for number in range(calls):
        attempt(comm, f"look({number})")
    dist.barrier(group)
    return before, store.num_keys()


def loading_alone(group):
    """Rank 0 alone loads what is exchanged between ranks, while the others go on; what it is told.

    And the weights in the end.
    """
    torch.manual_seed(0)
    model = shard_stack(group, align="element")  # DTensors are handed out without a roll call
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    states = {model: model.state_dict(), optimizer: optimizer.state_dict()}
    told = []
    for target, state in states.items():
        if group.rank() == 0:
            try:
                target.load_state_dict(state)
            except UsageError as error:
                told.append(str(error))
        optimizer.zero_grad()
        step(model, optimizer)
    weights = {name: each.full_tensor() for name, each in model.state_dict().items()}
    return told, weights


def sending_alone(group):
    """Rank 0 alone sends an optimizer's state, in two ways; what it is told."""
    api = FullyShardedDataParallel
    model = api(torch.nn.Linear(3, 2), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = FullOptimStateDictConfig(rank0_only=True)
    api.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config)
    state = {"state": {}, "param_groups": []}
    told = []
    for way in (
        lambda: api.scatter_full_optim_state_dict(state, model, optim=optimizer),
        lambda: api.optim_state_dict_to_load(model, optimizer, state),
    ):
        if group.rank() == 0:
            try:
                way()
            except UsageError as error:
                told.append(str(error))
    model(torch.ones(1, 3)).sum().backward()
    return told
