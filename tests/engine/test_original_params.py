# SPDX-License-Identifier: Apache-2.0
"""What training libraries expect of FSDP1: optimizers that follow, and flat parameters to cast."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.threads import on_ranks
from support.world import on_processes
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.testing import LocalWorld
from fullshard.torch import FullyShardedDataParallel as FSDP
from fullshard.torch import MixedPrecision, ShardedParameter
from fullshard.torch.optim import original_params
from fullshard.torch.state.dtensors import without_sharded_tensor
from fullshard.wrap import ModuleWrapPolicy

NET = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.Linear(3, 1))


def net(dtype=torch.float32):
    return copy.deepcopy(NET).to(dtype)


def steps(model, optimizer, count=3):
    x, losses = torch.linspace(-1, 1, 20).view(4, 5), []
    for _ in range(count):
        loss = (model(x.to(next(model.parameters()).dtype)).float() - 3).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert count == 1 or losses[-1] < losses[0]
    return losses


def wrapped(model, comm, **options):
    return FSDP(
        model, comm, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True, **options
    )


def test_an_optimizer_from_before_goes_on():
    plain = net()
    expected = steps(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))

    def body(comm):
        model = net()
        others = nn.Parameter(torch.zeros(2))
        groups = [{"params": model.parameters()}, {"params": [others], "lr": 1.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        model = wrapped(model, comm)
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
            id(p) for p in model.parameters()
        ]
        assert optimizer.param_groups[1]["params"][0] is others
        losses = steps(model, optimizer)
        schedule.step()
        return losses

    for losses in LocalWorld(2).run(body):
        assert losses == pytest.approx(expected, abs=1e-6)


def test_optimizers_are_not_looked_for_in_vain(monkeypatch):
    def look(params):
        raise AssertionError("somebody still holds parameters of before")

    monkeypatch.setattr(original_params, "_optimizers_over", look)
    LocalWorld(2).run(lambda comm: wrapped(net(), comm))
    with pytest.raises(AssertionError, match="somebody still holds"):
        LocalWorld(1).run(lambda comm: [(m := net()), list(m.parameters()), wrapped(m, comm)])


@on_ranks(1)
def test_every_group_is_found(comm):
    """Groups of one parameter each, more than are looked for at once, also after a copy."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(80)))
    optimizer = torch.optim.SGD([{"params": [param]} for param in model.parameters()], lr=0.1)
    optimizer.__dict__["note"] = "attributes in a dict of their own"
    model = FSDP(model, comm, use_orig_params=True)
    found = [param for group in optimizer.param_groups for param in group["params"]]
    assert [id(param) for param in found] == [id(param) for param in model.parameters()]


@on_ranks(2)
def test_one_that_has_state_is_refused(comm):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps(model, optimizer, 1)
    model = wrapped(model, comm)
    with pytest.raises(UsageError, match="created before the model was sharded"):
        steps(model, optimizer, 1)


def test_low_precision_is_cast_to_float32_as_accelerate_does():
    inputs = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}

    def body(comm):
        low = net(torch.bfloat16)
        low[3].requires_grad_(False)
        kept = copy.deepcopy(low).float()
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (low, kept)]
        precision = MixedPrecision(**inputs)
        model = wrapped(low, comm, mixed_precision=precision)
        for module in FSDP.fsdp_modules(model):
            if module._has_params:
                flat = module._flat_param
                assert (flat.dtype, flat.device.type) == (torch.bfloat16, "cpu")
                flat.data = flat.data.to(torch.float32)
                module._handle._orig_param_dtype = torch.float32
        assert not any(module._has_params for module in FSDP.fsdp_modules(model))
        assert [p.dtype for p in model.parameters()] == 4 * [torch.float32] + 2 * [torch.bfloat16]
        assert all(isinstance(p, ShardedParameter) for p in model.parameters())
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in kept.named_parameters()]
        reference = wrapped(kept, comm, mixed_precision=precision)
        return steps(model, optimizers[0]), steps(reference, optimizers[1])

    for losses, expected in LocalWorld(2).run(body):
        assert losses == expected


@on_ranks(2)
def test_flat_parameters_are_good_for_nothing_else(comm):
    model = wrapped(net(torch.bfloat16), comm)
    flat = FSDP.fsdp_modules(model)[1]._flat_param
    for value in (flat.data.half(), torch.zeros(3)):
        with pytest.raises(NotSupportedError, match=r"no flat parameters.*model\.parameters"):
            flat.data = value
    assert [p.dtype for p in model.parameters()] == 6 * [torch.bfloat16]


def test_low_precision_is_clipped_by_a_norm_in_float32():
    """The norm that 4,096 gradients of 0.01 have, and not what bf16 makes of it on the way."""
    plain = nn.Linear(64, 64, bias=False).bfloat16()

    def body(comm):
        model = FSDP(copy.deepcopy(plain), comm)
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.01)
        norm = model.clip_grad_norm_(0.32)
        return norm.dtype, norm.item(), next(model.parameters()).grad.full_tensor()

    rounded = torch.tensor(0.01, dtype=torch.bfloat16)
    expected = 64 * rounded.float()
    for dtype, norm, grad in LocalWorld(3).run(body):
        assert dtype == torch.bfloat16
        assert norm == expected.bfloat16().item()
        assert grad.unique().tolist() == [(rounded * (0.32 / expected).bfloat16()).item()]


@pytest.mark.parametrize("kept", [False, True])
@on_ranks(2)
def test_what_optimizers_shall_be_made_from_is_marked_unless_originals_do(comm, kept):
    model = FSDP(net(), comm, use_orig_params=kept)
    assert [getattr(param, "_fsdp_flattened", False) for param in model.parameters()] == 6 * [
        not kept
    ]


def sharded_tensor(group, full, dim, chunk):
    rank = dist.get_rank(group)
    shards = []
    if rank * chunk < full.shape[dim]:
        piece = full.narrow(dim, rank * chunk, min(chunk, full.shape[dim] - rank * chunk))
        offsets = [0] * full.dim()
        offsets[dim] = rank * chunk
        shards.append(Shard.from_tensor_and_offsets(piece.contiguous(), offsets, rank))
    return init_from_local_shards(shards, *full.shape, process_group=group)


@pytest.mark.parametrize("shape", [(5, 3), (1, 4), (4,)])
@on_processes(3)
def test_sharded_tensors_become_dtensors(group, shape):
    full = torch.arange(float(torch.Size(shape).numel())).view(shape)
    made = sharded_tensor(group, full, dim=0, chunk=-(-shape[0] // 3))
    assert torch.equal(without_sharded_tensor(made, torch.device("cpu")).full_tensor(), full)


@on_processes(2)
def test_sharded_tensors_cut_otherwise_are_refused(group):
    made = sharded_tensor(group, torch.zeros(4, 6), dim=1, chunk=3)
    with pytest.raises(NotSupportedError, match="only whole rows"):
        without_sharded_tensor(made, torch.device("cpu"))
