# SPDX-License-Identifier: Apache-2.0
"""A run in bf16 through fullshard, PyTorch and plain arithmetic."""

import copy

import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
import torch.nn.functional as F
from support.world import without_warnings
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fullshard.torch as ours

WIDTH, WORDS, STEPS = 20, 30, 4


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


def _full(tensor):
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone()


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
        seen = [loss.detach(), *(_full(param.grad) for param in params)]
        if clip and kind == "reference":
            seen.append(_clip_reference(params, clip))
        elif clip:
            seen.append(_full(nn.utils.clip_grad_norm_(params, clip)))
        optimizer.step()
        optimizer.zero_grad()
        steps.append([*seen, *map(_full, params)])
    return steps


def _same_bits(first, second):
    """How many steps of two runs are equal bit for bit."""
    for step, (one, other) in enumerate(zip(first, second, strict=True)):
        if not all(map(torch.equal, one, other)):
            return step
    return STEPS


def equal_steps(group, clip, reduced):
    """How many of the steps are equal, bit for bit, in pairs of runs."""
    return without_warnings(_equal_steps, group, clip, reduced)


def _equal_steps(group, clip, reduced):
    runs = {kind: _run(kind, group, clip, reduced) for kind in ("ours", "theirs", "reference")}
    return {
        "ours twice": _same_bits(runs["ours"], _run("ours", group, clip, reduced)),
        "PyTorch's twice": _same_bits(runs["theirs"], _run("theirs", group, clip, reduced)),
        "ours and the reference": _same_bits(runs["ours"], runs["reference"]),
        "ours and PyTorch's": _same_bits(runs["ours"], runs["theirs"]),
        "losses apart": max(
            float((one[0] - other[0]).abs())
            for one, other in zip(runs["ours"], runs["theirs"], strict=True)
        ),
    }
