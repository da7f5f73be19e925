# SPDX-License-Identifier: Apache-2.0
"""Ranks that start with different values."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.beside import DOORS, shard
from support.models import make, seeded
from support.threads import on_ranks
from support.world import on_processes
from torch import nn

from fullshard.core.errors import ConfigurationError
from fullshard.testing import LocalComm, LocalWorld
from fullshard.torch import FullyShardedDataParallel, ShardingStrategy, fully_shard
from fullshard.torch.tensor.checksum import checksum
from fullshard.wrap import ModuleWrapPolicy

pytestmark = pytest.mark.usefixtures("checked_values")


@pytest.mark.parametrize("door", DOORS)
@on_processes(2)
def test_rank_0_loads_and_the_others_forget(group, door):
    def build():
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(1.0)
            model[1].weight.fill_(float(group.rank() == 0))
        return model

    os.environ["FULLSHARD_CHECK_VALUES"] = "1"
    untouched = build()
    with pytest.raises(ConfigurationError) as told:
        shard(untouched, group, door)
    for text in ("different values of 1 of 4 parameters", "1.weight", "on rank 0; "):
        assert text in str(told.value)
    for text in ("sync_module_states=True", "check_values=False"):
        assert text in str(told.value)
    assert "0.weight" not in str(told.value)
    assert type(untouched[1].weight) is nn.Parameter
    off = shard(build(), group, door, check_values=False)
    assert not off.get_parameter("1.weight").full_tensor().all()  # a slice is rank 1's own
    os.environ["FULLSHARD_CHECK_VALUES"] = "0"
    shard(build(), group, door)
    if door == "wrapper":
        synced = shard(build(), group, door, sync_module_states=True)
        assert bool((synced.module[1].weight.full_tensor() == 1).all())


def linear(comm, **change):
    layer = nn.Linear(4, 3)
    with torch.no_grad():
        for param in layer.parameters():
            param.fill_(1.0)
        for name, value in change.items():
            getattr(layer, name).view(-1)[0] = value
    return layer


def test_one_changed_element_is_found_among_replicas_too():
    def body(comm):
        return FullyShardedDataParallel(
            linear(comm, weight=float(comm.rank == 2)), comm, ShardingStrategy.NO_SHARD
        )

    with pytest.raises(ConfigurationError, match=r"weight: .*on rank 2"):
        LocalWorld(3).run(body)


@on_ranks(2)
def test_values_in_other_strides_are_the_same(comm):
    layer = linear(comm)
    values = torch.arange(12.0).view(3, 4)
    layer.weight = nn.Parameter(values.t().contiguous().t() if comm.rank else values)
    fully_shard(layer, mesh=comm)


@on_ranks(2)
def test_meta_everywhere_and_rank_0_only(comm):
    with torch.device("meta"):
        bare = nn.Linear(4, 3)
    fully_shard(bare, mesh=comm)  # values come later
    # Rank 0 has the checkpoint, the others get theirs when it is loaded.
    fully_shard(linear(comm) if comm.rank == 0 else nn.Linear(4, 3, device="meta"), mesh=comm)
    with pytest.raises(ConfigurationError, match="meta device"):
        FullyShardedDataParallel(
            linear(comm) if comm.rank == 0 else nn.Linear(4, 3, device="meta"), comm
        )
    FullyShardedDataParallel(
        linear(comm) if comm.rank == 0 else nn.Linear(4, 3, device="meta"),
        comm,
        sync_module_states=True,
    )


def test_ranks_that_registered_modules_in_another_order_are_told():
    def body(comm):
        names = ["a", "b"] if comm.rank else ["b", "a"]
        model = nn.ModuleDict({name: linear(comm) for name in names})
        outer = nn.Sequential(model)
        FullyShardedDataParallel(outer, comm)

    with pytest.raises(ConfigurationError, match="number 0"):
        LocalWorld(2).run(body)


def test_ranks_of_which_one_wants_the_first_ranks_values_are_told():
    def body(comm):
        FullyShardedDataParallel(linear(comm), comm, sync_module_states=comm.rank == 0)

    with pytest.raises(ConfigurationError, match="values of the first rank"):
        LocalWorld(2).run(body)


@pytest.mark.parametrize("name", ["gpt", "odd"])
def test_all_of_a_model_is_compared(name):
    def body(comm):
        model = make(name, seed=comm.rank)
        FullyShardedDataParallel(model, comm, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))

    with pytest.raises(ConfigurationError, match="different values"):
        LocalWorld(2).run(body)


dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.uint8])


@given(dtypes, st.integers(0, 5000), st.integers(0, 9), st.randoms(use_true_random=False))
def test_checksum(dtype, numel, offset, random):
    torch.manual_seed(random.randrange(1000))
    values = torch.randint(0, 2, (numel,)).to(dtype)
    held = torch.zeros(numel + offset, dtype=dtype)[offset:]
    held.copy_(values)
    assert checksum(held) == checksum(values)
    assert checksum(held).dtype is torch.int64
    if numel:
        place = random.randrange(numel)
        held[place] = not held[place]
        assert checksum(held) != checksum(values)
        assert checksum(values) != checksum(values[:-1]) or values[-1] == 0


@given(st.integers(0, 2**31), st.sampled_from([1, 64, 70_001]))
def test_checksums_of_the_same_elements_in_another_order_differ(seed, columns):
    generator = torch.Generator().manual_seed(seed)
    values = torch.eye(6).repeat_interleave(columns, 1)  # rows that add up alike
    order = torch.randperm(6, generator=generator)
    assert (checksum(values[order]) == checksum(values)) == bool((order == order.sort()[0]).all())
    words = torch.tensor([1.0, 2.0, 2.0, 1.0], dtype=torch.float64)
    assert checksum(words) != checksum(words.flip(0).roll(1))


@pytest.mark.parametrize("values", ["real", "meta"])
def test_a_unit_is_compared_in_one_call(values, monkeypatch):
    calls = []
    all_reduce = LocalComm.all_reduce

    def counted(comm, tensors, op="sum", label=""):
        calls.append(label)
        return all_reduce(comm, tensors, op, label)

    monkeypatch.setattr(LocalComm, "all_reduce", counted)

    def body(comm):
        with torch.device("cpu" if values == "real" else "meta"):
            model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        for layer in (*model, model):
            fully_shard(layer, mesh=comm)

    LocalWorld(2).run(body)
    assert calls == ["comparison of what to shard"] * 2 * 3
