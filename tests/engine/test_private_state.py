# SPDX-License-Identifier: Apache-2.0
"""Private state of PyTorch's engines that training libraries reach for: what is served, and how."""

import copy

import pytest
import torch
from support.beside import params_of, shard
from support.models import GPT, Block, loss_of, make_batches, seeded
from support.threads import on_ranks
from torch import nn
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.fsdp._runtime_utils import _lazy_init

from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.torch import FullyShardedDataParallel, MixedPrecision
from fullshard.torch.step.managed import managed_units


def wrapped(comm):
    return shard(seeded(GPT), comm, "wrapper", [Block])


def functional(comm):
    return shard(seeded(GPT), comm, units=[Block])


def move_by_handles(model, device):
    """As reinforcement learning does it between training and generation."""
    with torch.no_grad():
        _lazy_init(model, model)
        assert model._is_root
        for handle in model._all_handles:
            assert not handle._offload_params
            flat = handle.flat_param
            assert flat.data.data_ptr() == flat._local_shard.data_ptr() != 0
            assert flat.data.size() == flat._local_shard.size()
            assert id(flat.data) != id(flat._local_shard)
            handle.flat_param_to(device, non_blocking=True)
            flat._local_shard = flat.data
            assert id(flat._local_shard) != id(flat.data)


