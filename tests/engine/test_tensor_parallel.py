# SPDX-License-Identifier: Apache-2.0
"""Parameters that are DTensors along a tensor axis, sharded over the other axis of a mesh."""

from functools import cache, partial

import pytest
import torch
from safetensors.torch import load_file
from support import beside
from support.beside import DOORS, params_of, whole
from support.models import seeded
from support.sampling import survey
from support.world import on_processes
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
    CPUOffload,
    ShardingStrategy,
    fully_shard,
    load_full_weights,
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


def unsharded():
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
    if door == "wrapper" and mesh.ndim == 2:
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    return beside.shard(model, mesh, door, [Layer], **options)


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
    model = unsharded()
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
        half = data.get_local_rank()
        loss_of(model(inputs.chunk(2)[half]), targets.chunk(2)[half]).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    return norms, params_of(model), shapes, sum(param.span.numel for param in model.parameters())


@cache
def in_one_process():
    model, norms = unsharded(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for inputs, targets in batches():
        loss_of(model(inputs), targets).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, params_of(model)


def check(runs):
    expected_norms, expected = in_one_process()
    assert min(expected_norms) > MAX_NORM, "clipping must do something"
    for norms, params, shapes, _ in runs:
        assert norms == pytest.approx(expected_norms, abs=1e-12)
        assert shapes == {name: tuple(value.shape) for name, value in expected.items()}
        torch.testing.assert_close(params, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("plan", "door"), [("column and row", "wrapper"), ("embedding", "function")]
)
def test_steps_are_those_of_one_process(gloo_world, plan, door):
    """Two ranks share each half of the batch; norms are global over both axes."""
    check(gloo_world.run(4, train, plan, door))


@pytest.mark.parametrize(
    ("door", "start", "options"),
    [
        ("function", "values", {"hybrid": True}),
        ("wrapper", "values", {"cpu_offload": CPUOffload(offload_params=True)}),
        ("wrapper", "first rank", {"sync_module_states": True}),
        survey(("function", "plain tensors", {})),
        ("function", "dtensors", {}),
    ],
    ids=[
        *("hybrid", "offload", "first rank", "plain tensors", "dtensors"),
    ],
)
def test_modes_and_sources_of_values(gloo_world, door, start, options):
    check(gloo_world.run(4, train, "sequence", door, start, **options))


def test_a_rank_holds_a_quarter_of_what_both_axes_cut(gloo_world):
    numels = {name: param.numel() for name, param in unsharded().named_parameters()}
    cut = sum(n for name, n in numels.items() if ".up." in name or name.endswith("down.weight"))
    rest = sum(numels.values()) - cut
    held = [held for *_, held in gloo_world.run(4, train, "column and row", "function")]
    assert sum(held) == cut + 2 * rest


def drawn(model):
    torch.manual_seed(5)
    for param in model.parameters():
        nn.init.normal_(param)
    return params_of(model)


@pytest.mark.parametrize(("plan", "door"), [("embedding", "wrapper"), ("sequence", "function")])
@on_processes(4)
def test_values_are_whole_outside_of_steps(group, plan, door, tmp_path):
    """Loading, summoning, drawing and saving find what they should, and leave nothing behind."""
    model, _ = build(plan, door)
    raised = {name: value + 1 for name, value in unsharded().state_dict().items()}
    model.load_state_dict(raised)
    same = partial(torch.testing.assert_close, rtol=0, atol=0)
    same({name: whole(value) for name, value in model.state_dict().items()}, raised)
    save_full_weights(model, tmp_path / "weights.safetensors")
    same(load_file(tmp_path / "weights.safetensors"), raised)
    with summon_full_params(model):
        same(params_of(model), raised)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
    same(params_of(model), {name: 2 * value for name, value in raised.items()})
    same(drawn(model), drawn(unsharded()))


@on_processes(4)
def test_what_needs_the_whole_is_refused(group):
    model, _ = build("column and row", "wrapper")
    weight = model.get_parameter("layers.0.up.weight").detach()
    full = weight.full_tensor()
    assert weight.sum().item() == pytest.approx(full.double().sum().item())
    assert weight.max().item() == full.max().item()
    for attempt in (lambda: weight[0], lambda: weight.view(-1), lambda: weight.sum(0)):
        with pytest.raises(UnshardedOperationError, match=r"up\.weight' of shape \(12, 6\)"):
            attempt()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    layer = nn.Linear(4, 4)
    sums = DTensor.from_local(layer.weight.detach(), mesh["tensor"], [Partial()])
    layer.weight = nn.Parameter(sums)
    with pytest.raises(NotSupportedError, match="'weight' is a DTensor placed as"):
        fully_shard(layer, mesh=mesh["data"])


def thawed(model, rows=slice(None)):
    """A layer is frozen for a step and trained in the next."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (inputs, targets) in enumerate(batches()):
        model.layers[0].requires_grad_(number > 0)
        loss_of(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return params_of(model)


@on_processes(4)
def test_frozen_and_thawed(group):
    model, data = build("column and row", "function")
    half = slice(data.get_local_rank() * BATCH // 2, (data.get_local_rank() + 1) * BATCH // 2)
    torch.testing.assert_close(thawed(model, half), thawed(unsharded()), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("door", "plan"), [*zip(DOORS, ("embedding", "sequence"), strict=True)])
@on_processes(4)
def test_state_dicts_are_placed_on_both_axes(group, plan, door):
    model, _ = build(plan, door)
    plain = unsharded().state_dict()
    state = get_model_state_dict(model)
    assert any("_StridedShard" in str(value.placements) for value in state.values())
    for name, value in state.items():
        assert torch.equal(whole(value), plain[name]), name
    model.load_state_dict({name: value + 1 for name, value in state.items()})
    again = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(again[name], plain[name] + 1) for name in plain)


@on_processes(4)
def test_parameters_go_through_a_file_of_weights(group, tmp_path):
    model, _ = build("column and row", "function")
    before = params_of(model)
    save_full_weights(model, tmp_path / "weights.safetensors")
    clear(model)
    load_full_weights(model, tmp_path / "weights.safetensors")
    torch.testing.assert_close(params_of(model), before, rtol=0, atol=0)
    torch.testing.assert_close(load_file(tmp_path / "weights.safetensors"), before, rtol=0, atol=0)
