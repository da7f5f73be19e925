# SPDX-License-Identifier: Apache-2.0
"""Programs around the step: models changed after sharding, odd arguments, use of parameters."""

import copy
import dataclasses
import tempfile
from collections import namedtuple

import torch
from support.models import GPT
from torch import nn
from torch.nn import functional as F

from device.by_hand import layers
from device.programs import BF16, Stack, adamw, gpt, program, shard
from fullshard import torch as ours
from fullshard.report import recording
from fullshard.torch.step.managed import managed_unit_of
from fullshard.torch.step.structures import tensors_with_gradients


def run_through(model, width=8):
    model(torch.zeros(2, width, device="cuda", requires_grad=True)).sum().backward()


# ---- changes after sharding ---------------------------------------------------------------------


@program("thawed between steps", steps=4)
def _(job):
    model = gpt()
    model.blocks[0].attention.requires_grad_(False)
    shard(model, job.mesh)

    def toggle(number):
        model.blocks[0].attention.requires_grad_(number % 2 == 0)

    job.train(model, before_step=toggle)


def _fill(model, put_in):
    """Give parameters that come from the meta device values, in place or by others put in."""
    for path, param in list(model.named_parameters()):
        owner, _, name = path.rpartition(".")
        if put_in:
            value = nn.Parameter(torch.zeros(param.shape, device="cuda"))
            setattr(model.get_submodule(owner), name, value)
        else:
            nn.init.normal_(model.get_parameter(path))


@program("from the meta device, tied after sharding", syncs=("changes.py:check_initialised",))
def _(job):
    model = shard(gpt("meta"), job.mesh)
    _fill(model.to_empty(device="cuda"), False)
    model.head.weight = model.embed.weight
    job.train(model)


@program("weights put in after sharding", syncs=("changes.py:check_initialised",))
def _(job):
    model = shard(gpt("meta"), job.mesh)
    _fill(model, True)
    job.train(model)


@program("tied to a parameter that an inner unit has")
def _(job):
    with torch.device("cuda"):
        model = GPT(width=96, tied=True)
    for module in (model.embed, model.head, *model.blocks, model):
        ours.fully_shard(module, mesh=job.mesh, check_values=False)
    job.train(model)


# ---- what modules are given, return and do ------------------------------------------------------

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    more: object = None


class Passing(nn.Linear):
    """Takes its input out of a structure, and returns it in another one."""

    def forward(self, given):
        if isinstance(given, torch.Tensor):
            return Record(super().forward(given), [1])
        if isinstance(given, Record):
            return {"x": super().forward(given.x)}
        if isinstance(given, dict):
            return Pair(super().forward(given["x"]), None)
        return super().forward(given[0])


@program("structures of every kind")
def _(job):
    with torch.device("cuda"):
        model = Stack([Passing(8, 8) for _ in range(4)])
    policy = ours.MixedPrecisionPolicy(**BF16, output_dtype=torch.float32)
    shard(model, job.mesh, mp_policy=policy)

    def forward(x):
        for block in model.blocks:
            x = block(x)
            (result,) = tensors_with_gradients(x)
            if result.dtype is not torch.float32:
                job.machine.find("a tensor in a structure has not the output's dtype")
            if block is not model.blocks[-1] and managed_unit_of(block).unit.is_full:
                job.machine.find("a block is full after its forward")
        return result

    model.forward = forward
    job.train(model, each_step=lambda _: run_through(model))


