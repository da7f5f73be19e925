# SPDX-License-Identifier: Apache-2.0
"""Models cut along a tensor axis, then sharded, on a `support.world.World` of 2 x 2 ranks."""

import pytest
import torch
from support.models import seeded
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fullshard.core.errors import NotSupportedError, UnshardedOperationError
from fullshard.torch import (
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
    save_full_weights,
    summon_full_params,
)

WIDTH = 6
STEPS = 3
BATCH = 4
MAX_NORM = 0.05


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def whole():
    return seeded(Net).double()


def batches():
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randint(8, (BATCH, 6), generator=generator),
            torch.randint(4, (BATCH, 6), generator=generator),
        )
        for _ in range(STEPS)
    ]


def loss_of(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def column_and_row(layer):
    return {f"{layer}.up": ColwiseParallel(), f"{layer}.down": RowwiseParallel()}


def with_embedding(layer):
    """Everything but norms; the embedding by rows, the head by columns."""
    return {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        **column_and_row(layer),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def sequence(layer):
    """Norms on parts of the sequence: their gradients come as sums that nobody has taken."""
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        f"{layer}.norm": SequenceParallel(),
        f"{layer}.up": ColwiseParallel(input_layouts=Shard(1)),
        f"{layer}.down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


PLANS = {"column and row": column_and_row, "embedding": with_embedding, "sequence": sequence}


def shard(model, mesh, door, **options):
    if door == "wrapper":
        if mesh.ndim == 2:
            options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
        return FullyShardedDataParallel(
            model,
            device_mesh=mesh,
            auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, Layer),
            **options,
        )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def build(plan, door, start="values", *, hybrid=False, **options):
    """The sharded model, and the mesh of the ranks that share its batches.

    ``start`` is where it gets its values from: they are there, come in a state dict of plain
    tensors after it was on the meta device, or of DTensors, or are those of the first rank. With
    ``hybrid`` the two ranks that hold equal parts are replicas.
    """
    if hybrid:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("data", "shard", "tensor"))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = whole()
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    if start == "plain tensors":
        model.to("meta")
    if start == "first rank" and mesh.get_local_rank("data") > 0:
        clear(model)
    cut = {}
    for number in range(len(model.layers)):
        cut.update(PLANS[plan](f"layers.{number}"))
    parallelize_module(model, mesh["tensor"], cut)
    dtensors = {name: value.clone() for name, value in model.state_dict().items()}
    model = shard(model, mesh["data", "shard"] if hybrid else mesh["data"], door, **options)
    if start == "plain tensors":
        model.to_empty(device="cpu")
        model.load_state_dict(plain)
    if start == "dtensors":
        clear(model)
        model.load_state_dict(dtensors)
    return model, mesh["data"]


@torch.no_grad()
def clear(model):
    for param in model.parameters():
        param.zero_()


def train(_group, plan, door, start="values", **options):
    """Norms, whole parameters and their shapes, elements held, after some steps."""
    model, data = build(plan, door, start, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for inputs, targets in batches():
        half = slice(data.get_local_rank() * BATCH // 2, (data.get_local_rank() + 1) * BATCH // 2)
        loss_of(model(inputs[half]), targets[half]).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    params = {name: param.detach().full_tensor() for name, param in model.named_parameters()}
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    return norms, params, shapes, sum(param.span.numel for param in model.parameters())


def unsharded(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def values(_group, plan, door, path):
    """What loading, summoning, drawing and saving find and leave behind, name by name."""
    model, _ = build(plan, door)
    plain = {name: value + 1 for name, value in whole().state_dict().items()}
    model.load_state_dict(plain)
    loaded = {name: unsharded(value) for name, value in model.state_dict().items()}
    save_full_weights(model, path)
    with summon_full_params(model):
        summoned = {
            name: unsharded(param).detach().clone() for name, param in model.named_parameters()
        }
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
    doubled = {name: param.detach().full_tensor() for name, param in model.named_parameters()}
    torch.manual_seed(5)
    for param in model.parameters():
        nn.init.normal_(param)
    drawn = {name: param.detach().full_tensor() for name, param in model.named_parameters()}
    return loaded, summoned, doubled, drawn


def refusals(_group):
    """The errors of what would take one rank's part for the whole."""
    model, _ = build("column and row", "wrapper")
    weight = model.get_parameter("layers.0.up.weight").detach()
    full = weight.detach().full_tensor()
    assert weight.sum().item() == pytest.approx(full.double().sum().item())
    assert weight.max().item() == full.max().item()
    errors = []
    for attempt in (lambda: weight[0], lambda: weight.view(-1), lambda: weight.sum(0)):
        try:
            attempt()
        except UnshardedOperationError as error:
            errors.append(str(error))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    layer = nn.Linear(4, 4)
    sums = DTensor.from_local(layer.weight.detach(), mesh["tensor"], [Partial()])
    layer.weight = nn.Parameter(sums)
    try:
        fully_shard(layer, mesh=mesh["data"])
    except NotSupportedError as error:
        errors.append(str(error))
    return errors


def thawed(_group):
    """A layer is frozen for a step and trained in the next: whole parameters after it."""
    model, data = build("column and row", "function")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (inputs, targets) in enumerate(batches()):
        model.layers[0].requires_grad_(number > 0)
        half = slice(data.get_local_rank() * BATCH // 2, (data.get_local_rank() + 1) * BATCH // 2)
        loss_of(model(inputs[half]), targets[half]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach().full_tensor() for name, param in model.named_parameters()}


def state_dicts(_group, plan, door):
    """The placements of DTensors over both axes, and if they are and load what they should."""
    model, _ = build(plan, door)
    plain = whole().state_dict()
    state = get_model_state_dict(model)
    for name, value in state.items():
        assert torch.equal(unsharded(value), plain[name]), name
    model.load_state_dict({name: value + 1 for name, value in state.items()})
    again = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(again[name], plain[name] + 1) for name in plain)
    return {name: str(getattr(value, "placements", None)) for name, value in state.items()}
