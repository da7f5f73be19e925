# SPDX-License-Identifier: Apache-2.0
"""Frozen parameters of tensor classes with data and scales, as a base for LoRA."""

import pytest
import torch
import torch.nn.functional as F
from support.beside import shard
from support.owned_matrices import kind_of
from support.tensor_classes import Rows8
from torch import nn

import fullshard.torch as fs
from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.testing import LocalComm, LocalWorld


class Lora(nn.Module):
    """A frozen base of ``kind``, as which forward must see it, and two trained matrices."""

    def __init__(self, rows, columns, kind):
        super().__init__()
        quantise, self.kind, self.linear = KINDS[kind]()
        value = torch.randn(columns, rows)
        self.base = nn.Parameter(quantise(value), requires_grad=False)
        self.norm = nn.Parameter(torch.ones(rows), requires_grad=False)
        self.down, self.up = nn.Linear(rows, 4, bias=False), nn.Linear(4, columns, bias=False)

    def forward(self, x):
        assert type(self.base) is self.kind
        return self.linear(x * self.norm, self.base) + self.up(self.down(x))


def rows_of_8():
    return Rows8.rounded, Rows8, lambda x, base: F.linear(x, base.value())


def nf4():
    path = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"
    to_nf4, linear = kind_of(f"{path}.to_nf4"), kind_of(f"{path}.linear_nf4")
    return lambda value: to_nf4(value, 32, 32), kind_of(f"{path}.NF4Tensor"), linear


def of_torchao(config):
    def make():
        config_of, quantize = (
            kind_of(f"torchao.quantization.{name}") for name in (config, "quantize_")
        )

        def quantise(value):
            layer = nn.Linear(*reversed(value.shape), bias=False).requires_grad_(False)
            layer.weight.copy_(value)
            quantize(layer, config_of())
            return layer.weight

        return quantise, type(quantise(torch.ones(32, 32))), F.linear

    return make


def mxfp8():
    path = "torchao.prototype.mx_formats.mx_tensor.MXTensor"
    kind = kind_of(path)
    return (
        lambda value: kind.to_mx(value.bfloat16(), torch.float8_e4m3fn, 32),
        kind,
        lambda x, base: F.linear(x, base.dequantize(torch.bfloat16).float()),
    )


KINDS = {
    "rows of 8 bits": rows_of_8,
    "NF4": nf4,
    "int8": of_torchao("Int8WeightOnlyConfig"),
    "float8": of_torchao("Float8WeightOnlyConfig"),
    "MXFP8": mxfp8,
}
INPUTS = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))


def nets(kind, count):
    """Equal models, made one by one: not all of these classes can be copied."""
    made = []
    for _ in range(count):
        torch.manual_seed(0)
        made.append(nn.Sequential(Lora(64, 96, kind), nn.GELU(), Lora(96, 64, kind)))
    return made


def sharded(model, comm, **options):
    for layer in (model[0], model[2]):
        fs.fully_shard(layer, mesh=comm, **options)
        layer.set_gradient_divide_factor(1.0)
    return fs.fully_shard(model, mesh=comm, **options)


def wrapped(model, comm):
    return shard(model, comm, "wrapper", [Lora], use_orig_params=True)


def inner_tensors(param):
    if type(param) is nn.Parameter:
        return [param]
    return [getattr(param, name) for name in param.__tensor_flatten__()[0]]