class Holder(nn.Module):
    """Has weights in a list and a dict, runs within itself, and leaves a tensor behind."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weights, self.more = [self.inner.weight], {"bias": self.inner.bias}

    def forward(self, x, again=True):
        x = self(self.other(x), again=False) if again else x
        self.seen = self.inner(x) @ self.weights[0] + self.more["bias"]
        return self.outer(self.seen)

    def other(self, x):
        return self.outer(x) + self.inner(x)


@program("methods beside forward, and weights in lists")
def _(job):
    with torch.device("cuda"):
        model = Stack([Holder() for _ in range(3)])
    shard(model, job.mesh)
    for block in model.blocks:
        ours.register_fsdp_forward_method(block, "other")

    def loss(model):
        x = torch.zeros(2, 8, device="cuda", requires_grad=True)
        for block in model.blocks:
            x = block(block.other(x)) + block.seen
        return x.sum()

    job.train(model, loss=loss)


class Leaving(nn.Linear):
    """Returns nothing, and leaves its result behind."""

    def forward(self, x):
        self.seen = super().forward(x)


@program("attributes alone lead back")
def _(job):
    with torch.device("cuda"):
        model = Stack([Leaving(8, 8) for _ in range(3)])
    shard(model, job.mesh)

    def forward(x):
        for block in model.blocks:
            block(x)
            x = block.seen
        return x

    model.forward = forward
    job.train(model, each_step=lambda _: run_through(model))


@program("traced and profiled", syncs=("event.synchronize in streams.py:elapsed_s",))
def _(job):
    model = shard(gpt(), job.mesh)

    def each_step(_):
        with ours.tracing(model), torch.profiler.profile():
            job.loss(model).backward()
        str(ours.describe(model)), str(ours.memory_summary(model)), str(ours.communication(model))

    job.train(model, each_step=each_step)


@program("recorded", syncs=("event.synchronize in streams.py:elapsed_s",))
def _(job):
    model = shard(gpt(), job.mesh)
    optimizer = adamw(model)
    with tempfile.TemporaryDirectory() as folder, recording(folder, model, optimizer) as run:
        job.train(model, optimizer)
        run.note(tokens=16)
        assert not job.machine.syncs  # as long as the device has reached nothing, nothing is read


# ---- parameters ---------------------------------------------------------------------------------


@torch.no_grad()
def _operate(weight, bias):
    other = weight.detach().clone()
    weight.add_(torch.lerp(weight, other, 0.5)).addcmul_(other, other).masked_fill_(other > 2, 0)
    torch.add(weight, 1, out=other)
    weight.view(-1), weight.reshape(weight.shape), weight.flatten(), weight.unsqueeze(0)
    weight[:8], weight[3], weight.narrow(0, 0, 8), weight.new_zeros(8), weight.new_ones(64, 64)
    weight[weight > 1] = 0
    torch.zeros_like(weight), torch.randn_like(weight), torch.where(weight > 0, weight, 0.0)
    weight.amax(), weight.amin(), weight.max(), weight.min(), weight.isnan().any(), weight.var()
    F.mse_loss(weight, other), F.l1_loss(weight, other, reduction="sum")
    F.smooth_l1_loss(weight, other, reduction="none"), weight.all(), weight.bfloat16()
    torch.linalg.vector_norm(weight, 3), torch.linalg.vector_norm(weight, float("inf"))
    nn.utils.get_total_norm([weight, bias], 1.0), copy.deepcopy(weight), copy.copy(weight)
    str(weight), weight.device_mesh, nn.init.eye_(weight), nn.init.trunc_normal_(weight)
    nn.init.constant_(bias, 1.0), bias.fill_(0), torch._foreach_norm([weight, bias])
    torch._foreach_mul_([weight, bias], 2.0), torch._foreach_copy_([other], [weight])


@program("operations on parameters", syncs=("_local_scalar_dense in the program",))
def _(job):
    model = shard(layers(Stack, 3, 64), job.mesh)

    def operate(_):
        for layer in model.blocks:
            _operate(layer.weight, layer.bias)

    job.train(model, before_step=operate, each_step=lambda _: run_through(model, 64))


@program("state dicts by element, and values lent for a call", syncs=("agreement.py",))
def _(job):
    model = shard(layers(Stack, 3, 66), job.mesh, align="element")

    def save_load_and_lend(_):
        values = {name: value.full_tensor() for name, value in model.state_dict().items()}
        model.load_state_dict(values)
        torch.func.functional_call(model, values, torch.zeros(2, 66, device="cuda")).sum()

    job.train(model, before_step=save_load_and_lend, each_step=lambda _: run_through(model, 66))


@program("blocks sharded alone, beside plain parameters")
def _(job):
    model = gpt()
    for block in model.blocks:
        ours.fully_shard(block, mesh=job.mesh, check_values=False)
    job.train(model)
