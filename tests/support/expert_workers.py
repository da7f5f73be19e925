# SPDX-License-Identifier: Apache-2.0
"""The mixture of experts of ``examples/experts.py`` on all ranks that have joined."""

import runpy
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from support.models import seeded
from support.trials import tried_once
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.torch import (
    FullyShardedDataParallel,
    communication,
    fully_shard,
    load_checkpoint,
    save_checkpoint,
    shard_experts,
)

WIDTH, HIDDEN, EXPERTS = 8, 16, 8
ACTIVE = 2
ROWS = 5  # of each rank and micro-batch
STEPS = 5
MAX_NORM = 0.05


@cache
def example():
    """The names of the example that the pages show."""
    return runpy.run_path(str(Path(__file__).parents[2] / "examples" / "experts.py"))


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Nobody ever chooses expert 0."""

    def __init__(self, kind, group=None):
        super().__init__()
        if kind == "list":
            experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        else:
            experts = example()["Experts"](EXPERTS, WIDTH, HIDDEN)
        mixture = example()["MixtureOfExperts"]
        self.before = nn.Linear(WIDTH, WIDTH)
        self.mixture = mixture(experts, WIDTH, active=ACTIVE, count=EXPERTS, group=group)
        self.mixture.router = nn.Linear(WIDTH, EXPERTS)
        self.mixture.router.bias.data[0] = -100.0
        self.after = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.after(x + self.mixture(torch.tanh(self.before(x)))).square().mean()


def whole(kind="stacked", group=None):
    return seeded(lambda: Net(kind, group)).double()


def batches(ranks, micro_batches):
    """The rows of each step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(5)
    shape = (STEPS, micro_batches, ranks, ROWS, WIDTH)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


@dataclass
class Trained:
    norms: list
    grads: dict  # of the first step, whole
    params: dict  # after the last, whole
    sent_bytes: dict  # by unit, for sharding in a step; and "rows", for rows of the first step


class SentRows(TorchDispatchMode):
    """Counts the bytes of rows that leave this rank for others."""

    def __init__(self, group):
        super().__init__()
        self.rank, self.bytes = group.rank(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "_c10d_functional.all_to_all_single" in str(function):
            rows, _, to = args[:3]
            away = sum(to) - to[self.rank]
            self.bytes += away * rows[0].numel() * rows.itemsize if len(rows) else 0
        return function(*args, **(kwargs or {}))


def sharded(kind, experts, shards, door="fully_shard", **options):
    """The model on a mesh of experts times shards, and that mesh."""
    mesh = init_device_mesh("cpu", (shards, experts), mesh_dim_names=("shard", "expert"))
    model = whole(kind, mesh.get_group("expert"))
    mixture = model.mixture
    mixture.experts = shard_experts(mixture.experts, mesh=mesh, experts="expert", **options)
    if door == "wrapper":
        return FullyShardedDataParallel(model, align="row"), mesh
    fully_shard(model.before)
    return fully_shard(model), mesh


class StackedMuon(torch.optim.Optimizer):
    """Muon as code bases with stacked experts write it: products of all of a stack in one call."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                state["momentum"].lerp_(param.grad, 0.1)
                norms = state["momentum"].norm(dim=(-2, -1), keepdim=True)
                update = state["momentum"] / (norms + 1e-7)
                for _ in range(5):
                    gram = update @ update.mT
                    update = 3.4445 * update + (-4.775 * gram + 2.0315 * gram @ gram) @ update
                param.sub_(update, alpha=group["lr"])


def adamw(model):
    return [torch.optim.AdamW(model.parameters(), lr=0.05)]


def muon_for_experts(model):
    stacks = [param for param in model.parameters() if param.dim() == 3]
    others = [param for param in model.parameters() if param.dim() < 3]
    return [StackedMuon(stacks), torch.optim.AdamW(others, lr=0.05)]


def train(
    kind, experts, shards, micro_batches, *,
    door="fully_shard", keeps=False, folder=None, make=adamw, **options,
):  # fmt: skip
    """Steps on experts times shards ranks; with ``folder`` the last two on what is loaded there.

    With ``keeps`` gradients are kept whole until the last micro-batch.
    """
    model, mesh = sharded(kind, experts, shards, door, **options)
    return steps_of(model, mesh, micro_batches, keeps=keeps, folder=folder, make=make)


@tried_once()
def steps_of(model, mesh, micro_batches, *, keeps=False, folder=None, make=adamw):
    optimizers = make(model)
    data = batches(mesh.size(), micro_batches)
    rank = mesh.mesh.flatten().tolist().index(dist.get_rank())
    first = 0
    if folder is not None:
        first = load_checkpoint(folder, model, named(optimizers)).step
    norms, grads, rows = [], {}, SentRows(model.mixture.group)
    for step in range(first, STEPS):
        for number, micro_batch in enumerate(data[step]):
            if keeps:
                model.set_requires_gradient_sync(number == micro_batches - 1)
            if step:
                (model(micro_batch[rank]) / micro_batches).backward()
            else:
                with rows:
                    (model(micro_batch[rank]) / micro_batches).backward()
        if not step:
            grads = {name: full(p.grad.detach()) for name, p in model.named_parameters()}
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    params = {name: full(param.detach()) for name, param in model.named_parameters()}
    sent = {name: sent.total_bytes for name, sent in communication(model).units.items()}
    return Trained(norms, grads, params, {**sent, "rows": rows.bytes})


def named(optimizers):
    return {f"optimizer {number}": each for number, each in enumerate(optimizers)}


@tried_once()
def train_and_save(kind, experts, shards, folder, steps, make=adamw, **options):
    """The first steps of `train`, kept in ``folder``."""
    model, _ = sharded(kind, experts, shards, **options)
    optimizers = make(model)
    for micro_batches in batches(experts * shards, 1)[:steps]:
        model(micro_batches[0, dist.get_rank()]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    save_checkpoint(folder, model, named(optimizers), step=steps)
