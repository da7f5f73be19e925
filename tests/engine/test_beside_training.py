# SPDX-License-Identifier: Apache-2.0
"""What others' tests and scripts ask of sharded models beside training."""

import copy
import importlib

import pytest
import torch
from support.beside import DOORS, grads_of, shard, whole
from support.models import seeded
from support.threads import on_ranks
from support.world import on_processes, without_warnings
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch
from torch.distributed.tensor import Replicate

from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.testing import LocalWorld
from fullshard.torch import (
    FlatParameter,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedParameter,
    clip_grad_norm_,
    fully_shard,
)
from fullshard.torch.comm.protocol import SoloComm
from fullshard.torch.step.managed import managed_unit_of
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy

pytestmark = pytest.mark.usefixtures("checked_values")


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wrapped", [nn.Linear, nn.Sequential, nn.BatchNorm1d])
def test_batch_norm_keeps_full_precision(dtype, wrapped):
    def body(comm):
        model = FullyShardedDataParallel(
            seeded(Normed),
            comm,
            auto_wrap_policy=ModuleWrapPolicy({wrapped}),
            mixed_precision=MixedPrecision(dtype, dtype, dtype),
        )
        output = model(torch.ones(5, 3))
        output.sum().backward()
        norm = model.body[1]
        assert output.dtype is dtype
        assert norm.running_mean.dtype is norm.running_var.dtype is torch.float32
        assert norm.weight.grad.dtype is torch.float32
        return norm.running_mean.clone()

    plain = seeded(Normed).train()
    plain(torch.ones(5, 3))
    for mean in LocalWorld(2).run(body):
        torch.testing.assert_close(mean, plain.body[1].running_mean, rtol=0.02, atol=0.02)


def sharded_linear(comm, value=1.0):
    layer = nn.Linear(4, 3)
    for param in layer.parameters():
        nn.init.constant_(param, value)
    return fully_shard(layer, mesh=comm)


@on_ranks(3)
def test_equal_and_allclose(comm):
    model = sharded_linear(comm)
    model(torch.ones(1, 4)).sum().backward()
    param = model.weight
    other = param.detach().clone()
    assert torch.equal(param, other) is True
    assert torch.equal(param.grad, other) is True
    assert torch.equal(param, torch.ones(3, 4)) is True
    assert torch.equal(param, torch.ones(4)) is False
    assert torch.allclose(param, other * (1 + 1e-7)) is True
    with torch.no_grad():
        if other.local.numel() and comm.rank == 0:
            other.local[0] = 2.0
    assert torch.equal(param, other) is False  # on every rank, though one sees it
    assert torch.allclose(param, other) is False
    assert torch.allclose(param, other, atol=1.0) is True


@on_ranks(2)
def test_equal_and_allclose_of_parameters_that_lie_on_other_ranks(comm):
    """By which trainers look whether an optimizer has a parameter of the same shape already."""
    layers = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4)))
    model = FullyShardedDataParallel(layers, comm)
    one, other = (param for param in model.parameters() if param.dim() == 2)
    assert not one.ownership.agrees_with(other.ownership)
    for param in (one, other):
        nn.init.constant_(param, 1.0)
    assert torch.equal(one, other) is True
    nn.init.constant_(other, 2.0)
    assert torch.equal(one, other) is torch.equal(other, one) is torch.allclose(one, other) is False
    assert torch.allclose(other, one, atol=1.0) is True


@on_ranks(2)
def test_a_clipped_norm_passes_for_a_replicated_dtensor(comm):
    model = sharded_linear(comm)
    model(torch.ones(1, 4)).sum().backward()
    norm = clip_grad_norm_(model.parameters(), 1.0)
    assert norm.placements == (Replicate(),)
    assert norm.full_tensor() == norm.to_local() == pytest.approx(15**0.5)
    assert type(norm.to_local()) is torch.Tensor


