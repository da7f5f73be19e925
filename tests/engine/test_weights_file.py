# SPDX-License-Identifier: Apache-2.0
"""One file of weights, written and read by ranks that never hold the model."""

import copy
import json
import re
import sys
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from support.models import GPT, make, seeded
from support.stack import shard_stack
from support.training import shard
from support.world import on_processes
from torch import nn

from fullshard.core.errors import ConfigurationError
from fullshard.testing import LocalComm, LocalWorld
from fullshard.torch import (
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
    load_full_weights,
    save_full_weights,
)
from fullshard.torch.state import weights_file as module

LAYERS, WIDTH = 16, 2048
ROWS = 4096  # of the largest parameter
SAVING_BYTES = 68 * 10**6  # a quarter of the whole, for two units
LOADING_BYTES = 28 * 10**6  # less than the largest parameter
MODULUS = 65_521


def build(group):
    """A model of which no rank has ever had more than its shard."""
    with torch.device("meta"):
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        model = nn.Sequential(nn.Embedding(ROWS, WIDTH), *layers)
        model.register_buffer("scale", torch.ones(5))
    for layer in model:
        fully_shard(layer, mesh=group)
    fully_shard(model, mesh=group)
    model.to_empty(device="cpu")
    model.scale.fill_(3.0)
    for name, param in model.named_parameters():
        param.local.copy_(expected(name, param.span.start, param.span.stop))
    return model


def expected(name, start, stop):
    """The elements [start, stop) of a parameter."""
    number = sum(name.encode())
    return ((torch.arange(start, stop) + number) % MODULUS).float()


