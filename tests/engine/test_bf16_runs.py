# SPDX-License-Identifier: Apache-2.0
"""A run in bf16 beside PyTorch's: what differs is rounding, and nothing races.

A reference with the same arithmetic (a copy in bf16, gradients summed in fp32 in the order of
ranks, norms in fp64) must agree bit for bit, step by step, which no race would allow.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
import torch.nn.functional as F
from support.beside import whole
from support.world import on_processes, without_warnings
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fullshard.torch as ours

WIDTH, WORDS, STEPS = 20, 30, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), Block(), Block(), nn.Linear(WIDTH, WORDS, bias=False)
    )


def _loss(model, step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    text = torch.randint(WORDS, (4, 9), generator=generator)
    return F.cross_entropy(model(text[:, :-1]).float().flatten(0, 1), text[:, 1:].flatten())


def _reference_gradients(model, group, step, reduced):
    """Gradients of a copy in bf16: summed by rank, sent as ``reduced``, divided in fp32."""
    low = copy.deepcopy(model).bfloat16()
    loss = _loss(low, step, group.rank())
    loss.backward()
    for param, lower in zip(model.parameters(), low.parameters(), strict=True):
        parts = [torch.empty_like(lower.grad) for _ in range(group.size())]
        dist.all_gather(parts, lower.grad.contiguous(), group=group)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        param.grad = total.to(reduced).float() / group.size()
    return loss


def _clip_reference(params, most):
    """The norm as exact as fp64 makes it, rounded once for each parameter and once for all."""
    norms = torch.stack([torch.linalg.vector_norm(p.grad.double()).float() for p in params])
    norm = torch.linalg.vector_norm(norms.double()).float()
    for param in params:
        param.grad.mul_(torch.clamp(most / (norm + 1e-6), max=1.0))
    return norm


def _run(kind, group, clip, reduced):
    """For each step the loss, all gradients, the norm, and all parameters."""
    model = _model()
    if kind != "reference":
        library = ours if kind == "ours" else theirs
        policy = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
        mesh = DeviceMesh.from_group(group, "cpu")
        for block in (model[1], model[2], model):
            library.fully_shard(block, mesh=mesh, mp_policy=policy)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=3e-3)
    steps = []
    for step in range(STEPS):
        if kind == "reference":
            loss = _reference_gradients(model, group, step, reduced)
        else:
            loss = _loss(model, step, group.rank())
            loss.backward()
        seen = [loss.detach(), *(whole(param.grad).clone() for param in params)]
        if clip and kind == "reference":
            seen.append(_clip_reference(params, clip))
        elif clip:
            seen.append(whole(nn.utils.clip_grad_norm_(params, clip)))
        optimizer.step()
        optimizer.zero_grad()
        steps.append([*seen, *(whole(param).clone() for param in params)])
    return steps


def _same_bits(first, second):
    """How many steps of two runs are equal bit for bit."""
    for step, (one, other) in enumerate(zip(first, second, strict=True)):
        if not all(map(torch.equal, one, other)):
            return step
    return STEPS


@pytest.mark.parametrize(
    ("world", "clip", "reduced"),
    [(2, 0.0, torch.float32), (3, 0.3, torch.float32), (3, 0.0, torch.bfloat16)],
)
@on_processes("world")
def test_a_run_in_bf16_has_the_bits_of_a_reference(group, world, clip, reduced):
    def run(kind):
        return without_warnings(_run, kind, group, clip, reduced)

    ours, theirs = run("ours"), run("theirs")
    assert _same_bits(ours, run("reference")) == STEPS
    if world == 2 and not clip:  # two numbers have one sum, whatever the order
        assert _same_bits(ours, theirs) == STEPS
    for one, other in zip(ours, theirs, strict=True):
        assert (one[0] - other[0]).abs() < 2**-8  # of about 3.4: one digit of bf16
