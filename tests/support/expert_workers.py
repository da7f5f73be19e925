# SPDX-License-Identifier: Apache-2.0
"""The mixture of experts of ``examples/experts.py`` on all ranks that have joined."""

import runpy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from support.models import seeded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.torch import (
    FullyShardedDataParallel,
    communication,
    fully_shard,
    load_checkpoint,
    save_checkpoint,
    shard_experts,
    tracing,
)
from fullshard.torch.state.apart import looks_beyond

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


def train_hybrid():
    """Steps on a mesh of replicas, slices and experts."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "expert"))
    model = whole("stacked", mesh.get_group("expert"))
    shard_experts(model.mixture.experts, mesh=mesh, experts="expert")
    return steps_of(fully_shard(model), mesh, 1)


class _CopyToTensorRanks(torch.autograd.Function):
    """What goes into a product that is cut over ``group``: its gradient is a sum over the ranks."""

    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone(), group=ctx.group)
        return grad, None


class _SumOfTensorRanks(torch.autograd.Function):
    """What comes out of it is a sum, whose gradient all ranks have."""

    @staticmethod
    def forward(ctx, rows, group):
        dist.all_reduce(rows := rows.clone(), group=group)
        return rows

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def tensor_parallel(experts, tensor):
    """Cut the hidden dimension of stacked ``experts`` over the ranks of the mesh ``tensor``."""
    for name, dim in (("up", 2), ("down", 1)):
        param = experts.get_parameter(name)
        setattr(experts, name, nn.Parameter(distribute_tensor(param.data, tensor, [Shard(dim)])))
    forward, group = experts.forward, tensor.get_group()

    def cut(rows, counts):
        rows = forward(_CopyToTensorRanks.apply(rows, group), counts)
        return _SumOfTensorRanks.apply(rows, group)

    experts.forward = cut


def train_beside_tensor_parallelism(experts, shards, door="fully_shard", folder=None):
    """Steps with two ranks of tensor parallelism in each place of the mesh of experts and slices.

    With ``folder`` the last two, on what is loaded there.
    """
    names = ("shard", "expert", "tensor")
    mesh = init_device_mesh("cpu", (shards, experts, 2), mesh_dim_names=names)
    model = whole("stacked", mesh.get_group("expert"))
    tensor_parallel(model.mixture.experts, mesh["tensor"])
    shard_experts(model.mixture.experts, mesh=mesh, experts="expert")
    data = mesh["shard", "expert"]._flatten("data")
    if door == "wrapper":
        model = FullyShardedDataParallel(model, process_group=data.get_group(), align="row")
    else:
        fully_shard(model, mesh=data)
    return steps_of(model, data, 1, folder=folder)


def train_by_parameter():
    """Steps on four ranks, with a mesh for the experts' parameters beside that of the others."""
    # torch keeps what it knows of equal meshes, also of those of a world that has ended.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("slices", "places"))
    model = whole("stacked", mesh.get_group("places"))
    experts = model.mixture.experts
    for name, param in list(experts.named_parameters()):
        part = param.data.chunk(2)[mesh.get_local_rank("places")].clone()
        dealt = DTensor.from_local(part, mesh["places"], [Shard(0)], run_check=False)
        setattr(experts, name, nn.Parameter(dealt))
    shared = SimpleNamespace(mesh=mesh["slices"], shard_mesh_dim=0, replicate_mesh_dim=None)
    inside = set(experts.parameters())

    def chosen(param):
        return SimpleNamespace(placement=None, mesh_info=shared) if param in inside else Shard(0)

    fully_shard(model.before)
    fully_shard(model.mixture, shard_placement_fn=chosen)
    model.before.set_modules_to_forward_prefetch([model.mixture])
    zeros = torch.zeros(1, WIDTH, dtype=torch.float64)
    fully_shard(model)(zeros).backward()
    with tracing(model) as trace:
        model(zeros).backward()
    model.zero_grad()
    experts.set_gradient_divide_factor(4.0)  # tokens of all ranks reach them
    torn = nn.Sequential(nn.Linear(4, 4))
    torn[0].other = nn.Parameter(distribute_tensor(torch.ones(4), mesh["places"], [Shard(0)]))
    inside.add(torn[0].other)
    text = refused(fully_shard, torn, shard_placement_fn=chosen)
    order = [(record.op, record.unit) for record in trace.records]
    return steps_of(model, mesh, 1), type(torn).__name__, text, order