def extra_bytes_of(action):
    """How far the process's memory rises above where it is before ``action``; Linux only."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    action()
    return _status("VmHWM") - before


def _status(field):
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 56)


def plain(name, seed=0):
    if name == "tied gpt":
        return seeded(lambda: GPT(tied=True), seed)
    return make(name, seed=seed)


def plain_values(name, seed):
    return {key: value.clone() for key, value in plain(name, seed).state_dict().items()}


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
@on_processes(4)
def test_memory_stays_below_a_quarter_of_the_model(group, tmp_path):
    path = tmp_path / "weights.safetensors"
    model = build(group)
    whole_bytes = sum(4 * param.numel() for param in model.parameters())
    assert whole_bytes >= 4 * SAVING_BYTES
    assert 4 * model[0].weight.numel() > LOADING_BYTES
    assert extra_bytes_of(lambda: save_full_weights(model, path)) <= SAVING_BYTES
    with safetensors.safe_open(path, "pt") as file:
        for name in ("0.weight", "7.weight", "12.bias"):
            found = file.get_tensor(name).flatten()
            assert torch.equal(found, expected(name, 0, found.numel()))
        assert file.get_tensor("scale").tolist() == [3.0] * 5
    for param in model.parameters():
        param.local.zero_()
    assert extra_bytes_of(lambda: load_full_weights(model, path)) <= LOADING_BYTES
    for name, param in model.named_parameters():
        assert torch.equal(param.local, expected(name, param.span.start, param.span.stop)), name
    gathering = extra_bytes_of(lambda: model[0].weight.full_tensor())
    assert gathering > LOADING_BYTES, "the measurement does not see what it must"
    torch.distributed.barrier(group)
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("name", ["odd", "tied gpt", "conv"])
def test_what_was_saved_is_loaded_in_pieces(small_pieces, tmp_path, name, strategy):
    wanted = plain_values(name, seed=3)
    path = tmp_path / "weights.safetensors"

    def body(comm):
        model = shard(plain(name), name.removeprefix("tied "), comm, strategy=strategy)
        model.load_state_dict(wanted)
        save_full_weights(model, path)
        model.load_state_dict(plain_values(name, seed=4))
        load_full_weights(model, path)
        return model.state_dict()

    for found in LocalWorld(3).run(body):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(loaded[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("align", ["element", "row", "matrix"])
def test_a_unit_goes_to_the_file_by_one_call(tmp_path, monkeypatch, align):
    path, calls = tmp_path / "weights.safetensors", []
    own = LocalComm.all_to_all

    def counting(comm, *args, **kwargs):
        calls.append(comm.rank)
        return own(comm, *args, **kwargs)

    monkeypatch.setattr(LocalComm, "all_to_all", counting)
    plain = nn.Sequential(*(nn.Linear(5, 5, dtype=dtype) for dtype in (None, torch.float64)))
    wanted = plain.state_dict()

    def body(comm):
        model = copy.deepcopy(plain)
        for layer in model:
            fully_shard(layer, mesh=comm, align=align)
        save_full_weights(fully_shard(model, mesh=comm, align=align), path)

    LocalWorld(3).run(body)
    assert sorted(calls) == [0, 0, 1, 1, 2, 2]
    loaded = safetensors.torch.load_file(path)
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)


def test_of_replicas_the_first_writes_and_all_read(small_pieces, tmp_path):
    path = tmp_path / "weights.safetensors"
    wanted = plain_values("odd", seed=3)

    def body(comm):
        groups = comm.block(2), comm.subgroup([comm.rank % 2, comm.rank % 2 + 2])
        model = FullyShardedDataParallel(plain("odd"), groups, ShardingStrategy.HYBRID_SHARD)
        model.load_state_dict(wanted)
        save_full_weights(model, path)
        model.load_state_dict(plain_values("odd", seed=4))
        load_full_weights(model, path)
        return model.state_dict()

    for found in LocalWorld(4).run(body):
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_another_number_of_ranks_loads_what_a_plain_model_saved(small_pieces, tmp_path):
    path = tmp_path / "weights.safetensors"
    dtypes = (torch.bfloat16, torch.float64, torch.float32)
    plain = nn.Sequential(*(nn.Linear(7, 5, dtype=dtype) for dtype in dtypes))
    plain.register_buffer("counts", torch.arange(9)[::2])
    safetensors.torch.save_file({k: v.contiguous() for k, v in plain.state_dict().items()}, path)

    def body(comm):
        model = nn.Sequential(*(nn.Linear(7, 5, dtype=dtype) for dtype in dtypes))
        model.register_buffer("counts", torch.zeros(10, dtype=torch.int64)[::2])
        for layer in model:
            fully_shard(layer, mesh=comm)
        fully_shard(model, mesh=comm)
        load_full_weights(model, path)
        params = {name: param.full_tensor() for name, param in model.named_parameters()}
        return params | dict(model.named_buffers())

    for size in (1, 2, 4):
        for found in LocalWorld(size).run(body):
            assert all(torch.equal(found[k], v) for k, v in plain.state_dict().items())


def test_loaded_weights_are_computed_with(tmp_path):
    """Also by a unit that was still gathered when they were loaded."""
    path = tmp_path / "weights.safetensors"

    def body(comm):
        model = shard_stack(comm, reshard_after_forward=False)
        save_full_weights(model, path)
        inputs = torch.ones(2, 37)
        with torch.no_grad():
            before = model(inputs)
            for param in model.parameters():
                param.zero_()
            zero = model(inputs)
            load_full_weights(model, path)
            return torch.equal(model(inputs), before), bool(zero.any())

    assert LocalWorld(2).run(body) == [(True, False)] * 2


HEADER = {
    "bias": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
    "weight": {"dtype": "F32", "shape": [3, 40], "data_offsets": [12, 492]},  # the last in the file
}


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        (
            "weight",
            {"shape": [40, 3]},
            r"F32 of shape \[3, 40\] in the model, F32 of shape \[40",
        ),
        ("weight", {"dtype": "I32"}, r"'weight' is F32 of shape .* I32 of shape"),
        (
            "weight",
            {"data_offsets": [16, 496]},
            r"'weight' has 480 bytes, which cannot be",
        ),
        (
            "weight",
            {"data_offsets": [12, 488]},
            r"'weight' has 480 bytes, which cannot be",
        ),
        ("bias", {"data_offsets": [-12, 0]}, r"'bias' has 12 bytes, which cannot be those at"),
        ("bias", {"data_offsets": None}, r"'bias' has 12 bytes, which cannot be those at None"),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(tmp_path, name, change, told):
    refused_by_two_ranks(tmp_path, HEADER | {name: HEADER[name] | change}, told)


def test_a_file_of_other_names_changes_nothing(tmp_path):
    told = r"model's \['weight'\] are not in it, its \['other'\] not in the model"
    refused_by_two_ranks(tmp_path, {"bias": HEADER["bias"], "other": HEADER["weight"]}, told)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "no safetensors file"),
        ((24).to_bytes(8, "little") + b'{"__metadata__":{"a":1}}', "has other than texts"),
        (b"\xff" * 64, "no safetensors file: its header has"),
        ((9).to_bytes(8, "little") + b"{'weight'", "no safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "no JSON object"),
    ],
)
def test_what_is_no_weights_file_is_refused(tmp_path, content, told):
    refused_by_two_ranks(tmp_path, content, told)


def refused_by_two_ranks(folder, content, told):
    """``content`` is that of the file, or its header in front of the bytes of two tensors."""
    if isinstance(content, dict):
        header = json.dumps(content).encode()
        content = len(header).to_bytes(8, "little") + header + bytes(492)
    path = folder / "weights.safetensors"
    path.write_bytes(content)

    def body(comm):
        model = fully_shard(nn.Linear(40, 3), mesh=comm)
        before = model.weight.local.clone()
        with pytest.raises(ConfigurationError, match=told):
            load_full_weights(model, path)
        assert torch.equal(model.weight.local, before)

    LocalWorld(2).run(body)


@on_processes(2)
def test_a_rank_without_the_file_stops_all(group, tmp_path):
    path = tmp_path / "weights.safetensors"
    if group.rank() == 0:
        safetensors.torch.save_file(dict(nn.Linear(40, 3).state_dict()), path)
    model = fully_shard(nn.Linear(40, 3), mesh=group)
    before = [param.local.clone() for param in model.parameters()]
    told = ("the error is on another rank", "No such file")[group.rank()]
    with pytest.raises(ConfigurationError, match=told):
        load_full_weights(model, path if group.rank() == 0 else tmp_path / "nowhere")
    assert all(map(torch.equal, before, [param.local for param in model.parameters()]))


def test_weights_on_the_meta_device_are_refused(tmp_path):
    def body(comm):
        model = fully_shard(nn.Linear(4, 4, device="meta"), mesh=comm)
        with pytest.raises(ConfigurationError, match="call to_empty on the model first"):
            save_full_weights(model, tmp_path / "weights.safetensors")

    LocalWorld(2).run(body)
    assert not list(tmp_path.iterdir())