def train(model, factor=1.0):
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for _ in range(3):
        (model(INPUTS).square().mean() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return model(INPUTS)


@pytest.mark.parametrize("options", [{}, {"align": "element"}, {"align": "matrix"}, "offload"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_beside_a_frozen_base_is_that_of_one_process(kind, options):
    if options == "offload":
        options = {"offload_policy": fs.CPUOffloadPolicy()}
    expected = train(nets(kind, 1)[0])
    for world in (1, 2, 3):
        models = nets(kind, world)

        def body(comm, models=models):
            model = sharded(models[comm.rank], comm, **options)
            frozen = [p for p in model.parameters() if p.dtype == torch.uint8]
            assert sum(p.local.numel() for p in frozen) < (10_000 if comm.size > 1 else 15_000)
            return train(model, float(comm.rank == 0))

        for value in LocalWorld(world).run(body):
            assert torch.equal(value, expected), world


def test_bytes_travel_in_the_one_call_of_their_unit(monkeypatch):
    calls, gather = [], LocalComm.all_gather

    def counting(comm, pairs, label=""):
        calls.append([shard.dtype for _, shard in pairs])
        return gather(comm, pairs, label)

    def body(comm):
        model = sharded(models[comm.rank], comm, align="element")
        with torch.no_grad():
            model(INPUTS)

    models = nets("rows of 8 bits", 2)
    monkeypatch.setattr(LocalComm, "all_gather", counting)
    LocalWorld(2).run(body)
    assert len(calls) == 2 * 2  # two units, on two ranks
    assert all(sorted(map(str, of)) == ["torch.float32"] * 2 + ["torch.uint8"] for of in calls)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_and_state_dicts_bring_every_bit_to_other_ranks(kind, tmp_path):
    (plain,) = nets(kind, 1)
    with torch.no_grad():
        expected = plain(INPUTS)

    def zero(model):
        for param in model.parameters():
            param.detach().local.zero_()
        return model

    def save(comm):
        model = sharded(models[comm.rank], comm)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        zero(model).load_state_dict(kept)
        fs.save_checkpoint(tmp_path, model, step=1)

    def load(comm):
        model = zero(wrapped(models[comm.rank], comm))
        fs.load_checkpoint(tmp_path, model)
        with torch.no_grad():
            return model(INPUTS)

    def load_of_one_process(comm):
        model = zero(sharded(models[comm.rank], comm))
        model.load_state_dict(plain.state_dict())
        with torch.no_grad():
            return model(INPUTS)

    models = nets(kind, 3)
    LocalWorld(3).run(save)
    for body, world in ((load, 2), (load_of_one_process, 3)):
        models = nets(kind, world)
        assert all(torch.equal(value, expected) for value in LocalWorld(world).run(body))
    for (other,) in (nets(kind, 1), nets(kind, 1)):  # what the second loads the first has saved
        for param in other.parameters():
            for each in inner_tensors(param):
                each.detach().zero_()
        fs.load_checkpoint(tmp_path, other)
        with torch.no_grad():
            assert torch.equal(other(INPUTS), expected)
        fs.save_checkpoint(tmp_path, other, step=2)
    models = nets(kind, 2)
    assert all(torch.equal(value, expected) for value in LocalWorld(2).run(load))


@pytest.mark.usefixtures("checked_values")
def test_ranks_that_start_with_other_scales_are_told():
    models = nets("rows of 8 bits", 2)
    models[1][0].base.scale[3] *= 2

    def body(comm):
        with pytest.raises(ConfigurationError, match=r"(?s)different values of 1 of .*base"):
            fs.fully_shard(models[comm.rank], mesh=comm)

    LocalWorld(2).run(body)


def test_a_trained_parameter_of_two_inner_tensors_is_refused():
    class Hooked(Rows8):
        def fsdp_pre_all_gather(self, mesh):
            raise AssertionError

        fsdp_post_all_gather = fsdp_pre_all_gather

    class Pair(Hooked):
        def __tensor_flatten__(self):
            return ["codes", "more"], (self.dtype,)

        @property
        def more(self):
            return self.codes

    def refused(kind, said):
        layer = nn.Module()
        layer.weight = nn.Parameter(kind.rounded(torch.ones(4, 4)))

        def body(comm):
            for door in (lambda: fs.fully_shard(layer, mesh=comm), lambda: wrapped(layer, comm)):
                with pytest.raises(NotSupportedError, match=said):
                    door()

        LocalWorld(1).run(body)

    refused(Pair, r"Pair has fsdp_pre_all_gather.*requires_grad_")
    refused(Hooked, r"Hooked has fsdp_pre_all_gather.*scale \(4, 1\).*requires_grad_")
    refused(Rows8, r"'weight' is trained and a Rows8, .*\(codes, scale\).*requires_grad_")
