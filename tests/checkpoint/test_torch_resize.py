# SPDX-License-Identifier: Apache-2.0
"""Saved by one number of ranks, one strategy and one door, loaded by others, and trained on.

``FULLSHARD_TRIALS=full`` takes all pairs of worlds for all strategies, otherwise a sample.
"""

import itertools

import pytest
import torch
from support.beside import DOORS, grid, shard, whole
from support.models import CASES, loss_of, make, make_batches
from support.sampling import FULL, THOROUGH

from fullshard.checkpoint import open_checkpoint
from fullshard.testing import LocalWorld
from fullshard.torch import (
    ShardingStrategy,
    load_checkpoint,
    save_checkpoint,
)

WORLDS = [1, 2, 3, 4, 5, 8]
BATCH = 120  # divides over all of them
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]
CASE = "odd"


def build(comm, strategy, door, name=CASE, seed=0):
    model = make(name, torch.float64, seed)
    where = comm
    if strategy == "HYBRID_SHARD":
        within = comm.size // 2 if comm.size % 2 == 0 else 1
        where = grid(comm, within)
    if door == "wrapper":
        options = {"sharding_strategy": ShardingStrategy[strategy]}
    else:
        options = {"reshard_after_forward": strategy == "FULL_SHARD"}
    model = shard(model, where, door, CASES[name].units, **options)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    return model, optimizer


def train(comm, model, optimizer, steps, name=CASE):
    """Global losses of the steps with these numbers."""
    losses = []
    batches = make_batches(name, max(steps, default=0) + 1, BATCH, torch.float64)
    for step in steps:
        inputs, targets = batches[step]
        part = slice(BATCH // comm.size * comm.rank, BATCH // comm.size * (comm.rank + 1))
        loss = loss_of(model(inputs[part]), targets[part])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        comm.all_reduce([total]).wait()
        losses.append(total.item() / comm.size)
    return losses


def everything(model, optimizer):
    """All whole values of model and optimizer, by name."""
    full = {name: whole(value) for name, value in model.state_dict(keep_vars=True).items()}
    for name, param in model.named_parameters():
        for kind, value in optimizer.state.get(param, {}).items():
            full[f"{kind} of {name}"] = whole(value)
    clean = {name.replace("_fsdp_wrapped_module.", ""): each for name, each in full.items()}
    return {name: each.detach().clone() for name, each in clean.items()}


def saved_by(run, world, strategy, door):
    """Train two steps, save, train three more: what was saved and the later losses."""

    def body(comm):
        model, optimizer = build(comm, strategy, door)
        train(comm, model, optimizer, range(2))
        save_checkpoint(run, model, optimizer, step=2, extra={"position": 2 * BATCH})
        held = everything(model, optimizer)
        return held, train(comm, model, optimizer, range(2, 5))

    return LocalWorld(world).run(body)[0]


def loaded_by(run, world, strategy, door):
    def body(comm):
        model, optimizer = build(comm, strategy, door, seed=1)
        loaded = load_checkpoint(run, model, optimizer)
        assert (loaded.step, loaded.extra) == (2, {"position": 2 * BATCH})
        held = everything(model, optimizer)
        return held, train(comm, model, optimizer, range(2, 5))

    return LocalWorld(world).run(body)[0]


def assert_goes_on(saved, loaded, same):
    torch.testing.assert_close(loaded[0], saved[0], rtol=0, atol=0)
    if same:
        assert saved[1] == loaded[1]
    assert loaded[1] == pytest.approx(saved[1], rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("a", WORLDS if THOROUGH else (1, 3, 8))
def test_saved_at_one_number_of_ranks_loaded_at_another(tmp_path, a):
    saved = saved_by(tmp_path, a, "FULL_SHARD", "wrapper")
    for b in WORLDS if FULL else [a, WORLDS[(WORLDS.index(a) + 2) % 6]]:
        loaded = loaded_by(tmp_path, b, "FULL_SHARD", "wrapper")
        assert_goes_on(saved, loaded, same=a == b)


KINDS = list(itertools.product(STRATEGIES, DOORS))


@pytest.mark.timeout(3600 if FULL else 600)  # 288 loads, each with steps of all ranks
@pytest.mark.parametrize(("strategy", "door"), KINDS)
def test_any_strategy_and_door_reads_any_other(tmp_path, strategy, door):
    worlds = WORLDS if FULL else [4]
    for a in worlds:
        run = tmp_path / str(a)
        saved = saved_by(run, a, strategy, door)
        if a > 1 and strategy in ("HYBRID_SHARD", "NO_SHARD"):
            assert written_once(run)
        tensors = open_checkpoint(run).manifest.tensors
        listed = {name for name, each in tensors.items() if each.tiling is None and each.size_bytes}
        assert listed == {f"random/{rank}" for rank in range(a)}
        number = KINDS.index((strategy, door))
        others = KINDS if FULL else [KINDS[(number + 3) % 8]]
        for b in worlds if FULL else [2]:
            for other, other_door in others:
                loaded = loaded_by(run, b, other, other_door)
                assert_goes_on(saved, loaded, same=False)


def written_once(run):
    """No more bytes of data than the tensors have."""
    manifest = open_checkpoint(run).manifest
    held = sum(each.size_bytes for each in manifest.tensors.values())
    return (
        sum(each.size_bytes - each.header_bytes - each.table_bytes for each in manifest.files)
        == held
    )
