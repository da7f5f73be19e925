# SPDX-License-Identifier: Apache-2.0
"""One file of weights, written and read by ranks that never hold the model."""

import copy
import json
import sys

import pytest
import safetensors
import safetensors.torch
import torch
from support import weights_file_workers as workers
from support.models import GPT, make, seeded
from support.stack import shard_stack
from support.training import shard
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
def test_memory_stays_below_a_quarter_of_the_model(gloo_world, tmp_path):
    path = tmp_path / "weights.safetensors"
    answers = gloo_world.run(4, workers.stream, path)
    with safetensors.safe_open(path, "pt") as file:
        sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        whole_bytes = 4 * sum(torch.Size(shape).numel() for shape in sizes.values())
        for name in ("0.weight", "7.weight", "12.bias"):
            found = file.get_tensor(name).flatten()
            assert torch.equal(found, workers.expected(name, 0, found.numel()))
        assert file.get_tensor("scale").tolist() == [3.0] * 5
    path.unlink()
    assert whole_bytes >= 4 * workers.SAVING_BYTES
    assert 4 * torch.Size(sizes["0.weight"]).numel() > workers.LOADING_BYTES
    for saving, loading, gathering, right in answers:
        assert saving <= workers.SAVING_BYTES
        assert loading <= workers.LOADING_BYTES
        assert gathering > workers.LOADING_BYTES, "the measurement does not see what it must"
        assert right


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


def test_parameters_on_two_axes_go_through_the_file(gloo_world, tmp_path):
    path = tmp_path / "weights.safetensors"
    answers = gloo_world.run(4, workers.through_a_file_on_two_axes, path)
    assert [same for same, _ in answers] == [True] * 4
    loaded, (_, wanted) = safetensors.torch.load_file(path), answers[0]
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


def header_of(path):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def with_header(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def renamed(header):
    header["other"] = header.pop("weight")


def reshaped(header):
    header["weight"]["shape"].reverse()


def of_another_dtype(header):
    header["weight"]["dtype"] = "I32"


def beyond_the_end(header):
    header["weight"]["data_offsets"] = [each + 4 for each in header["weight"]["data_offsets"]]


def before_the_beginning(header):
    header["bias"]["data_offsets"] = [-12, 0]


def too_short(header):
    header["weight"]["data_offsets"][1] -= 4


def no_offsets(header):
    header["bias"]["data_offsets"] = None


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (renamed, r"model's \['weight'\] are not in it, its \['other'\] not in the model"),
        (reshaped, r"'weight' is F32 of shape \[3, 40\] in the model, F32 of shape \[40, 3\]"),
        (of_another_dtype, r"'weight' is F32 of shape .* I32 of shape"),
        (beyond_the_end, r"'weight' has 480 bytes, which cannot be those at"),
        (before_the_beginning, r"'bias' has 12 bytes, which cannot be those at"),
        (too_short, r"'weight' has 480 bytes, which cannot be those at"),
        (no_offsets, r"'bias' has 12 bytes, which cannot be those at None"),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(tmp_path, spoil, told):
    path = tmp_path / "weights.safetensors"
    plain = nn.Linear(40, 3)
    # The weight is the last in the file.
    safetensors.torch.save_file({"bias": plain.bias.data, "weight": plain.weight.data}, path)
    header, data = header_of(path)
    spoil(header)
    with_header(path, header, data)
    refused_by_two_ranks(path, told)


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
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    refused_by_two_ranks(path, told)


def refused_by_two_ranks(path, told):
    def body(comm):
        model = fully_shard(nn.Linear(40, 3), mesh=comm)
        before = model.weight.local.clone()
        with pytest.raises(ConfigurationError, match=told):
            load_full_weights(model, path)
        return torch.equal(model.weight.local, before)

    assert LocalWorld(2).run(body) == [True] * 2


def test_a_rank_without_the_file_stops_all(gloo_world, tmp_path):
    path = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(dict(nn.Linear(40, 3).state_dict()), path)
    (first, kept), (second, kept_too) = gloo_world.run(
        2, workers.load_from_own_paths, [path, tmp_path / "nowhere"]
    )
    assert "the error is on another rank" in first
    assert "No such file" in second
    assert kept
    assert kept_too


def test_weights_on_the_meta_device_are_refused(tmp_path):
    def body(comm):
        model = fully_shard(nn.Linear(4, 4, device="meta"), mesh=comm)
        with pytest.raises(ConfigurationError, match="call to_empty on the model first"):
            save_full_weights(model, tmp_path / "weights.safetensors")

    LocalWorld(2).run(body)
    assert not list(tmp_path.iterdir())
