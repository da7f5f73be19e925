# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on ranks that are processes."""

import pytest
import torch
from support.beside import params_of, shard
from support.models import GPT, Block
from support.world import on_processes
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fullshard.checkpoint import open_checkpoint
from fullshard.torch import fully_shard, load_checkpoint, save_checkpoint


def _model(group, seed, kind):
    torch.manual_seed(seed)
    if kind == "wrapper":
        return shard(GPT(), group, kind)
    where = init_device_mesh("cpu", (4,)) if group.size() == 4 else group
    return shard(GPT(), where, kind, [Block])


def save_on(group, path, kind, asynchronous):
    """Save after a step; the values at that time."""
    model = _model(group, 0, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(6).view(1, 6)).sum().backward()
    optimizer.step()
    saving = save_checkpoint(path, model, optimizer, step=1, asynchronous=asynchronous)
    held = params_of(model)
    for _ in range(3):  # collectives of training beside those of the save
        optimizer.step()
    saving.wait()
    return held


def load_on(group, path, kind):
    model = _model(group, 1, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.7)
    loaded = load_checkpoint(path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert loaded.restore_random_state() or loaded.world < group.size()
    return params_of(model)


def columns(saved):
    """A plain module of DTensors cut by columns, to be saved; or by rows, to be loaded into."""
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(0 if saved else 1)
    model = nn.Linear(9, 7, bias=False)
    weight = distribute_tensor(torch.randn(7, 9), mesh, [Shard(1 if saved else 0)])
    model.weight = nn.Parameter(weight)
    return model


def cut_twice(group, path, align):
    """Save a model cut along a tensor axis, then sharded; its values after a step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 6))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"], align=align)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    save_checkpoint(path, model, optimizer, step=1)
    return params_of(model)


@pytest.mark.parametrize(
    ("kind", "asynchronous", "saving", "loading"),
    [("wrapper", True, 3, 2), ("function", True, 4, 3), ("function", False, 2, 4)],
)
def test_saved_and_loaded_over_process_groups(
    gloo_world, tmp_path, kind, asynchronous, saving, loading
):
    saved = gloo_world.run(saving, save_on, tmp_path, kind, asynchronous)[0]
    loaded = gloo_world.run(loading, load_on, tmp_path, "wrapper")[0]
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)


@on_processes(2)
def test_a_rank_that_calls_alone_is_told(group, tmp_path):
    """While rank 0 runs forward; both can go on."""
    model = _model(group, 0, "wrapper")
    if group.rank() == 1:
        with pytest.raises(RuntimeError, match=r"rank 1 calls save_checkpoint\(\)"):
            save_checkpoint(tmp_path, model, step=1)
    model(torch.arange(6).view(1, 6))
    save_checkpoint(tmp_path, model, step=2)
    assert (tmp_path / "step-000000000002").is_dir()


@on_processes(4)
def test_dtensors_in_plain_modules(group, tmp_path):
    saved, loaded = columns(True), columns(False)
    save_checkpoint(tmp_path, saved, step=1)
    load_checkpoint(tmp_path, loaded)
    assert torch.equal(loaded.weight.full_tensor(), saved.weight.full_tensor())


@pytest.mark.parametrize("align", ["element", "row"])
def test_tensors_that_are_cut_along_two_axes_have_rules(gloo_world, tmp_path, align):
    saved = gloo_world.run(4, cut_twice, tmp_path, align)[0]
    checkpoint = open_checkpoint(tmp_path)
    tensors = checkpoint.manifest.tensors
    assert {name.partition("/")[0] for name, t in tensors.items() if not t.tiling} == {"random"}
    assert len(tensors["model/0.weight"].tiling.slicings) == 2
    for name, value in saved.items():
        assert checkpoint.read(f"model/{name}").tobytes() == value.numpy().tobytes()
    checkpoint.verify()