def ignore():
    """Placements of what is dealt out, and what is left alone, on two ranks."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "expert"))
    model = whole(group=mesh.get_group("expert"))
    experts = model.mixture.experts
    experts.scale = scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
    shard_experts(experts, mesh=mesh, experts="expert", ignored_params={scale})
    fully_shard(model, ignored_params={scale})
    model(batches(2, 1)[0, 0, dist.get_rank()]).backward()
    return experts.scale is scale, tuple(experts.up.to_local().shape)


def refused(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except (ConfigurationError, NotSupportedError) as error:
        return str(error)
    raise AssertionError("it was not refused")


def tensor_mistakes():
    """Return the texts of the errors beside tensor parallelism, on two ranks."""
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("shard", "expert", "tensor"))
    by_experts, elsewhere = whole().mixture.experts, whole().mixture.experts
    by_experts.up = nn.Parameter(distribute_tensor(by_experts.up.data, mesh["tensor"], [Shard(0)]))
    tensor_parallel(elsewhere, init_device_mesh("cpu", (2,), mesh_dim_names=("other",)))
    listed = nn.ModuleList(Expert() for _ in range(2))
    for expert in listed:
        distribute_module(expert, mesh["tensor"])
    return [
        refused(shard_experts, each, mesh=mesh, experts="expert")
        for each in (by_experts, elsewhere, listed)
    ]


def mistakes():
    """Return the texts of the errors, on three ranks."""
    mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("shard", "expert"))
    other = init_device_mesh("cpu", (3, 1), mesh_dim_names=("shard", "expert"))

    def experts(**more):
        stacked = whole().mixture.experts
        for name, count in more.items():
            setattr(stacked, name, nn.Parameter(torch.zeros(count, WIDTH)))
        return stacked

    unlike = nn.ModuleList([Expert(), Expert(), Expert().double()])
    normed = nn.ModuleList([nn.BatchNorm1d(2) for _ in range(3)])
    dealt_out = shard_experts(experts(), mesh=other, experts="expert")
    lonely = whole(group=other.get_group("expert"))
    shard_experts(lonely.mixture.experts, mesh=other, experts="expert")
    alone = dist.new_subgroups(1)[0]
    fully_shard(lonely, mesh=alone)
    listed = nn.ModuleList(Expert() for _ in range(3))
    first = {"ignored_params": {listed[0].up.weight}}
    return [
        refused(shard_experts, listed, mesh=mesh, experts="expert", **first),
        refused(shard_experts, experts(), mesh=mesh, experts="expert"),
        refused(shard_experts, experts(gate=4), mesh=mesh, experts="expert"),
        refused(shard_experts, experts(), mesh=mesh, experts="ep"),
        refused(shard_experts, unlike, mesh=mesh, experts="expert"),
        refused(shard_experts, normed, mesh=mesh, experts="expert"),
        refused(shard_experts, dealt_out, mesh=other, experts="expert"),
        refused(lonely, batches(3, 1)[0, 0, 0]),
    ]


def stack_of_an_owner():
    """Elements of each stack's momentum on this rank, and the collectives of a step of Muon."""
    model, _ = sharded("stacked", 2, 2, align="matrix")
    optimizer, _ = muon_for_experts(model)
    model(batches(4, 1)[0, 0, dist.get_rank()]).backward()
    with CommDebugMode() as counted:
        optimizer.step()
    stacks = optimizer.param_groups[0]["params"]
    state = [optimizer.state.get(param, {}).get("momentum") for param in stacks]
    return [0 if each is None else each.local.numel() for each in state], counted.get_total_counts()


class NormOfStack(torch.optim.SGD):
    """Looks at all experts of a stack together."""

    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.sub_(param.grad / param.grad.norm())


class Rows(torch.optim.SGD):
    """Keeps a number for each row, as Adafactor."""

    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    rows = self.state[param]["rows"] = param.grad.square().mean(-1, keepdim=True)
                    param.data.sub_(param.grad / rows.sqrt())


def refused_optimizers():
    """Why optimizers cannot step experts on an axis of their own."""
    model, _ = sharded("stacked", 2, 2, align="matrix")
    stacks = [param for param in model.parameters() if param.dim() == 3]
    found = []
    for kind in (NormOfStack, Rows):
        optimizer = kind(stacks, lr=0.1)
        found.append(looks_beyond(optimizer))
    return found