def test_attributes_of_wrappers_and_a_policy_that_chooses_prefetch():
    post = BackwardPrefetch.BACKWARD_POST

    def choose(module):
        if not isinstance(module, nn.Linear):
            return False
        return {"backward_prefetch": post} if module.out_features == 2 else True

    def body(comm, chosen):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 4))
        model = FullyShardedDataParallel(
            model, comm, auto_wrap_policy=CustomPolicy(choose) if chosen else None,
            forward_prefetch=True, check_values=False,
        )  # fmt: skip
        model(torch.ones(1, 4)).sum().backward()
        assert model.forward_prefetch is True
        if chosen:
            assert model.module[1].backward_prefetch is post
            assert model.module[0].backward_prefetch is BackwardPrefetch.BACKWARD_PRE
            assert managed_unit_of(model.module[1]).prefetch_backward == []
            assert managed_unit_of(model.module[0]).prefetch_backward is None

    LocalWorld(2).run(lambda comm: body(comm, True))
    LocalWorld(2).run(lambda comm: body(comm, False))
    with pytest.raises(ConfigurationError, match="BackwardPrefetch or None"):
        FullyShardedDataParallel(nn.Linear(2, 2), SoloComm(), backward_prefetch="pre")


@pytest.mark.parametrize("named", [True, False])
@on_processes(4)
def test_a_mesh_of_two_dims_with_full_shard_shards_over_its_first(group, named):
    """Ranks that differ in dim 1 get other data."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "other") if named else None)
    row, column = mesh.get_coordinate()
    torch.manual_seed(0)
    model, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    told = rf"dim '{'other' if named else '1'}' exchange nothing.*HYBRID_SHARD"
    with pytest.warns(UserWarning, match=told):
        model = FullyShardedDataParallel(model, device_mesh=mesh)
    model(torch.full((1, 3), 1.0 + row + 10 * column)).sum().backward()
    for other in range(2):
        (plain(torch.full((1, 3), 1.0 + other + 10 * column)).sum() / 2).backward()
    assert {param.ownership.comm.size for param in model.parameters()} == {2}
    torch.testing.assert_close(grads_of(model), grads_of(plain))


def test_nothing_is_a_flat_parameter():
    assert not isinstance(nn.Linear(1, 1).weight, FlatParameter)
    assert not isinstance(fully_shard(nn.Linear(1, 1), mesh=SoloComm()).weight, FlatParameter)
    with pytest.raises(NotSupportedError, match=ShardedParameter.__name__):
        FlatParameter(torch.ones(1))


class TwoTensors(torch.Tensor):
    @staticmethod
    def __new__(cls, a, b):
        made = torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)
        made.a, made.b = a, b
        return made

    def __tensor_flatten__(self):
        return ["a", "b"], None

    def __init__(self, a, b):
        pass

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].a, args[0].b)
        raise NotImplementedError(func)

    def fsdp_pre_all_gather(self, mesh):
        raise AssertionError

    def fsdp_post_all_gather(self, *arguments, **options):
        raise AssertionError


def test_two_inner_tensors_are_refused_by_name():
    model = nn.Module()
    model.weight = nn.Parameter(TwoTensors(torch.ones(2, 2), torch.ones(2, 2)))
    with pytest.raises(NotSupportedError, match="TwoTensors has fsdp_pre_all_gather but not one"):
        fully_shard(model, mesh=SoloComm())


@pytest.mark.parametrize("door", DOORS)
@on_processes(2)
def test_pytorchs_named_optimizer(group, door):
    optim = without_warnings(importlib.import_module, "torch.distributed.optim")

    def built(seed):
        torch.manual_seed(seed)
        model = shard(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6)), group, door, [nn.Linear])
        params = model.named_parameters()
        return model, optim._NamedOptimizer(params, torch.optim.Adam, lr=0.1, module=model)

    model, named = built(0)
    model(torch.ones(1, 6)).sum().backward()
    named.step()
    _, loaded = built(1)
    loaded.init_state()
    loaded.load_state_dict(named.state_dict())
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    plain(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    for each in (named, loaded):
        state = each.state_dict()["state"]
        for name, param in plain.named_parameters():
            expected = optimizer.state[param]
            torch.testing.assert_close({k: whole(v) for k, v in state[name].items()}, expected)


@on_processes(2)
def test_pytorchs_replicate_around_a_unit(group):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))
    plain = copy.deepcopy(model)
    fully_shard(model[0], mesh=group)
    replicate(model, process_group=group)
    for _ in range(2):
        model(torch.full((1, 6), 1.0 + group.rank())).square().sum().backward()
        inputs = torch.stack([torch.full((6,), 1.0), torch.full((6,), 2.0)])
        (plain(inputs).square().sum() / 2).backward()
    torch.testing.assert_close(grads_of(model), grads_of(plain))
