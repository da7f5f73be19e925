# SPDX-License-Identifier: Apache-2.0
"""Frozen beside trainable (LoRA), 4-bit storage, complex numbers, notes on parameters."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.models import seeded
from support.tensor_classes import Halved
from support.threads import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard.core.errors import NotSupportedError
from fullshard.testing import LocalWorld
from fullshard.torch import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    tracing,
)
from fullshard.torch.step.managed import managed_unit_of


class LoRA(nn.Module):
    """A frozen bf16 linear layer with a trained fp32 update of low rank."""

    def __init__(self, base, rank=8):
        super().__init__()
        self.base = base.bfloat16().requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 10)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x.bfloat16()).float() + x @ self.down.t() @ self.up.t()


class FourBit(nn.Module):
    """Weights packed two to a byte, frozen; a trained adapter beside them."""

    def __init__(self):
        super().__init__()
        codes = torch.arange(35, dtype=torch.uint8) * 7 % 251
        self.packed = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.1))
        self.adapter = nn.Parameter(torch.eye(7, 10) / 10)

    def forward(self, x):
        low, high = self.packed & 15, self.packed >> 4
        weight = (torch.stack([low, high], 1).flatten().to(x.dtype) - 7.5) * self.scale
        return F.linear(x, (weight.view(10, 7) + self.adapter.t()).to(x.dtype))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"offload_policy": CPUOffloadPolicy()},
        {"mp_policy": MixedPrecisionPolicy(torch.float64)},
    ],
    ids=str,
)
def test_four_bit_storage(options):
    plain = FourBit()
    plain(torch.ones(2, 7)).square().mean().backward()
    bytes_ = plain.packed.clone()

    def body(comm):
        model = fully_shard(FourBit(), mesh=comm, **options)
        assert model.packed.dtype is torch.uint8
        model(torch.ones(2, 7)).square().mean().backward()
        assert torch.equal(model.packed.full_tensor(), bytes_)
        assert model.packed.grad is None
        return model.adapter.grad.full_tensor(), model.scale.grad.full_tensor()

    for adapter, scale in LocalWorld(3).run(body):
        torch.testing.assert_close(adapter, plain.adapter.grad)
        torch.testing.assert_close(scale, plain.scale.grad)


class Rotation(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(3, 5, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.turn).abs() + self.bias


@pytest.mark.parametrize("policy", [None, torch.bfloat16])
def test_complex_parameters(policy):
    plain = seeded(Rotation)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    plain(torch.ones(2, 3)).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    optimizer.step()

    def body(comm):
        mp_policy = MixedPrecisionPolicy(policy, torch.float32, cast_forward_inputs=False)
        model = fully_shard(seeded(Rotation), mesh=comm, mp_policy=mp_policy)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model(torch.ones(2, 3)).square().mean().backward()
        found = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return found.full_tensor(), model.turn.full_tensor(), model.bias.full_tensor()

    tolerance = {"rtol": 2e-2, "atol": 2e-2} if policy else {"rtol": 1e-5, "atol": 1e-6}
    for found, turn, bias in LocalWorld(3).run(body):
        torch.testing.assert_close(found, norm, **tolerance)
        torch.testing.assert_close(turn, plain.turn.detach(), **tolerance)
        torch.testing.assert_close(bias, plain.bias.detach(), **tolerance)


@on_ranks(2)
def test_what_users_note_on_parameters_stays(comm):
    model = nn.Linear(3, 3)
    model.weight.no_decay = True
    seen = []
    model.register_forward_hook(lambda m, a, o: seen.append(m.weight.no_decay))
    fully_shard(model, mesh=comm)
    model(torch.ones(1, 3))
    assert seen == [True]
    assert model.weight.no_decay
    assert not hasattr(model.bias, "no_decay")


@on_ranks(2)
def test_an_empty_unit_is_never_gathered(comm):
    model = nn.Sequential(nn.ReLU(), nn.Linear(3, 3))
    fully_shard(model[0], mesh=comm)
    fully_shard(model, mesh=comm)
    with tracing(model) as trace:
        model(torch.ones(1, 3)).sum().backward()
        assert model[0].unshard() is None
        model[0].unshard(async_op=True).wait()
        model[0].reshard()
    assert managed_unit_of(model[0]).unit.params == []
    assert {record.unit for record in trace.records} == {"(root)"}


class WithHalved(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(Halved(torch.randn(5, 7)))
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("frozen", [False, True])
def test_classes_that_decide_what_travels(frozen):
    plain = seeded(WithHalved)
    inner = plain.weight.inner
    weight = nn.Parameter(inner.half().float())

    def body(comm):
        model = seeded(WithHalved)
        model.weight.requires_grad_(not frozen)
        fully_shard(model, mesh=comm)
        assert "inner" not in model.weight.__dict__  # the whole parameter
        found = []
        for _ in range(2):
            out = model(torch.ones(2, 7))
            with tracing(model) as trace:
                out.sum().backward()
            found.append(out.detach())
        assert torch.equal(model.weight.full_tensor(), inner)
        assert trace.records[-1].live_bytes == 0
        grad = None if frozen else model.weight.grad.full_tensor()
        return found, grad

    expected = F.linear(torch.ones(2, 7), weight, plain.bias)
    for found, grad in LocalWorld(3).run(body):
        for each in found:
            torch.testing.assert_close(each, expected.detach())
        assert frozen or torch.equal(grad, torch.full((5, 7), 4.0))


@on_ranks(2)
def test_classes_that_decide_what_travels_leave_nothing_when_their_gather_fails(comm):
    model = fully_shard(seeded(WithHalved), mesh=comm)
    x, full = torch.ones(2, 7), managed_unit_of(model).unit.full
    model(x).sum().backward()

    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError

    full._all_gather, gather = out_of_memory, full._all_gather
    with pytest.raises(torch.OutOfMemoryError):
        model(x)
    assert full.bytes == 0
    full._all_gather = gather
    out = model(x)
    weight, bias = model.weight.full_tensor(), model.bias.full_tensor()
    torch.testing.assert_close(out, F.linear(x, weight.half().float(), bias))


@on_ranks(4)
def test_classes_that_decide_what_travels_need_all_ranks(comm):
    with pytest.raises(NotImplementedError, match="has parameters with fsdp_pre_all_gather"):
        fully_shard(seeded(WithHalved), mesh=comm, reshard_after_forward=2)


@on_ranks(2)
def test_classes_that_decide_what_travels_are_tied_before(comm):
    model = nn.Sequential(seeded(WithHalved), seeded(lambda: nn.Linear(5, 7)), seeded(WithHalved))
    for module in (*model, model):
        fully_shard(module, mesh=comm)
    model[2].weight = model[0].weight
    with pytest.raises(NotSupportedError, match=r"'0\.weight' and '2\.weight' were tied after"):
        model(torch.ones(2, 7))


class Asking(Halved):
    """Notes what its hook is told before a gather."""

    told = None

    @staticmethod
    def __tensor_unflatten__(inner, context, shape, stride):
        return Asking(inner["inner"])

    def fsdp_pre_all_gather(self, mesh, size, stride, module, mp_policy):
        Asking.told = mesh, size, stride, module, mp_policy
        return super().fsdp_pre_all_gather(mesh)


@pytest.mark.parametrize("dims", [("shard",), ("replicate", "shard"), None])
def test_classes_that_decide_what_travels_are_told_what_fsdp2_tells_them(dims):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        shape = (4,) if dims == ("shard",) else (2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=dims)
        layer, policy = nn.Linear(7, 8), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        layer.weight = nn.Parameter(Asking(torch.randn(8, 7)))
        fully_shard(layer, mesh=mesh, mp_policy=policy, check_values=False)
        layer.unshard()
        slices, *rest = Asking.told
        assert rest == [(8, 7), (7, 1), layer, policy]
        assert slices.ndim == 1
        assert slices.get_group() == mesh.get_group(mesh.ndim - 1)
    finally:
        dist.destroy_process_group()


class Doubled(Halved):
    """Sends every element twice."""

    @staticmethod
    def __tensor_unflatten__(inner, context, shape, stride):
        return Doubled(inner["inner"])

    def fsdp_pre_all_gather(self, mesh):
        return (self.inner.repeat(2),), "a note"


@on_ranks(2)
def test_classes_that_decide_what_travels_send_an_element_for_each(comm):
    layer = nn.Linear(7, 5)
    layer.weight = nn.Parameter(Doubled(torch.ones(5, 7)))
    fully_shard(layer, mesh=comm)
    with pytest.raises(NotSupportedError, match=r"'weight': .* one for each is supported"):
        layer(torch.ones(2, 7))


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.outside = nn.Sequential(WithHalved()), nn.Identity()
        self.outside.shared = self.inside[0]


@on_ranks(2)
def test_a_shared_module_cannot_give_such_parameters_up(comm):
    model = Around()
    fully_shard(model.inside, mesh=comm)
    with pytest.raises(NotSupportedError, match=r"weight' is shared by several units"):
        fully_shard(model, mesh=comm)