def train(model, comm, between=lambda: None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    part = slice(comm.rank, comm.rank + 1)
    for inputs, targets in make_batches("gpt", 3, comm.size):
        loss = loss_of(model(inputs[part]), targets[part])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        between()
        losses.append(loss.item())
    return losses


@on_ranks(2)
def test_a_wrapped_model_is_moved_by_handles(comm):
    model = wrapped(comm)
    kept = list(model.parameters())
    losses = train(model, comm, lambda: move_by_handles(model, torch.device("cpu")))
    assert all(a is b for a, b in zip(model.parameters(), kept, strict=True))
    inner = model.module.blocks[0]
    inner._is_root = True  # verl says so before it summons one wrapper's parameters
    assert not inner._is_root
    # All memory of a unit is a handle's: that of the root's below, and of its own.
    mine = {h.flat_param.data.data_ptr() for h in model._all_handles}
    assert mine == {u.unit.shards.buffer.memory.data_ptr() for u in managed_units(model)}
    assert inner._handle.flat_param.data.data_ptr() in mine
    moved, stayed = losses, train(wrapped(comm), comm)
    assert moved == stayed


@pytest.mark.parametrize("precision", [None, MixedPrecision(torch.bfloat16)])
@on_ranks(2)
def test_the_memory_of_a_handle_is_that_of_the_parameters(comm, precision):
    model = FullyShardedDataParallel(nn.Linear(8, 8), comm, mixed_precision=precision)
    model._handle.flat_param.data.fill_(3.0)
    assert all(bool((p.local == 3).all()) for p in model.parameters())
    out = model(torch.ones(1, 8))
    assert out.tolist() == [[27.0] * 8]


@on_ranks(2)
def test_shards_that_are_away_are_not_gathered(comm):
    """The meta device stands for one that the CPU is away from."""
    model = functional(comm)
    for managed in managed_units(model):
        managed.unit.full.out_of_reach = torch.device("cuda:0")
    with pytest.raises(UsageError, match=r"moved to cuda:0: move it back to cpu"):
        model(torch.zeros(1, 8, dtype=torch.long))
    with pytest.raises(NotSupportedError, match="rests on cpu"):
        wrapped(comm)._handle.flat_param_to("cuda")


@on_ranks(2)
def test_gradients_that_wait_are_not_left_behind(comm):
    model = FullyShardedDataParallel(nn.Linear(8, 8), comm)
    with model.no_sync():
        model(torch.ones(1, 8)).sum().backward()
    unit = next(managed_units(model)).unit
    unit.shards.device = torch.device("cuda", 0)  # as if it were to come from there
    with pytest.raises(UsageError, match="not reduced yet"):
        model._handle.flat_param_to("cpu")


@on_ranks(1)
def test_what_is_not_there_says_what_is(comm):
    handle = wrapped(comm)._handle
    with pytest.raises(AttributeError, match=r"has \.data, and no _params"):
        _ = handle.flat_param._params
    with pytest.raises(AttributeError, match=r"has flat_param, .* and no unshard"):
        handle.unshard()
    with pytest.raises(NotSupportedError, match="other memory"):
        handle.flat_param._local_shard = torch.ones(3)
    state = functional(comm)._get_fsdp_state()
    with pytest.raises(AttributeError, match=r"no _fsdp_param_group: .*unshard"):
        _ = state._fsdp_param_group
    assert getattr(state, "_fsdp_param_groups", None) is None
    assert FullyShardedDataParallel(nn.Identity(), comm)._handle is None


@on_ranks(2)
def test_the_state_of_a_module_knows_the_root(comm):
    model = functional(comm)
    block = model.blocks[0]
    assert model._get_fsdp_state()._is_root is None
    model._get_fsdp_state()._lazy_init()
    model(torch.zeros(1, 8, dtype=torch.long))
    assert model._get_fsdp_state()._is_root is True
    assert block._get_fsdp_state()._is_root is False


@on_ranks(2)
def test_whole_values_are_restored_through_flat_parameters_of_one_each(comm):
    """As OLMo reads its whole checkpoints; and its metrics ask each rank for all state."""
    model, wanted = wrapped(comm), seeded(GPT, seed=3).state_dict()
    with torch.no_grad():
        for name, module in model.named_modules():
            for flat in module.params if isinstance(module, FullyShardedDataParallel) else ():
                assert flat._is_flat_param
                flat.fill_(torch.nan)
                for fqn, info in zip(flat._fqns, flat._shard_param_infos, strict=True):
                    if info.in_shard:
                        there = slice(info.intra_param_start_idx, info.intra_param_end_idx + 1)
                        value = wanted[f"{name}.{fqn}".lstrip(".")].flatten()[there]
                        begin = info.offset_in_shard
                        flat[begin : begin + info.numel_in_shard].copy_(value)
                assert not flat.isnan().any()
    torch.testing.assert_close(params_of(model), wanted, rtol=0, atol=0)


class Measuring(torch.optim.AdamW):
    """AdamW with a step of its own, of which nobody knows that it steps every element by itself."""

    def step(self, closure=None):
        result = super().step(closure)
        moments = [self.state[param]["exp_avg"] for param in self.param_groups[0]["params"]]
        self.norm = torch.stack([each.norm() for each in moments]).norm()
        return result


@on_ranks(2)
def test_a_derived_optimizer_has_state_of_all_parameters_on_all_ranks(comm):
    """Also of small ones, whose elements happen to be all on one rank."""
    model, beside = wrapped(comm), seeded(GPT)
    mine, theirs = Measuring(model.parameters()), Measuring(beside.parameters())
    for inputs, targets in make_batches("gpt", 2, 2):
        for each, optimizer in ((model, mine), (beside, theirs)):
            loss_of(each(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(mine.norm, theirs.norm)
    assert all("exp_avg" in mine.state[param] for param in model.parameters())


@on_ranks(1)
def test_a_wrapper_says_where_it_is(comm):
    model, seen = wrapped(comm), []
    assert model.training_state == TrainingState.IDLE
    block = model.blocks[0]
    block.module.register_forward_hook(lambda *_: seen.append(block.training_state))
    block.module.norm1.register_full_backward_hook(lambda *_: seen.append(block.training_state))
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    assert seen == [TrainingState.FORWARD_BACKWARD] * 2
    assert model.training_state == block.training_state == TrainingState.IDLE
    with FullyShardedDataParallel.summon_full_params(model):
        assert block.training_state == TrainingState.SUMMON_FULL_PARAMS


@pytest.mark.parametrize("door", [wrapped, functional])
@on_ranks(1)
def test_modules_are_marked_as_managed(comm, door):
    """So transformers lets all ranks generate until the last is done, and drops no layer alone."""
    model = door(comm)
    assert all(module._is_fsdp_managed_module for module in model.modules())
    assert not hasattr(copy.copy(GPT()), "_is_fsdp_managed_module")
